"""What every launcher does. The tests of each launcher's module include these for its cluster."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import pytest
from cloudpickle import dumps, register_pickle_by_value
from conftest import build_dense, wait_for, worker_processes

import pybackend
from pybackend import WorkerFailedError

# Not installed where the workers run.
register_pickle_by_value(sys.modules[__name__])
PATIENCE = 90.0
_DRIVER = """
import sys, pybackend
{setup}
def wait(context):
    import threading
    print("begun", context.rank, flush=True)
    threading.Event().wait(300)
pybackend.barrier_run({target}, wait, workers=2, verbose=2)
"""
_ELASTIC_DRIVER = """
import os, threading, keras, numpy, pybackend
class Wait(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("begun", os.environ["TFDIST_RANK"], flush=True)
        threading.Event().wait(300)
def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
rows = numpy.zeros((8, 4)), numpy.zeros(8)
workers = pybackend.Elastic(2)
pybackend.barrier_train({target}, build, rows, workers=workers, callbacks=[Wait()], verbose=2)
"""
_JOINED = """
import json, pickle, sys, pybackend
from pathlib import Path
index, addresses, folder = json.loads(sys.argv[1])
pybackend.join(addresses, index)
try:
    found = pybackend.barrier_run(None, pickle.loads(Path(folder, "fn").read_bytes()), verbose=2)
except pybackend.WorkerFailedError as error:
    found = error
Path(folder, str(index)).write_bytes(pickle.dumps(found))
"""


@dataclass
class System:
    """A launcher with a cluster for two workers.

    Attributes
    ----------
    target
        The first argument of a call.
    expression, setup
        Python code of such an argument, and the statements that it needs, for another process.
    hosts
        Names of the workers' hosts in errors, by rank.
    variables
        Variables that were set for the workers.
    left
        Returns the processes and files of calls that are still there.
    """

    target: Any
    expression: str
    setup: str = ""
    hosts: tuple[str, ...] = ("127.0.0.1", "127.0.0.1")
    variables: dict[str, str] = field(default_factory=dict)
    left: Callable[[], Sequence[Any]] = worker_processes

    def run(self, fn: Callable[[Any], Any]) -> tuple[list[Any], str]:
        """Run a function on two workers; return its values, and what the driver printed."""
        with redirect_stdout(io.StringIO()) as shown:
            values = pybackend.barrier_run(self.target, fn, workers=2, verbose=2)
        return values, shown.getvalue()

    def drivers(self) -> list[list[str]]:
        """Return the commands of the processes that make an endless call."""
        return [["-c", _DRIVER.format(setup=self.setup, target=self.expression)]]


class Joined(System):
    """Processes that users start themselves; ``addresses`` returns new ones for each call."""

    def __init__(self, addresses: Callable[[], list[str]], folder: Path) -> None:
        super().__init__(None, "None")
        self.addresses, self.folder = addresses, folder

    def run(self, fn: Callable[[Any], Any]) -> tuple[list[Any], str]:
        (self.folder / "fn").write_bytes(dumps(fn))
        addresses = self.addresses()
        texts = []
        started = [
            _start(["-c", _JOINED, json.dumps([index, addresses, str(self.folder)])])
            for index in range(2)
        ]
        for process in started:
            texts.append(process.communicate(timeout=PATIENCE)[0])
        found = [pickle.loads((self.folder / str(index)).read_bytes()) for index in range(2)]  # noqa: S301
        first, second = found
        if isinstance(first, WorkerFailedError):
            assert (first.rank, first.host) == (second.rank, second.host)
            raise first
        assert first == second
        return first, "".join(texts)

    def drivers(self) -> list[list[str]]:
        addresses = self.addresses()
        joins = [f"pybackend.join({addresses}, {index})" for index in range(2)]
        return [["-c", _DRIVER.format(setup=join, target="None")] for join in joins]


class CallAtBegin(keras.callbacks.Callback):
    """Calls a function when a training begins, and prints its value."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def on_train_begin(self, logs: Any = None) -> None:
        rank = int(os.environ["TFDIST_RANK"])
        print("value", json.dumps(self.fn(types.SimpleNamespace(rank=rank, world_size=2))))


@dataclass
class ElasticTraining(System):
    """Elastic training: a function is called by a callback."""

    rows: Any = None

    def run(self, fn: Callable[[Any], Any]) -> tuple[list[Any], str]:
        with redirect_stdout(io.StringIO()) as shown:
            pybackend.barrier_train(
                self.target,
                build_dense,
                self.rows,
                workers=pybackend.Elastic(2, min=2),
                callbacks=[CallAtBegin(fn)],
                verbose=2,
            )
        values = dict(re.findall(r"^\[(\d)\] value (.*)$", shown.getvalue(), re.MULTILINE))
        return [json.loads(values[rank]) for rank in sorted(values)], shown.getvalue()

    def drivers(self) -> list[list[str]]:
        return [["-c", _ELASTIC_DRIVER.format(target=self.expression)]]


class KilledAsItStarts:
    """Kills the worker of rank 1 when it reads what was sent to it."""

    def __setstate__(self, state: Any) -> None:
        if os.environ.get("TFDIST_WORKER") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def __getstate__(self) -> dict[str, int]:
        return {"kept": 1}

    def __call__(self, context: Any) -> None:
        """Wait forever, as the others do."""
        threading.Event().wait(300)


def test_results_variables_and_lines_arrive(system: System) -> None:
    names = ["TFDIST_RANK", "OMP_NUM_THREADS", *system.variables]

    def work(context: Any) -> Any:
        print("a line of", context.rank)
        return [context.rank, context.world_size, [os.environ.get(name) for name in names]]

    values, shown = system.run(work)
    assert [value[:2] for value in values] == [[0, 2], [1, 2]]
    for rank, (_, _, (own, threads, *others)) in enumerate(values):
        assert (own, others) == (str(rank), list(system.variables.values()))
        assert int(threads) >= 1
        assert f"[{rank}] a line of {rank}\n" in shown


def test_an_exception_names_its_worker_and_the_reason(system: System) -> None:
    def fail(context: Any) -> None:
        print("about to fail")
        if context.rank == 1:
            raise KeyError("no such digit")

    with pytest.raises(WorkerFailedError, match="failed: KeyError: 'no such digit'") as caught:
        system.run(fail)
    error = caught.value
    assert (error.rank, error.host, error.exception_type) == (1, system.hosts[1], "KeyError")
    assert "about to fail" in error.log
    frames = [line for line in error.worker_traceback.splitlines() if line.startswith("  File")]
    assert "pybackend" not in frames[0]  # no line of tfdist's before the user's
    assert frames[-1].endswith("in fail")
    assert _timeline(error)["failed"] == "'no such digit'"
    wait_for(lambda: not system.left(), PATIENCE)


def test_a_worker_that_is_killed_is_named_with_the_signal(system: System) -> None:
    def die(context: Any) -> None:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _check_killed(system, die)


def test_a_worker_that_is_killed_as_it_starts_is_named(system: System) -> None:
    _check_killed(system, KilledAsItStarts())


def _check_killed(system: System, fn: Callable[[Any], Any]) -> None:
    with pytest.raises(WorkerFailedError, match="the process was killed by SIGKILL") as caught:
        system.run(fn)
    error = caught.value
    assert (error.rank, error.host, error.exception_type) == (1, system.hosts[1], "ProcessDied")
    assert _timeline(error)["ended"] == "killed by SIGKILL"
    assert {one.rank for one in error.timeline} == {0, 1}
    assert {one.exception_type for one in error.others} <= {"Stopped", "PeerLostError"}


def _timeline(error: WorkerFailedError) -> dict[str, str]:
    """Return the states of worker 1 in order, with their reasons; a loss is a failure."""
    states = {one.state: one.reason for one in error.timeline if one.rank == 1}
    assert next(iter(states)) == "started"
    return {"failed": states.get("lost", ""), **states}


def test_ctrl_c_leaves_nothing_behind(system: System) -> None:
    _end_driver(system, signal.SIGINT)


def test_nothing_outlives_a_driver_that_is_killed(system: System) -> None:
    _end_driver(system, signal.SIGKILL)


def _end_driver(system: System, number: signal.Signals) -> None:
    """Make an endless call in another process, and end it as a terminal does: with its group."""
    with _started(system.drivers()) as drivers:
        assert system.left()
        for driver in drivers:
            with suppress(ProcessLookupError):  # it has lost the others
                os.killpg(driver.pid, number)
        assert drivers[0].wait(PATIENCE) == -number
        wait_for(lambda: not system.left(), PATIENCE)


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(pybackend.__file__).parents[1])},
    )


@contextmanager
def _started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start drivers, until their two workers have begun."""
    drivers = [_start(command) for command in commands]
    try:
        lines, text = ["[0] begun 0\n", "[1] begun 1\n"], ""
        for rank, driver in enumerate(drivers):
            assert driver.stdout is not None
            missing = {*lines} if len(drivers) == 1 else {lines[rank]}
            while missing:
                line = driver.stdout.readline()
                assert line, text
                text += line
                missing.discard(line)
        yield drivers
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def contract(*daily: str, without: Sequence[str] = ()) -> type:
    """Return the class of these tests for a module, which has a fixture `system`.

    Parameters
    ----------
    daily
        The names of tests that are not `full`.
    without
        The names of those that do not hold, or that other tests of the launcher include.
    """
    assert {*daily, *without} <= set(_TESTS)
    names = [name for name in _TESTS if name not in without]
    return type("TestContract", (), {name: _as_method(name, name in daily) for name in names})


def _as_method(name: str, is_daily: bool) -> Any:
    def run(self: Any, system: System) -> None:
        _TESTS[name](system)

    return run if is_daily else pytest.mark.full(run)


_TESTS: dict[str, Callable[[System], None]] = {
    name: test for name, test in list(globals().items()) if name.startswith("test_")
}
