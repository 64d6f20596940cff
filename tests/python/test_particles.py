"""The example of particles: its events, features, files, and the results of two workers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import largest_difference, shared_spark

import pybackend
from pybackend.core.launchers.spark.sessions import driver_python

sys.path.append(str(Path(__file__).parents[2] / "examples" / "particles"))

import features
import generate
import layout
import plots
import reading
import scores
import spark_session
import training

# An example, not part of the package.
pytestmark = pytest.mark.full
EVENTS, SEED, FILES = 600, 3, 3


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session, driver_python(session):
        spark_session.send_code(session)
        yield session


@pytest.fixture(scope="module")
def prepared(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return files of a few events, their rows, and the features of these."""
    folder = tmp_path_factory.mktemp("particles")
    events = generate.generate(spark, EVENTS, SEED)
    found = features.make_features(events).cache()
    most = found.agg({"particles": "max"}).first()[0]
    train, test = features.prepare(found, SEED, most)
    features.in_order(test, 1).write.parquet(str(folder / "test.parquet"))
    written = pybackend.write_tfrecords(features.in_order(train, FILES), folder / "train")
    rows = [row.asDict() for row in train.orderBy("order").collect()]
    return {
        "features": found.orderBy("event").toPandas(),
        "most": most,
        "train": {name: np.array([row[name] for row in rows], "float32") for name in rows[0]},
        "test": folder / "test.parquet",
        "files": written.files,
    }


def test_an_event_depends_on_its_number_and_the_seed_alone(spark: Any, prepared: Any) -> None:
    frame = generate.generate(spark, 4, SEED).coalesce(1).toPandas()
    for row in frame.to_dict("records"):
        again = generate.simulate(row["event"], SEED)
        assert list(row) == list(again)
        for name, value in again.items():
            np.testing.assert_array_equal(np.asarray(row[name], "float32"), np.float32(value))
    assert generate.simulate(0, SEED)["met"] != generate.simulate(0, SEED + 1)["met"]
    assert set(prepared["features"]["label"]) == {0, 1, 2}


def passes(event: dict[str, Any]) -> bool:
    """Apply the trigger, particle by particle: a hard, isolated lepton."""
    particles = list(
        zip(*(event[name].tolist() for name in ("pt", "eta", "phi", "kind")), strict=True)
    )
    least = {generate.CHARGED: 0.5, generate.NEUTRAL: 1.0, generate.PHOTON: 1.0}
    for place, (pt, eta, phi, kind) in enumerate(particles):
        if kind < generate.ELECTRON or pt <= 23:
            continue
        beside = 0.0
        for other, (its_pt, its_eta, its_phi, its_kind) in enumerate(particles):
            apart = abs(math.remainder(phi - its_phi, 2 * math.pi))
            is_near = math.hypot(eta - its_eta, apart) < 0.3
            if other != place and is_near and its_pt > least.get(its_kind, math.inf):
                beside += its_pt
        if beside / pt < 0.45:
            return True
    return False


def test_events_with_an_isolated_lepton_are_kept(prepared: Any) -> None:
    kept = set(prepared["features"]["event"])
    numbers = range(150)
    found = [number for number in numbers if passes(generate.simulate(number, SEED))]
    assert found == [number for number in numbers if number in kept]
    assert 0 < len(found) < len(numbers)


def test_a_row_has_the_published_layout(prepared: Any) -> None:
    assert layout.PARTICLES == 801
    assert len(layout.PARTICLE_FEATURES) == 19
    assert len(layout.HIGH_LEVEL_FEATURES) == 14
    train, most = prepared["train"], prepared["most"]
    count = len(train["order"])
    assert {n: train[n].shape for n in (layout.HLF, layout.GRU, layout.LABEL)} == {
        layout.HLF: (count, 14),
        layout.GRU: (count, 19 * most),
        layout.LABEL: (count, 3),
    }
    assert (train[layout.LABEL].sum(1) == 1).all()
    assert train[layout.HLF].min() >= 0
    assert train[layout.HLF].max() <= 1

    first = prepared["features"].iloc[0]
    event = generate.simulate(int(first["event"]), SEED)
    described = features.describe_particles(event)
    lepton = features.find_lepton(described)
    assert lepton is not None
    own = described[lepton]
    high = dict(zip(layout.HIGH_LEVEL_FEATURES, first["hfeatures"], strict=True))
    assert high["lepton_pt"] == np.float32(own[4])
    assert high["lepton_is_electron"] + own[17] == 1
    jets = (event["jet_pt"] > 30) & (np.abs(event["jet_eta"]) < 2.6)
    assert high["jets"] == jets.sum()
    np.testing.assert_allclose(high["ht"], event["jet_pt"][jets].sum(), rtol=1e-5)
    particles = first["lfeatures"].reshape(-1, 19)
    assert len(particles) == first["particles"]
    np.testing.assert_allclose(particles.mean(0), 0, atol=1e-4)
    # The nearest to the lepton is itself, and the only electron or muon.
    assert particles[-1, 16] + particles[-1, 17] == particles[:, 16:18].sum(1).max()


def test_rows_that_were_not_filled_up_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # In total as many numbers as two rows of two particles.
    ragged = pa.array([np.zeros(19), np.zeros(57)], pa.list_(pa.float32()))
    labels = pa.array([np.eye(3)[0], np.eye(3)[1]], pa.list_(pa.float32()))
    table = pa.table({layout.GRU: ragged, layout.LABEL: labels})
    pq.write_table(table, tmp_path / "ragged.parquet")
    with pytest.raises(ValueError, match=f"column {layout.GRU} are of several lengths"):
        reading.read_parquet(tmp_path / "ragged.parquet", ["gru_input"])


def test_classes_are_balanced_and_the_test_is_apart(prepared: Any) -> None:
    _, labels = reading.read_parquet(prepared["test"])
    counts = prepared["train"][layout.LABEL].sum(0) + labels.sum(0)
    rarest = prepared["features"]["label"].value_counts().min()
    assert (np.abs(counts - rarest) < 5 * math.sqrt(rarest)).all()
    assert 0.1 < len(labels) / counts.sum() < 0.3


def test_records_and_parquet_give_the_same_rows(spark: Any, prepared: Any, tmp_path: Path) -> None:
    both = ("gru_input", "hlf_input")
    parts = [
        list(reading.read_batches(prepared["files"], both, 32, n, FILES)) for n in range(FILES)
    ]
    read = {name: np.concatenate([x[name] for part in parts for x, _ in part]) for name in both}
    train = prepared["train"]
    np.testing.assert_array_equal(read["hlf_input"], train[layout.HLF])
    assert read["gru_input"].shape[1:] == (prepared["most"], 19)
    np.testing.assert_array_equal(
        read["gru_input"].reshape(len(train["order"]), -1), train[layout.GRU]
    )
    labels = np.concatenate([y for part in parts for _, y in part])
    np.testing.assert_array_equal(labels, train[layout.LABEL])

    # As in the larger of the published files: vectors, and lists of lists.
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as f

    flat = spark.read.parquet(str(prepared["test"]))
    places = f.sequence(f.lit(0), f.lit(prepared["most"] - 1))
    nested = f.transform(places, lambda place: f.slice(layout.GRU, place * 19 + 1, 19))
    flat.select(
        array_to_vector(layout.HLF).alias(layout.HLF),
        nested.alias(layout.GRU),
        array_to_vector(layout.LABEL).alias(layout.LABEL),
    ).write.parquet(str(tmp_path / "nested"))
    flat.select(layout.HLF, layout.LABEL).write.parquet(str(tmp_path / "small"))
    again = reading.read_frame(spark, str(tmp_path / "nested"))
    inputs, labels = reading.read_parquet(prepared["test"])
    small, same = reading.read_parquet(tmp_path / "small", ["hlf_input"])
    np.testing.assert_array_equal(small["hlf_input"], inputs["hlf_input"])
    np.testing.assert_array_equal(same, labels)
    frame = reading.read_frame(spark, str(tmp_path / "small"))
    assert frame.columns == [layout.HLF, layout.LABEL]
    rows = again.toPandas()
    np.testing.assert_allclose(np.stack(rows[layout.HLF]), inputs["hlf_input"])
    np.testing.assert_array_equal(
        np.stack(rows[layout.GRU]).reshape(inputs["gru_input"].shape), inputs["gru_input"]
    )
    np.testing.assert_array_equal(np.stack(rows[layout.LABEL]), labels)


def test_two_workers_reach_the_area_of_one_process(prepared: Any, tmp_path: Path) -> None:
    plan = replace(training.Plan(), epochs=1, batch_size=32, dropout=0.0)
    result = training.train("inclusive", prepared["files"], 2, plan)
    alone = training.train_in_one_process("inclusive", prepared["files"], 2, plan)
    assert result.model.count_params() == 12_353  # as published
    assert largest_difference(result.model, alone) < 1e-5
    inputs, labels = reading.read_parquet(prepared["test"])
    found = [training.predict("inclusive", model, inputs) for model in (result.model, alone)]
    areas = [scores.mean_area(labels, one) for one in found]
    assert areas[0] == pytest.approx(areas[1], abs=1e-3)
    assert 0.4 < areas[0] < 1

    # Any number of slots without particles changes nothing.
    wider = {**inputs, "gru_input": np.pad(inputs["gru_input"], ((0, 0), (0, 40), (0, 0)))}
    again = training.predict("inclusive", alone, wider)
    np.testing.assert_allclose(again, found[1], atol=1e-6)

    shown = {"inclusive": found[0], "one process": found[1]}
    plots.draw_roc(labels, shown, tmp_path / "roc.png")
    plots.draw_confusion(labels, shown, tmp_path / "confusion.png")
    for name in ("roc.png", "confusion.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_an_area_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(1)
    is_of_class, ranked = rng.uniform(size=60) < 0.4, rng.integers(0, 9, 60) / 8
    ours, others = ranked[is_of_class][:, None], ranked[~is_of_class]
    pairs = (ours > others).mean() + (ours == others).mean() / 2
    false, true = scores.roc_curve(is_of_class, ranked)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert scores.area(false, true) == pytest.approx(pairs)
    labels = np.eye(3)[[0, 1, 2, 2]]
    taken = np.eye(3)[[0, 1, 2, 0]]
    np.testing.assert_array_equal(
        scores.confusion(labels, taken), [[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]]
    )
