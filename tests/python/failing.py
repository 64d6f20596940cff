"""Runs that fail, each in a different way, and a check for leftovers."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import marked_processes

from pybackend import WorkerFailedError, barrier_run, barrier_train
from pybackend.types import WorkerContext

_ROWS = 64
_FIRST_LABEL_OF_RANK_1 = 1
_SETTLE_SECONDS = 60.0
_LISTENING = "0A"


def _train(spark: Any, end: Callable[[], None], bad_label: int | None = None) -> None:
    """Train with a worker of rank 1 that calls ``end`` in its second step."""
    import keras

    class End(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and os.environ["TFDIST_RANK"] == "1":
                end()

    def build() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    y = np.zeros(_ROWS, "int64")
    if bad_label is not None:
        y[_FIRST_LABEL_OF_RANK_1] = bad_label
    rows = np.ones((_ROWS, 4), "float32"), y
    # With this seed the bad label is not among the rows of a worker's check before the first step.
    options = {"workers": 2, "batch_size": 8, "seed": 2, "verbose": 0}
    barrier_train(spark, build, rows, callbacks=[End()], **options)


def _raise() -> None:
    raise RuntimeError("no such luck")


def _kill() -> None:
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def _go_on() -> None:
    pass


def _leave() -> None:
    os._exit(0)


def _exhaust() -> None:
    np.empty(1 << 60, np.uint8)


def _exhaust_tensorflow() -> None:
    import tensorflow as tf

    tf.fill((1 << 40, 1 << 10), 0.0)


def _run(spark: Any) -> None:
    def fail(context: WorkerContext) -> None:
        if context.rank == 1:
            socket.create_server(("127.0.0.1", 0))  # which ends with the process
            Path(tempfile.mkdtemp(), "file").touch()
            raise KeyError("no such key")

    barrier_run(spark, fail, workers=2, verbose=0)


@dataclass(frozen=True)
class Failing:
    """A run that fails, and the expected failure."""

    start: Callable[[Any], None]
    exception_type: str
    words: str


KINDS = {
    "raise in a callback": Failing(
        lambda spark: _train(spark, _raise), "RuntimeError", "no such luck"
    ),
    "kill": Failing(lambda spark: _train(spark, _kill), "ProcessDied", "SIGKILL"),
    "exit with status 0": Failing(
        lambda spark: _train(spark, _leave), "ProcessDied", "exited with status 0"
    ),
    "bad rows": Failing(
        lambda spark: _train(spark, _go_on, bad_label=3), "InvalidArgumentError", "label value"
    ),
    "raise in a function": Failing(_run, "KeyError", "no such key"),
    "too little memory for numpy": Failing(
        lambda spark: _train(spark, _exhaust), "MemoryError", "lower batch_size"
    ),
}
# TensorFlow retries for ten seconds.
SLOW = {
    "too little memory for TensorFlow": Failing(
        lambda spark: _train(spark, _exhaust_tensorflow),
        "ResourceExhaustedError",
        "lower batch_size",
    ),
}


def fail(kind: str, spark: Any = None) -> float:
    """Make a run fail, check that its error names the failure, and return the seconds it took."""
    expected = (KINDS | SLOW)[kind]
    began = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        expected.start(spark)
    error = caught.value
    assert (error.rank, error.exception_type) == (1, expected.exception_type), f"{kind}: {error}"
    assert expected.words in str(error), f"{kind}: {error}"
    return time.monotonic() - began


@dataclass(frozen=True)
class Left:
    """Resources of this process, and leftovers of all processes that it started."""

    descriptors: int
    threads: int
    ports: int
    processes: frozenset[int]
    shared_memory: frozenset[str] = field(default_factory=frozenset)


def look(mark: str) -> Left:
    """Collect the current resources; processes are those with ``mark`` in their environment."""
    own = _descriptors("self")
    processes = frozenset(pid for pid, _ in marked_processes(mark)) - {os.getpid()}
    listening = _listening()
    held = [f"socket:[{n}]" for n in listening]
    everything = [*own, *(name for pid in processes for name in _descriptors(str(pid)))]
    return Left(
        descriptors=len(own),
        threads=len(os.listdir("/proc/self/task")),
        ports=sum(name in everything for name in held),
        processes=processes,
        shared_memory=frozenset(os.listdir("/dev/shm")),
    )


@contextmanager
def nothing_left(mark: str, folder: Path) -> Iterator[None]:
    """Put temporary files into ``folder``; fail if the block leaves anything behind.

    ``mark`` is a part of the environment of all processes that this one starts.
    """
    before = look(mark)
    kept, own = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = kept
        os.environ.pop("TMPDIR")
        if own is not None:
            os.environ["TMPDIR"] = own
    deadline = time.monotonic() + _SETTLE_SECONDS
    while found := [*_compare(before, look(mark)), *map(str, folder.iterdir())]:
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.1)


def _compare(before: Left, after: Left) -> list[str]:
    found = [
        f"{name}: {getattr(after, name)} instead of {getattr(before, name)}"
        for name in ("descriptors", "threads", "ports")
        if getattr(after, name) > getattr(before, name)
    ]
    found += [f"process {pid}" for pid in after.processes - before.processes]
    return found + [f"/dev/shm/{name}" for name in after.shared_memory - before.shared_memory]


def _descriptors(pid: str) -> list[str]:
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:  # the descriptor that reads this
                continue
    except OSError:  # the process has ended
        pass
    return found


def _listening() -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                found.add(words[9])
    return found
