"""All-reduces on this machine, a cost model fitted to them, and predictions: docs/scaling.md."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from page import write_sections

from pybackend.core.collective import CostModel, join_mesh
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import address_of, listen

RANKS = (2, 3, 4, 8)
BYTES = {"1 KB": 1024, "64 KB": 1 << 16, "1.4 MB": 1_400_000, "20 MB": 20_000_000}
REPEATS = {"1 KB": 200, "64 KB": 100, "1.4 MB": 20, "20 MB": 5}
ALGORITHMS = ("doubling", "ring")
SHARED = "shared"

NETWORKS = {"10 GbE": 10e9, "25 GbE": 25e9}
LATENCY = 25e-6
ADD = 0.05e-9
PREDICTED_BYTES = {"1 KB": 1024, "1.4 MB": 1_400_000, "200 MB": 200_000_000}
PREDICTED_RANKS = [2**k for k in range(1, 11)]

Measured = dict[tuple[str, int, str], float]


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return all tables, and write the first sections of docs/scaling.md."""
    measured = {key: value for ranks in RANKS for key, value in measure_ranks(ranks).items()}
    model = fit(measured)
    write_sections(sections(measured, model))
    times: dict[str, dict[str, float]] = {}
    for (algorithm, ranks, size), seconds in measured.items():
        times.setdefault(f"{algorithm}, {ranks} ranks", {})[size] = seconds * 1e3
    fitted = {
        "message_us": model.latency_seconds * 1e6,
        "byte_ns": model.seconds_per_byte * 1e9,
        "added_byte_ns": model.add_seconds_per_byte * 1e9,
        "typical_error": _typical_error(measured, model),
    }
    return {"all-reduce by ranks, ms": times, "all-reduce, fitted costs": {"costs": fitted}}


def measure_ranks(ranks: int) -> Measured:
    """Return seconds by algorithm, ranks and size: the median of the slowest rank."""
    found = run_ranks(__file__, ranks)
    return {
        (algorithm, ranks, size): max(figures[algorithm][size] for figures in found)
        for algorithm in (*ALGORITHMS, SHARED)
        for size in BYTES
    }


def run_ranks(program: str, ranks: int) -> list[Any]:
    """Run a program once per rank, with addresses to connect; return the JSON that each prints.

    Its arguments are the rank, the listening descriptor, the token and the peers.
    """
    servers = [listen("127.0.0.1") for _ in range(ranks)]
    peers = [address_of(server) for server in servers]
    token = new_token()
    processes = []
    for rank, server in enumerate(servers):
        order = [str(rank), str(server.fileno()), token, *peers]
        processes.append(
            subprocess.Popen(
                [sys.executable, program, *order],
                stdout=subprocess.PIPE,
                pass_fds=[server.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )
        server.close()
    return [json.loads(process.communicate()[0]) for process in processes]


def member(rank: int, server: socket.socket, token: str, peers: list[str]) -> Any:
    """Return the medians of one rank."""
    mesh = join_mesh(server, peers, rank, token, 60)
    found: dict[str, dict[str, float]] = {}
    for algorithm in (*ALGORITHMS, SHARED):
        mesh.algorithm = algorithm  # type: ignore[assignment]
        found[algorithm] = {}
        for size, nbytes in BYTES.items():
            buffer = np.full(nbytes // 4, 1e-6, np.float32)
            seconds = []
            for _ in range(REPEATS[size] + 1):
                began = time.perf_counter()
                mesh.all_reduce(buffer)
                seconds.append(time.perf_counter() - began)
            found[algorithm][size] = float(np.median(seconds[1:]))
    return found


def predicted(model: CostModel, key: tuple[str, int, str]) -> float:
    """Return the seconds that a model predicts for one measured case."""
    algorithm, ranks, size = key
    cost = model.predict_doubling if algorithm == "doubling" else model.predict_ring
    return cost(BYTES[size], ranks)


def fit(measured: Measured) -> CostModel:
    """Fit latency and time per byte by least squares of relative errors.

    Ranks that share cores slow each other down, so both grow with ranks per core. The cost of
    addition is set to `ADD`, because it cannot be separated from the transfer.
    """
    rows, wanted = [], []
    for key, seconds in _over_sockets(measured):
        share = crowding(key[1])
        of_latency = predicted(CostModel(1.0, 0.0, 0.0), key) * share
        of_bytes = predicted(CostModel(0.0, 1.0, 0.0), key) * share
        of_adding = predicted(CostModel(0.0, 0.0, ADD), key) * share
        rows.append([of_latency / seconds, of_bytes / seconds])
        wanted.append(1 - of_adding / seconds)
    latency, per_byte = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    return CostModel(float(latency), float(per_byte), ADD)


def _over_sockets(measured: Measured) -> Iterator[tuple[tuple[str, int, str], float]]:
    """Yield what the model describes."""
    return ((key, seconds) for key, seconds in measured.items() if key[0] != SHARED)


def crowding(ranks: int) -> float:
    """Return the ranks per core, at least 1."""
    return max(1.0, ranks / (os.cpu_count() or 1))


def sections(measured: Measured, model: CostModel) -> dict[str, list[str]]:
    """Return the first sections of docs/scaling.md."""
    return {
        "": _introduction(),
        "Measured here": [
            f"All ranks share {os.cpu_count()} cores ({platform.machine()}) and the loopback"
            " interface. With more ranks than cores,",
            "ranks wait for each other; the fit accounts for the ranks per core. Values are"
            " milliseconds",
            "(median, float32), with fitted values in brackets. Fit:"
            f" α = {model.latency_seconds * 1e6:.0f} µs,"
            f" β = {model.seconds_per_byte * 1e9:.2f} ns per byte,",
            f"γ = {model.add_seconds_per_byte * 1e9:.2f} ns per byte (assumed)."
            f" Typical error of the fit: {_typical_error(measured, model):.0%}.",
            "",
            *_measured_table(measured, model),
        ],
        "Predicted for clusters": list(_prediction()),
    }


def _introduction() -> list[str]:
    return [
        "# Scaling: what an all-reduce costs",
        "",
        "`make bench` writes this page. `python benchmarks/run.py --only scaling` writes the first"
        " three sections;",
        "the other sections name their commands.",
        "",
        "Workers sum small buffers by recursive doubling and large ones around a ring. When they"
        " connect, they",
        "measure the latency α of a message, and the transfer time β and addition time γ of a byte."
        " They average",
        "these values, and choose the faster algorithm for n bytes and N ranks. If all workers run"
        " on one host, they sum",
        "more than 256 KiB in memory that they share.",
        "",
        "| algorithm | predicted seconds |",
        "|---|---|",
        "| ring | 2 (N − 1) α + (N − 1) / N · n (2 β + γ) |",
        "| doubling | log₂ N · (α + n β + n γ), plus 2 (α + n β) + n γ unless N is 2, 4, 8, ... |",
        "",
        "(Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005; log₂ N is rounded down.)",
    ]


def _measured_table(measured: Measured, model: CostModel) -> Iterator[str]:
    yield "| algorithm | ranks | " + " | ".join(BYTES) + " |"
    yield "|---|---:|" + "---:|" * len(BYTES)
    for algorithm in (*ALGORITHMS, SHARED):
        for ranks in RANKS:
            keys = [(algorithm, ranks, size) for size in BYTES]
            cells = [_ms(measured[key]) for key in keys]
            if algorithm != SHARED:
                fitted = [predicted(model, key) * crowding(ranks) for key in keys]
                cells = [f"{cell} ({_ms(fit)})" for cell, fit in zip(cells, fitted, strict=True)]
            yield f"| {algorithm} | {ranks} | " + " | ".join(cells) + " |"


def _typical_error(measured: Measured, model: CostModel) -> float:
    errors = [
        abs(predicted(model, key) * crowding(key[1]) / seconds - 1)
        for key, seconds in _over_sockets(measured)
    ]
    return float(np.median(errors))


def _prediction() -> Iterator[str]:
    yield f"These values are not measured. The formulas use α = {LATENCY * 1e6:.0f} µs (half of a"
    yield f"50 µs round trip), γ = {ADD * 1e9:.2f} ns per byte, and the link's full bandwidth: one"
    yield "rank per host, and every host sends and receives at full rate. Real networks are slower"
    yield "because of shared uplinks, protocol overhead, and stragglers, for which all ranks wait."
    yield "Values are milliseconds of the faster algorithm: *d* marks doubling, the rest are rings."
    yield ""
    columns = [f"{size}, {network}" for size in PREDICTED_BYTES for network in NETWORKS]
    yield "| ranks | " + " | ".join(columns) + " |"
    yield "|---:|" + "---:|" * len(columns)
    for ranks in PREDICTED_RANKS:
        cells = []
        for nbytes in PREDICTED_BYTES.values():
            for bits_per_second in NETWORKS.values():
                model = CostModel(LATENCY, 8 / bits_per_second, ADD)
                best = model.choose(nbytes, ranks)
                cost = model.predict_doubling if best == "doubling" else model.predict_ring
                mark = " *d*" if best == "doubling" else ""
                cells.append(_ms(cost(nbytes, ranks)) + mark)
        yield f"| {ranks:,} | " + " | ".join(cells) + " |"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = 3 if milliseconds < 1 else 1 if milliseconds < 100 else 0
    return f"{milliseconds:.{digits}f}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        listening = socket.socket(fileno=int(sys.argv[2]))
        print(json.dumps(member(int(sys.argv[1]), listening, sys.argv[3], sys.argv[4:])))
    else:
        measure()
