"""Synthetic collisions of three processes, from rough models of their differences.

The published events come from a full simulation of a detector. Here a few lines approximate each
effect, with kinematics that are qualitatively right:

- QCD: two jets back to back, mostly of gluons, with a lepton from the decay in a jet;
- W+jets: a lepton and a neutrino from a W boson, which recoils against a few light jets;
- tt: a lepton and a neutrino, two b jets and two light ones.

Jets of gluons have more and softer particles than those of quarks, and tracks in b jets come from
displaced vertices. Particles of other collisions (pile-up) are in every event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

CHARGED, NEUTRAL, PHOTON, ELECTRON, MUON = range(5)
# Shares of QCD, tt and W+jets among the events: QCD has the fewest isolated leptons.
_MIXTURE = (0.5, 0.22, 0.28)
_W_MASS = 80.4
_PER_PARTICLE = ("pt", "eta", "phi", "kind", "charge", "x", "y", "z")
SCHEMA = (
    "event long, label int, "
    + ", ".join(f"{name} array<float>" for name in _PER_PARTICLE)
    + ", jet_pt array<float>, jet_eta array<float>, jet_b_tag array<float>, "
    "met float, met_phi float"
)


def generate(spark: Any, events: int, seed: int) -> Any:
    """Return a DataFrame of events from Spark's tasks; each depends on its number and the seed.

    Columns: ``event``, its number; ``label``, by `layout.CLASSES`; arrays of its particles (``pt``
    in GeV, vertices in mm) and jets; ``met`` and ``met_phi``, the missing transverse momentum.
    """

    def make(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            yield pd.DataFrame([simulate(int(number), seed) for number in batch["id"]])

    return spark.range(events).mapInPandas(make, SCHEMA)


def simulate(number: int, seed: int) -> dict[str, Any]:
    """Return one event as a dict with the names of `SCHEMA`."""
    rng = np.random.default_rng([seed, number])
    label = int(rng.choice(3, p=_MIXTURE))
    partons, lepton, neutrino = (_qcd, _top_pair, _w_and_jets)[label](rng)
    particles = [_fragment(rng, *parton) for parton in partons]
    particles += [_lepton(rng, *lepton), _pile_up(rng)]
    columns = np.concatenate(particles, axis=1).astype("float32")
    return {
        "event": number,
        "label": label,
        **dict(zip(_PER_PARTICLE, columns, strict=True)),
        **_measure_jets(rng, partons),
        **_measure_missing(rng, partons, neutrino),
    }


Parton = tuple[float, float, float, str]
Momentum = tuple[float, float, float]


def _qcd(rng: np.random.Generator) -> tuple[list[Parton], Momentum, Momentum]:
    pt, phi = 32 * rng.uniform(0.02, 1) ** -0.3, rng.uniform(-math.pi, math.pi)
    b = "b" if rng.uniform() < 0.35 else "g"
    partons = [
        (pt, rng.normal(0, 1.5), phi, b),
        (pt * rng.uniform(0.7, 1), rng.normal(0, 1.5), phi + math.pi + rng.normal(0, 0.3), b),
        *_radiate(rng, 0.9),
    ]
    # The lepton is more often next to its jet than in it, where it is not isolated.
    eta, phi = partons[0][1] + rng.normal(0, 0.5), phi + rng.normal(0, 0.5)
    lepton = 20 + rng.exponential(11), eta, phi
    return partons, lepton, (rng.exponential(18), eta, phi + rng.normal(0, 0.6))


def _top_pair(rng: np.random.Generator) -> tuple[list[Parton], Momentum, Momentum]:
    lepton, neutrino = _decay_w(rng, rng.exponential(45), rng.uniform(-math.pi, math.pi), 1.1)
    partons = [
        (22 + rng.exponential(mean), rng.normal(0, 1.1), rng.uniform(-math.pi, math.pi), flavor)
        for mean, flavor in ((32, "b"), (32, "b"), (24, "q"), (20, "q"))
    ]
    return partons + _radiate(rng, 0.5), lepton, neutrino


def _w_and_jets(rng: np.random.Generator) -> tuple[list[Parton], Momentum, Momentum]:
    jets = [
        (
            20 + rng.exponential(24),
            rng.normal(0, 1.6),
            rng.uniform(-math.pi, math.pi),
            str(rng.choice(["q", "g", "b"], p=[0.66, 0.28, 0.06])),
        )
        for _ in range(rng.poisson(2.1))
    ]
    px = -sum(pt * math.cos(phi) for pt, _, phi, _ in jets)
    py = -sum(pt * math.sin(phi) for pt, _, phi, _ in jets)
    lepton, neutrino = _decay_w(rng, math.hypot(px, py), math.atan2(py, px), 1.4)
    return jets, lepton, neutrino


def _radiate(rng: np.random.Generator, mean: float) -> list[Parton]:
    """Return additional jets of gluons."""
    return [
        (15 + rng.exponential(16), rng.normal(0, 1.9), rng.uniform(-math.pi, math.pi), "g")
        for _ in range(rng.poisson(mean))
    ]


def _decay_w(
    rng: np.random.Generator, pt: float, phi: float, width: float
) -> tuple[Momentum, Momentum]:
    """Return lepton and neutrino, back to back in a W boson's frame, each with half of it."""
    own = _W_MASS / 2 * math.sqrt(1 - rng.uniform(-1, 1) ** 2)
    angle, eta = rng.uniform(-math.pi, math.pi), rng.normal(0, width)
    found = []
    for sign in (1, -1):
        px = pt / 2 * math.cos(phi) + sign * own * math.cos(angle)
        py = pt / 2 * math.sin(phi) + sign * own * math.sin(angle)
        found.append((math.hypot(px, py), eta + sign * rng.normal(0, 0.6), math.atan2(py, px)))
    return found[0], found[1]


def _fragment(rng: np.random.Generator, pt: float, eta: float, phi: float, flavor: str) -> Any:
    """Return the particles of a jet, as columns of `_PER_PARTICLE`."""
    mean = {"g": 10.0, "q": 5.5, "b": 7.5}[flavor] * (pt / 40) ** 0.35
    count = 2 + rng.poisson(mean)
    shares = rng.dirichlet(np.full(count, 0.8 if flavor == "g" else 0.55))
    spread = {"g": 0.22, "q": 0.12, "b": 0.17}[flavor]
    kind = rng.choice([CHARGED, NEUTRAL, PHOTON], size=count, p=[0.62, 0.13, 0.25])
    charge = np.where(kind == CHARGED, rng.choice([-1, 1], size=count), 0)
    vertex = rng.normal(0, 0.03, (3, count))
    if flavor == "b":
        flight = rng.exponential(0.5) * np.array([math.cos(phi), math.sin(phi), math.sinh(eta)])
        vertex += flight[:, None] * (rng.uniform(size=count) < 0.6)
    vertex = np.where(kind == CHARGED, vertex, 0)
    return np.stack(
        [
            np.maximum(pt * shares, 0.05),
            eta + rng.normal(0, spread, count),
            _wrap(phi + rng.normal(0, spread, count)),
            kind,
            charge,
            *vertex,
        ]
    )


def _lepton(rng: np.random.Generator, pt: float, eta: float, phi: float) -> Any:
    kind, charge = rng.choice([ELECTRON, MUON]), rng.choice([-1, 1])
    return np.array([[pt], [eta], [_wrap(phi)], [kind], [charge], [0], [0], [0]])


def _pile_up(rng: np.random.Generator) -> Any:
    """Return soft particles of other collisions, spread over the detector."""
    count = 6 + rng.poisson(8)
    kind = rng.choice([CHARGED, NEUTRAL, PHOTON], size=count, p=[0.6, 0.15, 0.25])
    charge = np.where(kind == CHARGED, rng.choice([-1, 1], size=count), 0)
    return np.stack(
        [
            0.6 + rng.exponential(0.9, count),
            rng.uniform(-3, 3, count),
            rng.uniform(-math.pi, math.pi, count),
            kind,
            charge,
            *np.where(kind == CHARGED, rng.normal(0, 0.05, (3, count)), 0),
        ]
    )


def _measure_jets(rng: np.random.Generator, partons: list[Parton]) -> dict[str, Any]:
    """Return jets as measured: with limited energy resolution, and b tags that may be wrong."""
    pts = np.array([pt for pt, *_ in partons]) * rng.normal(1, 0.2, len(partons))
    tagged = [rng.uniform() < (0.55 if flavor == "b" else 0.08) for *_, flavor in partons]
    return {
        "jet_pt": np.abs(pts).astype("float32"),
        "jet_eta": np.array([eta for _, eta, _, _ in partons], "float32"),
        "jet_b_tag": np.array(tagged, "float32"),
    }


def _measure_missing(
    rng: np.random.Generator, partons: list[Parton], neutrino: Momentum
) -> dict[str, float]:
    """Return the neutrino's transverse momentum, with an error that grows with the energy."""
    pt, _, phi = neutrino
    blur = 5 + 0.9 * math.sqrt(sum(parton[0] for parton in partons))
    px, py = pt * math.cos(phi) + rng.normal(0, blur), pt * math.sin(phi) + rng.normal(0, blur)
    return {"met": math.hypot(px, py), "met_phi": math.atan2(py, px)}


def _wrap(angle: Any) -> Any:
    """Return an angle as its equivalent between -pi and pi."""
    return (angle + math.pi) % (2 * math.pi) - math.pi
