"""Strong and weak scaling of the small CNN: here, and on hosts with links of a given rate.

Hosts are the network namespaces of the tests, on one machine, reached over ssh; Linux's token
bucket (tbf) limits the rate of their links. All share this machine's cores: with more workers than
cores they slow each other down. Needs root.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import step
from page import table, write_sections

import pybackend

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from namespaces import Host, run
from sshd import ssh_hosts

Table = dict[str, dict[str, float]]

WORKERS = (1, 2, 4)
# Global batch size of strong scaling, and each worker's batch size of weak scaling.
BATCH = 256
TO = 480
STEPS = 60
_HOSTS = ("a", "b", "c", "d")
_GBIT = (1, 25)
# Buffer of a link: bytes of a burst, and the longest wait of a packet.
_BURST, _LATENCY = "4mb", "50ms"
_PARTS = ("data", "compute", "communication", "waiting")


def measure(rounds: int, workers: Sequence[int] = WORKERS) -> dict[str, Table]:
    """Return all tables, and write the section of docs/scaling.md."""
    results = {"this machine": scale("local", workers, rounds)}
    with (
        tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder,
        ssh_hosts(_HOSTS[: max(workers)], Path(folder)) as there,
    ):
        hosts = pybackend.hosts(",".join(_HOSTS[: max(workers)]), ssh_options=there.options)
        for gbit in _GBIT:
            with paced(there.hosts, gbit):
                results[f"hosts with {gbit} Gbit/s"] = scale(hosts, workers, rounds)
    tables: dict[str, Table] = {}
    for where, result in results.items():
        tables[f"bench-scale, {where}"] = _measured(result)
        tables[f"bench-scale, {where}, projected"] = _projected(result.project(TO))
    write_sections({"A training run, measured and projected": list(_section(results))})
    return tables


def scale(target: Any, workers: Sequence[int], rounds: int) -> pybackend.types.ScalingResult:
    """Scale the training on these workers."""
    return pybackend.bench_scale(
        partial(train, target), workers, batch_size=BATCH, repeats=rounds, verbose=0
    )


def train(target: Any, workers: int, batch_size: int) -> pybackend.types.TrainResult:
    """Train the small CNN with one core per worker."""
    import keras

    # More workers than cores must share cores, so they have one thread each.
    has_enough = target != "local" or workers <= (os.cpu_count() or 1)
    return pybackend.barrier_train(
        target,
        step.network(keras),  # not a function of this module, which the hosts do not have
        step.digits(),
        workers=workers,
        batch_size=batch_size,
        epochs=max(1, STEPS * batch_size * workers // step.ROWS),
        resources=pybackend.Resources(cpus=1) if has_enough else None,
        verbose=0,
    )


@contextmanager
def paced(hosts: Sequence[Host], gbit: float) -> Iterator[None]:
    """Limit the rate at which these hosts send."""
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(limited("eth0", gbit, host.enter))
        yield


@contextmanager
def limited(device: str, gbit: float, enter: Sequence[str] = ()) -> Iterator[None]:
    """Limit the rate at which a device sends; ``enter`` is the prefix of commands on its host."""
    options = ["rate", f"{gbit}gbit", "burst", _BURST, "latency", _LATENCY]
    run(*enter, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *options)
    try:
        yield
    finally:
        run(*enter, "tc", "qdisc", "del", "dev", device, "root")


def _measured(result: pybackend.types.ScalingResult) -> Table:
    return {
        _name(row): {
            "ms": row.seconds * 1e3,
            **{f"{part}_ms": getattr(row, part) * 1e3 for part in _PARTS},
            "rows_per_second": row.rows_per_second,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
        }
        for row in result.rows
    }


def _projected(projection: Any) -> Table:
    rows = {
        _name(row): {
            "ms": row.seconds * 1e3,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
        }
        for row in projection.rows
    }
    return rows


def _name(row: Any) -> str:
    return f"{row.mode}, {row.workers} worker{'s' if row.workers > 1 else ''}"


def _section(results: dict[str, pybackend.types.ScalingResult]) -> Iterator[str]:
    yield "`python benchmarks/run.py --only bench_scale` writes this section with `bench_scale()`."
    yield "It trains the small CNN with one core per worker. In strong scaling, the workers share a"
    yield f"batch of {BATCH} images; in weak scaling, each has its own batch of that size. All"
    yield "hosts are network namespaces on one machine. Rows with a star have more"
    yield "workers than cores; the projection is not fitted to them."
    for where, result in results.items():
        yield ""
        yield f"**{where[0].upper()}{where[1:]}**, milliseconds per step:"
        yield ""
        yield from table(
            ["mode", "workers", "step", *_PARTS, "speed-up", "efficiency"],
            [
                [
                    row.mode,
                    f"{row.workers}{'*' if row.is_crowded else ''}",
                    f"{row.seconds * 1e3:.2f}",
                    *(f"{getattr(row, part) * 1e3:.2f}" for part in _PARTS),
                    f"{row.speedup:.2f}",
                    f"{row.efficiency:.2f}",
                ]
                for row in result.rows
            ],
        )
    yield ""
    yield "The next table is a projection. It does not include effects of larger clusters, such as"
    yield "shared switches and slow hosts. Efficiency of weak scaling:"
    yield ""
    weak = {
        where: [row for row in result.project(TO).rows if row.mode == "weak"]
        for where, result in results.items()
    }
    counts = [row.workers for row in next(iter(weak.values()))]
    yield from table(
        ["workers", *weak],
        [
            [f"{count}", *(f"{rows[at].efficiency:.2f}" for rows in weak.values())]
            for at, count in enumerate(counts)
        ],
    )


if __name__ == "__main__":
    for shown, rows in measure(1).items():
        print(shown, *rows.items(), sep="\n  ")
