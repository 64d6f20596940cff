"""Efficiency of simulated clusters of 64 to 1,024 ranks, compared with the closed formula.

The simulation uses measurements of this machine: costs of messages, and jitter of a training's
steps. It is first compared with real ranks, which sleep instead of computing.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from events import Cluster
from page import table, write_sections
from scaling import ADD, LATENCY, crowding, fit, measure_ranks, run_ranks

from pybackend.core.collective import CostModel, join_mesh
from pybackend.core.collective.algorithms import Algorithm

Table = dict[str, dict[str, float]]

RANKS = (64, 128, 256, 512, 1024)
STEPS = 50
# Real ranks, and the seconds that they sleep on average instead of computing.
REAL_RANKS = (2, 3, 4, 8)
REAL_BYTES = {"1 KB": 1024, "1.4 MB": 1_400_000}
REAL_STEPS, REAL_SECONDS, REAL_JITTER = 60, 5e-3, 0.3
_ALGORITHMS: tuple[Algorithm, ...] = ("doubling", "ring")
# Jitter of messages in the simulated clusters: an assumption.
_MESSAGE_JITTER = 0.3
_NEAR_LINEAR = 0.9
_NETWORKS = {"1 Gbit/s": 1e9, "25 Gbit/s": 25e9}
# The workload whose steps are measured.
_TIMED = "small CNN"
_RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Workload:
    """Step of a training: seconds of computing on one rank, and bytes of gradients."""

    seconds: float
    nbytes: float


def workloads() -> dict[str, Workload]:
    """Return steps that other benchmarks measured here, or that were published."""
    kept = json.loads(_RESULTS.read_text())
    small = kept["step, 2 workers x 1 thread, 64 images each"]["two processes, no communication"]
    large = kept["step, 49 million parameters, 2 workers x 1 thread"]
    return {
        _TIMED: Workload(small["ms_per_step"] / 1e3, 1_390_000),
        "49 million parameters": Workload(
            large["compute: no communication"]["ms_per_step"] / 1e3, 196_000_000
        ),
        "particle GRU": Workload(0.93, 49_412),  # a batch of 128 on a CPU, as published
    }


def measure(rounds: int) -> dict[str, Table]:
    """Return all tables, and write the section of docs/scaling.md."""
    costs = fit({k: v for ranks in (2, 4) for k, v in measure_ranks(ranks).items()})
    jitter, known = measure_jitter(), workloads()
    tables: dict[str, Table] = {
        "simulated steps beside real ones, sleeping ranks here": beside_real(rounds, costs)
    }
    for network, bits in _NETWORKS.items():
        cluster = Cluster(1, over(costs, bits))
        for title, workload in known.items():
            # A longer step consists of several measured steps, each with its own noise.
            own = jitter * float(np.sqrt(min(1.0, known[_TIMED].seconds / workload.seconds)))
            name = f"simulated weak scaling, {title}, {network}"
            tables[name] = simulate(cluster, workload, own)
    measured = {
        "simulation: what was measured for it": {
            "costs": {
                "message_us": costs.latency_seconds * 1e6,
                "byte_ns": costs.seconds_per_byte * 1e9,
                "step_jitter": jitter,
            }
        }
    }
    write_sections({"Simulated clusters": list(_section(tables, costs, jitter))})
    return measured | tables


def over(costs: CostModel, bits_per_second: float) -> CostModel:
    """Add a network between the ranks to the costs of messages here."""
    return CostModel(
        costs.latency_seconds + LATENCY, max(costs.seconds_per_byte, 8 / bits_per_second), ADD
    )


def simulate(cluster: Cluster, workload: Workload, jitter: float) -> Table:
    """Return efficiency by ranks: one row for the formula and one per kind of disturbance."""
    kinds = {
        "undisturbed": cluster,
        "jitter": replace(cluster, jitter=jitter, message_jitter=_MESSAGE_JITTER),
    }
    kinds["jitter, 1 % of the ranks 20 % slower"] = replace(
        kinds["jitter"], slow_share=0.01, slow_factor=1.2
    )
    kinds["jitter, pauses of 100 ms, 1 in 1,000 steps"] = replace(
        kinds["jitter"], pauses=1e-3, pause_seconds=0.1
    )
    formula = {
        str(n): workload.seconds / (workload.seconds + predict(cluster.costs, workload.nbytes, n))
        for n in RANKS
    }
    found = {"closed formula": formula}
    for name, kind in kinds.items():
        found[name] = {str(n): efficiency(replace(kind, ranks=n), workload) for n in RANKS}
    return found


def predict(costs: CostModel, nbytes: float, ranks: int) -> float:
    """Return the seconds of the all-reduce that the workers would choose."""
    is_ring = costs.choose(nbytes, ranks) == "ring"
    return (costs.predict_ring if is_ring else costs.predict_doubling)(nbytes, ranks)


def efficiency(cluster: Cluster, workload: Workload) -> float:
    """Return the share of computing in a simulated step."""
    generator = np.random.default_rng(cluster.ranks)
    computing = cluster.draw_computing(workload.seconds, STEPS, generator)
    algorithm = cluster.costs.choose(workload.nbytes, cluster.ranks)
    step = cluster.step_seconds(computing, workload.nbytes, algorithm, generator)
    return workload.seconds / step


def measure_jitter() -> float:
    """Measure the jitter of the small CNN's steps, with one worker on one core."""
    import keras
    import step

    import pybackend

    result = pybackend.barrier_train(
        "local",
        lambda: step.network(keras),
        step.digits(),
        workers=1,
        epochs=4,
        batch_size=step.BATCH,
        resources=pybackend.Resources(cpus=1),
        verbose=0,
    )
    times = result.workers[0].step_times
    assert times is not None
    return times.jitter


def beside_real(rounds: int, costs: CostModel) -> Table:
    """Return milliseconds of a step of real ranks, and of simulated ranks that sleep as long."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for ranks in REAL_RANKS:
            reports = run_ranks(__file__, ranks)
            share = crowding(ranks)
            crowded = CostModel(
                costs.latency_seconds * share,
                costs.seconds_per_byte * share,
                costs.add_seconds_per_byte * share,
            )
            for algorithm in _ALGORITHMS:
                for size, nbytes in REAL_BYTES.items():
                    own = [report[f"{algorithm} {size}"] for report in reports]
                    slept = np.array([one["slept"] for one in own]).T
                    simulated = Cluster(ranks, crowded).step_seconds(
                        slept, nbytes, algorithm, np.random.default_rng(0)
                    )
                    real = max(one["seconds"] for one in own)
                    name = f"{algorithm}, {ranks} ranks, {size}"
                    found.setdefault(name, []).append((real, simulated))
    medians = {name: np.median(pairs, axis=0) * 1e3 for name, pairs in found.items()}
    return {
        name: {
            "real_ms": float(real),
            "simulated_ms": float(simulated),
            "ratio": float(simulated / real),
        }
        for name, (real, simulated) in medians.items()
    }


def member(rank: int, server: socket.socket, token: str, peers: list[str]) -> Any:
    """Run one real rank; return its sleeps before each exchange, and the seconds of a step."""
    mesh = join_mesh(server, peers, rank, token, 60)
    generator = np.random.default_rng(rank)
    found = {}
    for algorithm in _ALGORITHMS:
        mesh.algorithm = algorithm
        for size, nbytes in REAL_BYTES.items():
            buffer = np.full(nbytes // 4, 1e-6, np.float32)
            pauses = REAL_SECONDS * np.exp(generator.normal(0, REAL_JITTER, REAL_STEPS))
            mesh.all_reduce(buffer)  # all begin together
            slept, began = [], time.perf_counter()
            for pause in pauses:
                slept.append(-time.perf_counter())
                time.sleep(pause)
                slept[-1] += time.perf_counter()
                mesh.all_reduce(buffer)
            seconds = (time.perf_counter() - began) / REAL_STEPS
            found[f"{algorithm} {size}"] = {"slept": slept, "seconds": seconds}
    return found


def _section(tables: dict[str, Table], costs: CostModel, jitter: float) -> Iterator[str]:
    real = next(iter(tables.values()))
    errors = [abs(row["ratio"] - 1) for row in real.values()]
    yield "`python benchmarks/run.py --only simulate` writes this section. It is a simulation, not"
    yield "a measurement on clusters. Each rank computes and then joins an all-reduce, whose"
    yield "messages are simulated one by one. Without jitter, stragglers and pauses, the result"
    yield "matches the formula. With them, it differs, because all ranks wait for the last one."
    yield ""
    yield "The first table compares the simulation with real ranks on this machine:"
    yield f"{min(REAL_RANKS)} to {max(REAL_RANKS)} ranks that sleep {REAL_SECONDS * 1e3:.0f} ms"
    yield f"(log-normal, {REAL_JITTER}) instead of computing. The typical error is"
    yield f"{np.median(errors):.0%}, the largest {max(errors):.0%}. Milliseconds per step:"
    yield ""
    yield from table(
        ["case", "real", "simulated"],
        [[name, f"{r['real_ms']:.2f}", f"{r['simulated_ms']:.2f}"] for name, r in real.items()],
    )
    yield ""
    yield "The simulated clusters:"
    yield ""
    yield f"- A message takes as long as on this machine ({costs.latency_seconds * 1e6:.0f} µs)"
    yield f"  plus {LATENCY * 1e6:.0f} µs for the network. The time per byte is that of the link"
    yield f"  or of this machine ({costs.seconds_per_byte * 1e9:.2f} ns), whichever is slower."
    yield f"- Compute time varies by {jitter:.2f} (standard deviation of the logarithm) in steps"
    yield "  of the small CNN, measured here on one core. A longer step counts as several of these"
    yield "  in a row, so it varies less, by the square root of their number."
    yield f"- Message times vary by {_MESSAGE_JITTER}. This is assumed, and so are the stragglers."
    yield "- Exchanges do not overlap with compute."
    yield ""
    yield "Efficiency of weak scaling (1 is linear):"
    for name, rows in list(tables.items())[1:]:
        yield ""
        yield f"**{name.removeprefix('simulated weak scaling, ')}**"
        yield ""
        yield from table(
            ["", *(f"{n:,} ranks" for n in RANKS)],
            [[kind, *(f"{row[str(n)]:.3f}" for n in RANKS)] for kind, row in rows.items()],
        )
    yield ""
    yield f"Near-linear scaling (efficiency of {_NEAR_LINEAR} or more) with jitter:"
    yield ""
    for name, rows in list(tables.items())[1:]:
        near = [n for n in RANKS if rows["jitter"][str(n)] >= _NEAR_LINEAR]
        found = f"up to {max(near):,} ranks" if near else f"not with {min(RANKS)} ranks"
        yield f"- {name.removeprefix('simulated weak scaling, ')}: {found}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        listening = socket.socket(fileno=int(sys.argv[2]))
        print(json.dumps(member(int(sys.argv[1]), listening, sys.argv[3], sys.argv[4:])))
    else:
        for shown, rows in measure(1).items():
            print(shown, *rows.items(), sep="\n  ")
