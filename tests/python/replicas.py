"""Train many small jobs with one pair of worker processes, and each again in this process.

Starting workers takes seconds, and a tiny training a few tenths of one. These tests check the
engine, through the same function that workers call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from conftest import SAMPLE_SEED, full, largest_difference, record_outcome

import pybackend
from pybackend.core.api.calls import read_keras_defaults
from pybackend.core.api.sent_objects import add_custom_objects, encode_model, find_source
from pybackend.core.data.arrays import count_rows, flatten_data, nest, shard
from pybackend.core.data.row_store import write_columns
from pybackend.core.data.sharding import cut_shards, replay_batches
from pybackend.core.job.codec import decode
from pybackend.core.job.job import MODEL_OBJECTS, TrainingJob, make_job
from pybackend.core.job.storage_options import ModelOptions
from pybackend.core.model.serialization import read_own_model
from pybackend.core.model.transfer import read_objects, read_weights
from pybackend.core.model.view import ModelView
from pybackend.core.worker import JOB

WORKERS = 2


@dataclass
class Case:
    """One training: a compiled model, rows, and arguments of `barrier_train`."""

    build: Callable[[], Any]
    data: Any
    epochs: int = 2
    batch_size: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6
    custom_objects: Mapping[str, Any] | None = None
    callbacks: Sequence[Any] = ()
    shards: Sequence[slice] | None = None
    """Rows of each rank, unshuffled; None deals them in turns."""
    validation: Any = None
    """Rows to validate on."""
    trainable_only: bool = False
    """Compare the trained weights alone: what else the model keeps is averaged over workers."""


@dataclass
class Trained:
    """Result of the workers for a case."""

    model: Any
    history: dict[str, list[Any]]
    digests: list[str]
    notes: list[str]
    epochs: list[int]
    """Numbers of the epochs that were reported, from 1."""
    seconds: list[float]
    audit: dict[str, Any] | None
    """What the audit of its steps has found."""


def train_all(cases: Mapping[str, Case], folder: Path) -> dict[str, Any]:
    """Train every case on two workers, or as many as it has shards.

    Returns a `Trained`, or the text of an error, by name.
    """
    workers = max(_workers(case) for case in cases.values())
    jobs = {name: _prepare(case, folder / name) for name, case in cases.items()}
    counts = {name: found for name, (_, found) in jobs.items()}
    per_rank = pybackend.barrier_run(
        "local", _work, str(folder), counts, workers=workers, verbose=2
    )
    return {name: _gathered(case, folder / name, name, per_rank) for name, case in cases.items()}


def _workers(case: Case) -> int:
    return WORKERS if case.shards is None else len(case.shards)


def global_data(case: Case) -> tuple[Any, int]:
    """Return the rows of all workers for each step of all epochs, and the steps per epoch."""
    import tensorflow as tf

    columns = flatten_data(case.data, keras.config.floatx())
    epochs = range(case.settings.get("initial_epoch", 0), case.epochs)
    batches = [rows for epoch in epochs for rows in _batches(case, columns, epoch)]
    if limit := case.settings.get("steps_per_epoch"):
        batches = batches[: limit * len(epochs)]

    def generate() -> Any:
        for rows in batches:
            yield nest({key: array[rows] for key, array in columns.items()})

    specs = {key: tf.TensorSpec([None, *a.shape[1:]], a.dtype) for key, a in columns.items()}
    data = tf.data.Dataset.from_generator(generate, output_signature=nest(specs))
    return data, len(batches) // max(1, len(epochs))


def _batches(case: Case, columns: Any, epoch: int) -> list[Any]:
    count = count_rows(columns)
    if case.shards is None:
        shuffle = case.settings.get("shuffle", True)
        return replay_batches(count, WORKERS, case.batch_size, seed=3, epoch=epoch, shuffle=shuffle)
    shards = [np.arange(count)[part] for part in case.shards]
    edges = cut_shards([len(shard) for shard in shards], case.batch_size)
    return [
        np.concatenate([s[e[n] : e[n + 1]] for s, e in zip(shards, edges, strict=True)])
        for n in range(edges.shape[1] - 1)
    ]


def named(cases: Iterable[str], daily: Sequence[str]) -> list[Any]:
    """Return case names as parameters of a test; those that are not in ``daily`` are `full`."""
    assert set(daily) <= set(cases), set(daily) - set(cases)
    return [name if name in daily else full(name) for name in cases]


def sampled(cases: Iterable[str], daily: int) -> list[Any]:
    """Return case names as parameters of a test; all but a random sample of them are `full`."""
    names = list(cases)
    return named(names, random.Random(f"{SAMPLE_SEED}, {names[0]}").sample(names, daily))


def chosen(cases: Mapping[str, Any], request: Any) -> dict[str, Any]:
    """Return the cases that this run's tests request by their parameter ``name``."""
    specs = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.module is request.module
    ]
    names = {spec.params.get("name") for spec in specs if spec is not None}
    return {name: case for name, case in cases.items() if name in names}


def replay(case: Case, callbacks: Sequence[Any] = ()) -> tuple[Any, dict[str, list[Any]]]:
    """Train a case in this process with Keras's own fit."""
    keras.utils.set_random_seed(1)
    model = case.build()
    model.jit_compile = False
    model.run_eagerly = False
    model.steps_per_execution = 1
    data, steps = global_data(case)
    weights = case.settings.get("class_weight")
    frequency = case.settings.get("validation_freq", 1)
    fitted = model.fit(
        data,
        epochs=case.epochs,
        initial_epoch=case.settings.get("initial_epoch", 0),
        steps_per_epoch=steps,
        validation_data=case.validation,
        validation_freq=frequency if isinstance(frequency, int) else list(frequency),
        callbacks=list(callbacks),
        shuffle=False,
        class_weight=weights and {n: weights.get(n, 1.0) for n in range(3)},
        verbose=0,
    )
    return model, fitted.history


def check_equal(
    case: Case, trained: Any, callbacks: Sequence[Any] = (), name: str | None = None
) -> tuple[Any, dict[str, list[Any]]]:
    """Assert that the workers' result equals that of one process; return the latter.

    The result is recorded under the name, if there is one.
    """
    assert isinstance(trained, Trained), trained
    model, history = replay(case, callbacks)
    assert len(set(trained.digests)) == 1
    assert set(trained.history) == set(history)
    found = difference(case, model, trained.model)
    if name is not None:
        record_outcome(name, found, trained.notes)
    assert found <= case.tolerance
    bound = max(1e-5, case.tolerance)
    for name, values in history.items():
        np.testing.assert_allclose(trained.history[name], values, rtol=bound, atol=bound)
    return model, history


def difference(case: Case, one: Any, other: Any) -> float:
    """Return the largest absolute difference between the weights of two models."""
    if not case.trainable_only:
        return largest_difference(one, other)
    pairs = zip(one.trainable_variables, other.trainable_variables, strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


def _prepare(case: Case, folder: Path) -> tuple[TrainingJob, dict[str, list[int]]]:
    keras.utils.set_random_seed(1)
    model = case.build()
    arguments = {
        "workers": WORKERS,
        "epochs": case.epochs,
        "batch_size": case.batch_size,
        "seed": 3,
        "timeout": 30,
        "model_options": ModelOptions(safe_mode=False),
        **case.settings,
    }
    job = make_job(TrainingJob, arguments)
    defaults = {**read_keras_defaults(), "model_source": find_source(model)}
    job = replace(job, **defaults)
    view = ModelView(model)
    custom_objects = add_custom_objects(view, case.custom_objects)
    files = encode_model(view, custom_objects, job, list(case.callbacks))
    columns = flatten_data(case.data, job.floatx)
    validation = None if case.validation is None else flatten_data(case.validation, job.floatx)
    counts: dict[str, list[int]] = {"train": []} | ({"validation": []} if validation else {})
    for rank in range(_workers(case)):
        own = folder / str(rank)
        own.mkdir(parents=True)
        for name, content in files.items():
            (own / name).write_bytes(content)
        (own / JOB).write_text(job.to_json())
        rows = shard(columns, WORKERS, rank)
        if case.shards is not None:
            rows = {key: array[case.shards[rank]] for key, array in columns.items()}
        counts["train"].append(count_rows(rows))
        if validation is not None:
            part = shard(validation, WORKERS, rank)
            counts["validation"].append(count_rows(part))
            write_columns(own / "validation", part)
        write_columns(own / "train", columns if job.shuffle == "global" else rows)
    return job, counts


def _work(context: Any, folder: str, counts: Mapping[str, Mapping[str, list[int]]]) -> Any:
    from pybackend.core.collective import join_mesh
    from pybackend.core.engine.train import train
    from pybackend.core.job.messages import EpochEnded, Note
    from pybackend.core.net.rendezvous import address_of, listen

    server = listen("127.0.0.1")
    Path(folder, f"address-{context.rank}.new").write_text(address_of(server))
    Path(folder, f"address-{context.rank}.new").rename(Path(folder, f"address-{context.rank}"))
    places = [Path(folder, f"address-{rank}") for rank in range(context.world_size)]
    while not all(place.exists() for place in places):
        time.sleep(0.01)
    peers = [place.read_text() for place in places]
    collective = join_mesh(server, peers, context.rank, "token", 60)
    found = {}
    for name, rows in counts.items():
        own = Path(folder, name, str(context.rank))
        job = decode((own / JOB).read_text(), TrainingJob)
        events: list[Any] = []

        try:
            trained = train(job, collective, rows, own, events.append)
            outcome = {
                "history": trained.history,
                "digest": trained.weights_sha256,
                "inputs": trained.inputs,
                "notes": [event.text for event in events if isinstance(event, Note)],
                "epochs": [event.epoch for event in events if isinstance(event, EpochEnded)],
                "seconds": trained.seconds,
                "audit": trained.audit and asdict(trained.audit),
            }
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        found[name] = outcome
    collective.close()
    return found


def _gathered(case: Case, folder: Path, name: str, per_rank: list[Any]) -> Any:
    outcomes = [found[name] for found in per_rank]
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        return "\n".join(errors)
    path = next(path for path in (folder / "0").iterdir() if path.name.startswith("trained."))
    sent = folder / "0" / MODEL_OBJECTS
    if sent.exists():
        model = read_objects(sent.read_bytes())["model"]
        kind = path.name.partition(".")[2]
        read_weights(model, path.read_bytes(), kind, outcomes[0]["inputs"])
    else:
        known = add_custom_objects(ModelView(case.build()), case.custom_objects)
        model = read_own_model(path.read_bytes(), custom_objects=known, safe_mode=False)
    return Trained(
        model,
        outcomes[0]["history"],
        [outcome["digest"] for outcome in outcomes],
        outcomes[0]["notes"],
        outcomes[0]["epochs"],
        [outcome["seconds"] for outcome in outcomes],
        outcomes[0]["audit"],
    )
