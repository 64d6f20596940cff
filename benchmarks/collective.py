"""Milliseconds of an all-reduce between two processes: ours, bare sockets, TensorFlow's ring.

Also torch's Gloo, if ``TORCH_PYTHON`` names a Python with torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pybackend
from pybackend.core.collective import Compression, join_mesh
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import address_of, listen

# A Python with torch, which is too large to be among the packages of the benchmarks.
TORCH = os.environ.get("TORCH_PYTHON")
Sizes = Mapping[str, tuple[int, int]]
_RANKS, _NO_WAITING = 8, "the same copies and sums, without waiting"
SIZES: Sizes = {"ms_1KB": (1024, 300), "ms_1MB": (1 << 20, 100), "ms_100MB": (100_000_000, 5)}
"""By column: bytes of a float32 buffer, and the number of exchanges in a round."""


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds and both processes."""
    cases: dict[str, Callable[[], list[dict[str, float]]]] = {
        "bare sockets, the same bytes": lambda: pair("sockets"),
        "tfdist": lambda: pair("mesh"),
        "tfdist, over sockets": lambda: pair("mesh sockets"),
        "tfdist, bf16 on the wire": lambda: pair("mesh bf16"),
        "tfdist, fp16 on the wire": lambda: pair("mesh fp16"),
        "TensorFlow's ring": _tensorflow,
    }
    if TORCH:
        cases["torch's Gloo"] = _gloo
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name] += case()
    return {
        name: {column: float(np.median([f[column] for f in figures])) for column in SIZES}
        for name, figures in found.items()
    }


def in_memory(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds and eight processes, which share this machine's cores."""
    sizes = {"ms_20MB": (20_000_000, 15)}
    found: dict[str, list[float]] = {_NO_WAITING: [], "tfdist": []}
    for _ in range(rounds):
        for name, figures in found.items():
            what = "mesh without waiting" if name == _NO_WAITING else "mesh"
            measured = run_ranks(__file__, [what, json.dumps(sizes)], _RANKS)
            figures += [one["ms_20MB"] for one in measured]
    return {name: {"ms_20MB": float(np.median(figures))} for name, figures in found.items()}


def timed(work: Callable[[], Any], times: int) -> float:
    """Return milliseconds, the median of runs after one that warms up."""
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return float(np.median(found)) * 1e3


def pair(what: str, sizes: Sizes = SIZES) -> list[dict[str, float]]:
    """Run two processes on one machine and return the measurements of each."""
    return run_ranks(__file__, [what, json.dumps(sizes)])


def run_ranks(program: str, order: list[str], count: int = 2) -> list[dict[str, float]]:
    """Run a program as processes that can connect; return the JSON that each prints.

    Its arguments are ``order``, then the rank, the listening descriptor, the token and the peers.
    """
    servers = [listen("127.0.0.1") for _ in range(count)]
    peers = [address_of(server) for server in servers]
    token = new_token()
    processes = []
    for rank, server in enumerate(servers):
        own = [*order, str(rank), str(server.fileno()), token, *peers]
        processes.append(
            subprocess.Popen(
                [sys.executable, program, *own],
                stdout=subprocess.PIPE,
                pass_fds=[server.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )
        server.close()
    return [json.loads(process.communicate()[0]) for process in processes]


def _member(
    what: str, sizes: Sizes, rank: int, server: socket.socket, token: str, peers: list[str]
) -> Any:
    if what == "sockets":
        exchange = _socket_exchange(rank, server, peers)
    else:
        mesh = join_mesh(server, peers, rank, token, 60, shares_memory=what != "mesh sockets")
        if what == "mesh without waiting":
            mesh.all_reduce(np.zeros(1 << 20))
            assert mesh.shared is not None
            mesh.shared._meet = lambda call: None  # type: ignore[method-assign]
            what = "mesh"
        kind = what.removeprefix("mesh").removesuffix("sockets").strip()
        codec = Compression(kind) if kind else None  # type: ignore[arg-type]

        def exchange(buffer: Any) -> None:
            mesh.all_reduce(buffer, codec)

    found = {}
    for column, (size, times) in sizes.items():
        buffer = np.full(size // 4, 1e-6, np.float32)
        found[column] = timed(lambda buffer=buffer: exchange(buffer), times)  # type: ignore[misc]
    return found


def _socket_exchange(rank: int, server: socket.socket, peers: list[str]) -> Callable[[Any], None]:
    """Send a buffer while as many bytes are received, with blocking calls, two threads if large."""
    if rank == 0:
        host, port = peers[1].rsplit(":", 1)
        connection = socket.create_connection((host, int(port)))
    else:
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    memory: dict[int, Any] = {}

    def exchange(buffer: Any) -> None:
        target = memory.setdefault(buffer.nbytes, np.zeros_like(buffer)).view(np.uint8).data
        sender = threading.Thread(target=connection.sendall, args=(buffer.view(np.uint8).data,))
        if len(target) > 1 << 16:
            sender.start()
        else:
            connection.sendall(buffer.view(np.uint8).data)
        while target:
            target = target[connection.recv_into(target) :]
        if sender.ident:
            sender.join()

    return exchange


def _gloo() -> list[dict[str, float]]:
    """Measure the collective of torch for CPUs, by loopback sockets."""
    server = listen("127.0.0.1")
    port = address_of(server).rpartition(":")[2]
    server.close()
    order = [str(TORCH), str(Path(__file__).with_name("gloo.py"))]
    processes = [
        subprocess.Popen([*order, str(rank), port, json.dumps(SIZES)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    return [json.loads(process.communicate()[0]) for process in processes]


def _tensorflow() -> list[dict[str, float]]:
    """Measure TensorFlow's own collective, used as in MultiWorkerMirroredStrategy."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[dict[str, float]] = pybackend.barrier_run(
            "local", _tensorflow_member, folder, workers=2, verbose=0
        )
    return found


def _tensorflow_member(context: pybackend.types.WorkerContext, folder: str) -> dict[str, float]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    key = tf.Variable(1000, dtype=tf.int32, trainable=False)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def reduce(buffer: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=buffer,
            group_size=context.world_size,
            group_key=77,
            instance_key=key.assign_add(1),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
            timeout_seconds=60,
        )

    found = {}
    for column, (size, times) in SIZES.items():
        buffer = tf.fill([size // 4], 1e-6)
        found[column] = timed(lambda buffer=buffer: reduce(buffer).numpy(), times)  # type: ignore[misc]
    del strategy
    # If one process ends first, the other cannot receive the rest.
    Path(folder, str(context.rank)).touch()
    while len(os.listdir(folder)) < context.world_size:
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, exchanged, wanted, number, descriptor, secret, *addresses = sys.argv
        listening = socket.socket(fileno=int(descriptor))
        shown = _member(exchanged, json.loads(wanted), int(number), listening, secret, addresses)
        print(json.dumps(shown))
    else:
        print(json.dumps(measure(3), indent=2))
