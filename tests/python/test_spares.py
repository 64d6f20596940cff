"""Spare workers: used once by the next call, never in another environment, and ended in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import wait_for

SCRIPT = """
import json, os, sys
import keras, numpy as np
import pybackend

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
for line in sys.stdin:
    os.environ.update(json.loads(line))
    result = pybackend.barrier_train("local", model, (x, x.sum(1)), workers=1, seed=1, verbose=0)
    pids = [worker.pid for worker in result.workers]
    print(json.dumps([pids, result.history["loss"], result.workers[0].weights_sha256]), flush=True)
"""


@contextmanager
def session(**variables: str) -> Iterator[Any]:
    """A session of its own, without the forge of the tests: a function that has it train."""
    own = {name: value for name, value in os.environ.items() if "TFDIST_TEST_FORGE" not in name}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**own, "TFDIST_SPARES": "1", **variables},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def train(**changed: str) -> Any:
        print(json.dumps(changed), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    train.pid = process.pid  # type: ignore[attr-defined]
    try:
        yield train
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Return the processes that a session has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_the_next_call_uses_them_once_and_they_end_with_the_session() -> None:
    with session() as train:
        first = train()
        spares = children(train.pid)
        assert len(spares) == 1
        second = train()
        assert second[0] == spares
        assert second[1:] == first[1:]
        wait_for(lambda: not any(map(is_alive, spares)))
        spares = children(train.pid)
        os.kill(spares[0], 9)
        third = train(TFDIST_ANY="1")  # an import might have read it
        assert not set(third[0]) & set(spares)
        assert third[1:] == first[1:]
        wait_for(lambda: not any(map(is_alive, spares)))
        spares = children(train.pid)
        assert len(spares) == 1
    wait_for(lambda: not any(map(is_alive, spares)))


@pytest.mark.full
def test_without_them_nothing_is_left_after_a_call() -> None:
    with session(TFDIST_SPARES="0") as train:
        train()
        assert children(train.pid) == []
