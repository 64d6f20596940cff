"""All-reduces over hosts with several ranks: through the memory of each host, and along one ring.

Hosts are the network namespaces of the tests; Linux's token bucket (tbf) limits the rate at which
they send. All ranks share this machine's cores. Needs root.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_scale import paced
from page import table, write_sections

from pybackend.core.collective import Mesh, join_mesh
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import split_address

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from namespaces import Host, network

Table = dict[str, dict[str, float]]

SHAPES = {"2 x 1": (2, 1), "2 x 2": (2, 2), "2 x 4": (2, 4)}
"""Number of hosts, and of ranks per host."""
BYTES = {"1.4 MB": 1_400_000, "20 MB": 20_000_000, "100 MB": 100_000_000}
REPEATS = {"1.4 MB": 15, "20 MB": 5, "100 MB": 3}
ROUTES = {"one ring": "ring", "memory and connections": "shared"}
_GBIT = (1, 10)
_CONNECTIONS = {"plain": False, "encrypted": None}
_PORT = 2222
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
_COLUMNS = [*(f"ms, {size}" for size in BYTES), "sent per byte"]


def measure(rounds: int) -> dict[str, Table]:
    """Return the table, and write the section of docs/scaling.md."""
    found: dict[str, list[Mapping[str, float]]] = {}
    cases = list(itertools.product(_GBIT, _CONNECTIONS, SHAPES))
    with network(["a", "b"]) as made:
        for _, (gbit, sent, shape) in itertools.product(range(rounds), cases):
            count, ranks = SHAPES[shape]
            with paced(made.hosts, gbit):
                times = run_ranks(made.hosts[:count], ranks, _CONNECTIONS[sent])
            for route, figures in times.items():
                found.setdefault(f"{gbit} Gbit/s, {sent}, {shape}, {route}", []).append(figures)
    rows = {
        row: {column: float(np.median([times[column] for times in turns])) for column in _COLUMNS}
        for row, turns in found.items()
    }
    write_sections({"Hosts with several ranks": list(_section(rows))})
    return {"all-reduce over hosts, by ranks per host": rows}


def run_ranks(
    hosts: Sequence[Host], ranks: int, encrypt: bool | None
) -> dict[str, Mapping[str, float]]:
    """Run some ranks on each host; return the columns by route, of the slowest rank."""
    places = [host for host in hosts for _ in range(ranks)]
    peers = [f"{host.address}:{_PORT + rank}" for rank, host in enumerate(places)]
    token = new_token()
    processes = [
        subprocess.Popen(
            [*host.enter, sys.executable, __file__, str(rank), json.dumps(encrypt), token, *peers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank, host in enumerate(places)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        shown = [json.loads(process.stdout.read()) for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        name: {column: max(figures[route][column] for figures in shown) for column in _COLUMNS}
        for name, route in list(ROUTES.items())[: min(ranks, 2)]
    }


def member(rank: int, encrypt: bool | None, token: str, peers: list[str]) -> Any:
    """Return the columns of one rank by route; the routes take turns."""
    server = socket.create_server(split_address(peers[rank]))
    print("listens", flush=True)
    sys.stdin.readline()
    mesh = join_mesh(server, peers, rank, token, 60, encrypt=encrypt)
    found: dict[str, dict[str, float]] = {route: {} for route in ROUTES.values()}
    for size, nbytes in BYTES.items():
        buffer = np.full(nbytes // 4, 1e-6, np.float32)
        seconds: dict[str, list[float]] = {route: [] for route in ROUTES.values()}
        for _ in range(REPEATS[size] + 1):
            for route in ROUTES.values():
                mesh.algorithm = route  # type: ignore[assignment]
                began = time.perf_counter()
                mesh.all_reduce(buffer)
                seconds[route].append(time.perf_counter() - began)
        for route, times in seconds.items():
            found[route][f"ms, {size}"] = float(np.median(times[1:])) * 1e3
    for route in ROUTES.values():
        mesh.algorithm = route  # type: ignore[assignment]
        found[route]["sent per byte"] = count_sent(mesh, buffer) / buffer.nbytes
    return found


def count_sent(mesh: Mesh, buffer: Any) -> int:
    """Return how many bytes this host sends for an all-reduce."""
    mesh.all_reduce(np.zeros(1))
    before = int(_SENT.read_text())
    mesh.all_reduce(buffer)
    mesh.all_reduce(np.zeros(1))
    return int(_SENT.read_text()) - before


def _section(rows: Table) -> Iterator[str]:
    yield "`python benchmarks/run.py --only hierarchy` writes this section. Hosts are network"
    yield f"namespaces, so all ranks share {os.cpu_count()} cores, also to encrypt. `tbf` limits"
    yield "the rate of their links. With memory, each rank sums one part on its host and sums it"
    yield "with the other hosts, which is what tfdist does if hosts have several ranks."
    yield "Milliseconds of an all-reduce (median, float32, slowest rank), and bytes that a host"
    yield "sends per byte of the buffer, with all headers:"
    yield ""
    shown = [(column, 1 if column.startswith("ms") else 2) for column in _COLUMNS]
    lines = [
        [*row.split(", "), *(f"{figures[column]:.{digits}f}" for column, digits in shown)]
        for row, figures in rows.items()
    ]
    yield from table(["link", "connections", "ranks", "route", *_COLUMNS], lines, texts=4)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, number, wish, secret, *addresses = sys.argv
        print(json.dumps(member(int(number), json.loads(wish), secret, addresses)))
    else:
        for title, figures in measure(1).items():
            print(title)
            for case, values in figures.items():
                print(f"  {case}: {values}")
