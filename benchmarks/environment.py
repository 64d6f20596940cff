"""Executors that have nothing installed: packing this Python environment, and the first calls.

The cluster is the tests': two executors on separate network namespaces of this machine, which share
its cores with the driver. Their Python has pyspark, pyarrow and pandas, but no TensorFlow. Linux's
token bucket (tbf) limits the rate at which the driver sends. Needs root.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from bench_scale import limited
from standalone_session import WORKERS, standalone, start_session
from step import network

import pybackend

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from pythons import python_with

Figures = dict[str, dict[str, float]]
_GBIT = 1.0
_BATCH, _STEPS = 64, 20
_BLOCK = 4 << 20
# One block in so many is compressed with each level.
_SAMPLE = 8
_LEVELS = {"level 1 (used)": 1, "level 6": 6}


def measure(rounds: int) -> dict[str, Figures]:
    """Return the tables; calls are medians over rounds, each with new Spark applications."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        packed = pybackend.pack_environment(folder / "environment.tar.gz")
        return {
            "environment: packed and unpacked, this machine": _measure_unpacking(packed, folder),
            f"environment: levels of compression, one of {_SAMPLE} blocks": _compress(packed),
            f"environment: call to model, {_STEPS} steps, {WORKERS} workers, standalone cluster": (
                _measure_calls(packed, folder, rounds)
            ),
        }


def _measure_unpacking(packed: pybackend.types.PackedEnvironment, folder: Path) -> Figures:
    from pybackend.core.launchers.environment.installing import install_here, read_blocks

    began = time.perf_counter()
    there = install_here(packed, read_blocks(packed.path), str(folder / "unpacked"))
    seconds = time.perf_counter() - began
    size = sum(path.lstat().st_size for path in there.folder.rglob("*"))
    return {
        "pack": {"seconds": packed.seconds, "MB": packed.size / 1e6},
        "unpack": {"seconds": seconds, "MB": size / 1e6},
    }


def _compress(packed: pybackend.types.PackedEnvironment) -> Figures:
    """Return the size by level, and the seconds, computed for all cores and a link of 1 Gbit/s."""
    raw, sizes, times = 0, dict.fromkeys(_LEVELS, 0), dict.fromkeys(_LEVELS, 0.0)
    for block in _sample(packed.path):
        raw += len(block)
        for name, level in _LEVELS.items():
            began = time.process_time()
            sizes[name] += len(zlib.compress(block, level))
            times[name] += time.process_time() - began
    sizes, times = {"not compressed": raw, **sizes}, {"not compressed": 0.0, **times}
    cores = os.cpu_count() or 1
    return {
        name: {
            "MB": size * _SAMPLE / 1e6,
            "compress_s": times[name] * _SAMPLE / cores,
            "send_s": size * _SAMPLE * 8 / (_GBIT * 1e9),
        }
        for name, size in sizes.items()
    }


def _sample(path: str) -> Iterator[bytes]:
    number = 0
    with gzip.open(path) as content:
        while block := content.read(_BLOCK):
            if number % _SAMPLE == 0:
                yield block
            number += 1


def _measure_calls(packed: pybackend.types.PackedEnvironment, folder: Path, rounds: int) -> Figures:
    bare = str(python_with(folder, "pyspark", "pyarrow", "pandas"))
    sent = pybackend.Resources(environment=packed.path)
    found: dict[str, list[tuple[float, float]]] = {}
    with standalone() as cluster:
        # All that this process sends to the hosts passes the bridge.
        bridge = cluster.hosts[0].port.rpartition("h")[0]
        cases: dict[str, tuple[str, Any, Callable[[], Any]]] = {
            "everything installed": (sys.executable, None, nullcontext),
            "environment sent": (bare, sent, nullcontext),
            f"environment sent, at {_GBIT:g} Gbit/s": (bare, sent, lambda: limited(bridge, _GBIT)),
        }
        for _ in range(rounds):
            for name, (python, resources, link) in cases.items():
                with link(), start_session(cluster, python=python) as session:
                    times = _train(session, resources), _train(session, resources)
                    found.setdefault(name, []).append(times)
    return {
        name: dict(zip(("first_s", "second_s"), np.median(times, axis=0).tolist(), strict=True))
        for name, times in found.items()
    }


def _train(session: Any, resources: Any) -> float:
    import keras

    generator = np.random.default_rng(0)
    count = _BATCH * WORKERS * _STEPS
    rows = generator.random((count, 28, 28, 1), dtype="float32"), generator.integers(0, 10, count)
    model = network(keras)
    began = time.perf_counter()
    # Not a function of this module, which workers of the environment could not import.
    pybackend.barrier_train(
        session, model, rows, workers=WORKERS, batch_size=_BATCH, resources=resources, verbose=0
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    for title, rows in measure(1).items():
        print(title)
        for case, values in rows.items():
            print(f"  {case}: {values}")
