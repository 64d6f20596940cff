"""From events to rows: the filter, both kinds of features, and training and test rows.

The steps, the cuts and the columns are those of the published pipeline, in Spark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from generate import CHARGED, ELECTRON, MUON, NEUTRAL, PHOTON
from layout import (
    CLASSES,
    GRU,
    HIGH_LEVEL_FEATURES,
    HLF,
    LABEL,
    MOST_OF_KIND,
    PARTICLE_FEATURES,
    PARTICLES,
)

_COLUMNS = {
    "event": "long",
    "label": "int",
    "particles": "int",
    "lfeatures": "array<float>",
    "hfeatures": "array<float>",
}
Array = np.ndarray[Any, Any]
_LEAST_PT = {CHARGED: 0.5, NEUTRAL: 1.0, PHOTON: 1.0, ELECTRON: 0.5, MUON: 0.5}
_LEPTON_PT, _LEPTON_ISOLATION = 23.0, 0.45
_JET_PT, _JET_ETA = 30.0, 2.6
_CONE = 0.3
_PT, _ETA, _PHI, _CHARGED_ISOLATION, _NEUTRAL_ISOLATION = 4, 5, 6, 10, 12
_TEST_SHARE = 0.2


def make_features(events: Any) -> Any:
    """Filter events, and compute the features of those that pass.

    Parameters
    ----------
    events
        A DataFrame as `generate` makes it.

    Returns
    -------
    DataFrame
        ``event``, ``label``, ``particles`` (how many an event has), ``lfeatures`` (19 for each,
        farthest from the lepton first, standardized in the event) and ``hfeatures`` (14).
    """

    def compute(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            rows = [_features_of(event) for event in batch.to_dict("records")]
            yield pd.DataFrame([row for row in rows if row is not None], columns=list(_COLUMNS))

    return events.mapInPandas(compute, ", ".join(f"{n} {kind}" for n, kind in _COLUMNS.items()))


def _features_of(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row of features, or None if the event has no isolated lepton."""
    particles = describe_particles(event)
    lepton = find_lepton(particles)
    if lepton is None:
        return None
    listed = arrange(particles, lepton)
    return {
        "event": event["event"],
        "label": event["label"],
        "particles": len(listed),
        "lfeatures": listed.astype("float32").ravel(),
        "hfeatures": describe_event(event, particles[lepton]).astype("float32"),
    }


def describe_particles(event: Mapping[str, Any]) -> Array:
    """Return the 19 features of each particle above its threshold, shape (particles, 19)."""
    columns = ("pt", "eta", "phi", "kind", "charge", "x", "y", "z")
    pt, eta, phi, kind, charge, x, y, z = (np.asarray(event[n], "float64") for n in columns)
    kept = pt > np.choose(kind.astype(int), [_LEAST_PT[k] for k in sorted(_LEAST_PT)])
    pt, eta, phi, kind, charge, x, y, z = (
        column[kept] for column in (pt, eta, phi, kind, charge, x, y, z)
    )
    is_near = _distance(eta[:, None] - eta, phi[:, None] - phi) < _CONE
    np.fill_diagonal(is_near, False)
    isolations = [(is_near * (pt * (kind == of))).sum(1) / pt for of in (CHARGED, PHOTON, NEUTRAL)]
    momentum = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
    kinds = [kind == of for of in (CHARGED, NEUTRAL, PHOTON, ELECTRON, MUON)]
    energy = pt * np.cosh(eta)
    return np.stack([energy, *momentum, pt, eta, phi, x, y, z, *isolations, *kinds, charge], axis=1)


def find_lepton(particles: Array) -> int | None:
    """Return the index of the first hard, isolated electron, or else muon."""
    isolation = particles[:, _CHARGED_ISOLATION : _NEUTRAL_ISOLATION + 1].sum(axis=1)
    passes = (particles[:, _PT] > _LEPTON_PT) & (isolation < _LEPTON_ISOLATION)
    for column in (16, 17):
        found = np.flatnonzero(passes & (particles[:, column] > 0))
        if len(found):
            return int(found[0])
    return None


def arrange(particles: Array, lepton: int) -> Array:
    """Return the lepton and the allowed number of each kind, farthest first, standardized."""
    chosen = [lepton]
    for column, most in zip((13, 14, 15), MOST_OF_KIND, strict=True):
        chosen += np.flatnonzero(particles[:, column] > 0)[:most].tolist()
    rows = particles[chosen]
    center = particles[lepton]
    order = np.argsort(-_distance(rows[:, _ETA] - center[_ETA], rows[:, _PHI] - center[_PHI]))
    rows = rows[order]
    spread = rows.std(axis=0)
    standardized: Array = (rows - rows.mean(axis=0)) / np.where(spread > 0, spread, 1)
    return standardized


def describe_event(event: Mapping[str, Any], lepton: Array) -> Array:
    """Return the 14 high-level features, in the order of `layout.HIGH_LEVEL_FEATURES`."""
    jet_pt, jet_eta = np.asarray(event["jet_pt"]), np.asarray(event["jet_eta"])
    is_jet = (jet_pt > _JET_PT) & (np.abs(jet_eta) < _JET_ETA)
    met, met_phi = event["met"], event["met_phi"]
    mt = 2 * met * lepton[_PT] * (1 - math.cos(lepton[_PHI] - met_phi))
    b_jets = (np.asarray(event["jet_b_tag"]) * is_jet).sum()
    isolations = lepton[_CHARGED_ISOLATION : _NEUTRAL_ISOLATION + 1]
    return np.array(
        [
            *((jet_pt * is_jet).sum(), met, met_phi, mt, is_jet.sum(), b_jets),
            *(*lepton[[_PT, _ETA, _PHI]], *isolations, lepton[18], lepton[16]),
        ]
    )


def prepare(features: Any, seed: int, particles: int = PARTICLES) -> tuple[Any, Any]:
    """Return training and test rows in the published layout.

    High-level features are scaled to 0 to 1, and labels are one-hot. Classes are downsampled to the
    size of the rarest. A fifth of the rows are test rows. The split and the order of the rows
    depend only on the events' numbers and the seed.

    Parameters
    ----------
    features
        The result of `make_features`, which is cached because it is read several times.
    particles
        Slots for particles in each row, at least as many as any event has; the others are zeros.

    Returns
    -------
    tuple
        Two DataFrames with the columns HLF_input, GRU_input (flat) and encoded_label.
    """
    from pyspark.sql import functions as f

    counts = {row["label"]: row["count"] for row in features.groupBy("label").count().collect()}
    kept = f.lit(0.0)
    for label, count in counts.items():
        kept = f.when(f.col("label") == label, min(counts.values()) / count).otherwise(kept)
    chosen = features.filter(_draw("thinning", seed) < kept)
    columns = [
        _scale(features).alias(HLF),
        _fill(particles).alias(GRU),
        _one_hot().alias(LABEL),
        f.xxhash64(f.lit(f"order {seed}"), "event").alias("order"),
    ]
    is_test = _draw("test", seed) < _TEST_SHARE
    train, test = (chosen.filter(part).select(*columns) for part in (~is_test, is_test))
    return train, test


def in_order(rows: Any, files: int) -> Any:
    """Return the rows in a random order, in this number of partitions."""
    return rows.repartitionByRange(files, "order").sortWithinPartitions("order").drop("order")


def _draw(purpose: str, seed: int) -> Any:
    """Return a pseudorandom number from 0 to 1 for an event's number."""
    from pyspark.sql import functions as f

    return f.pmod(f.xxhash64(f.lit(f"{purpose} {seed}"), "event"), f.lit(10_000)) / 10_000


def _scale(features: Any) -> Any:
    from pyspark.sql import functions as f

    values = [f.col("hfeatures")[number] for number in range(len(HIGH_LEVEL_FEATURES))]
    extremes = features.select(*map(f.min, values), *map(f.max, values)).first()
    least, most = extremes[: len(values)], extremes[len(values) :]
    return f.array(
        *(
            ((value - low) / ((high - low) or 1.0)).cast("float")
            for value, low, high in zip(values, least, most, strict=True)
        )
    )


def _fill(particles: int) -> Any:
    from pyspark.sql import functions as f

    missing = f.lit(particles * len(PARTICLE_FEATURES)) - f.size("lfeatures")
    return f.concat("lfeatures", f.array_repeat(f.lit(0.0).cast("float"), missing))


def _one_hot() -> Any:
    from pyspark.sql import functions as f

    return f.array(*((f.col("label") == n).cast("float") for n in range(len(CLASSES))))


def _distance(eta: Any, phi: Any) -> Any:
    """Return the angular distance for differences in eta and phi."""
    return np.hypot(eta, (phi + math.pi) % (2 * math.pi) - math.pi)
