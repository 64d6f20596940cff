"""The fork server: later calls use it, with the same results, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import is_running, wait_for
from warm import children

from pybackend.launchers import forking
from pybackend.launchers.worker_kind import describe_worker
from pybackend.machine.processes import name_process, read_main_thread

SCRIPT = """
import json, os, signal, sys
import keras, numpy as np
import pybackend
from pybackend.launchers import forking

forking._ANSWER_SECONDS = 5.0

class LeaveDaemon(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if os.fork() == 0:
            os.setsid()
            open(os.environ["DAEMON"], "w").write(str(os.getpid()))
            signal.pause()

def train():
    result = pybackend.barrier_train(
        "local", model, (x, x.sum(1)), workers=1, seed=1, verbose=0, callbacks=[LeaveDaemon()]
    )
    pids = [worker.pid for worker in result.workers]
    return [pids, result.history["loss"], result.workers[0].weights_sha256]

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
for line in sys.stdin:
    request = json.loads(line)
    os.environ.update(request["environment"])
    if request["forks"] and os.fork() > 0:
        os.wait()
        continue
    print(json.dumps(train()), flush=True)
    if request["forks"]:
        sys.exit()
"""


class Session:
    """A session with its own Python, whose workers do not come from the tests' forge."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.daemon = folder / "daemon"
        own = {name: value for name, value in os.environ.items() if "TFDIST_TEST_FORGE" not in name}
        own |= {"TFDIST_FORK_SERVER": "1", "DAEMON": str(self.daemon), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own,
        )

    def train(self, forks: bool = False, **environment: str) -> Any:
        """Train, in a fork of the session if wanted; return PIDs, losses and a digest."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"environment": environment, "forks": forks}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def server(self) -> int:
        """Return the PID of its only child, once others have ended."""
        wait_for(lambda: len(children(self.process.pid)) == 1)
        return children(self.process.pid)[0]


@contextmanager
def session(folder: Path, **variables: str) -> Iterator[Session]:
    started = Session(folder, **variables)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def test_later_calls_use_it_with_the_same_results_and_leave_nothing(tmp_path: Path) -> None:
    with session(tmp_path) as own:
        first = own.train()
        server = own.server()
        second = own.train()
        assert second[1:] == first[1:]
        assert own.server() == server  # the workers are no children of the session
        wait_for(lambda: not any(map(is_running, second[0])))
        assert not is_running(int(own.daemon.read_text()))
    wait_for(lambda: not is_running(server))


@pytest.mark.full
def test_one_that_ends_hangs_or_differs_is_replaced_and_a_fork_does_not_use_it(
    tmp_path: Path,
) -> None:
    with session(tmp_path) as own:
        first = own.train()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            own.train()  # now it has imported TensorFlow
            server = own.server()
            os.kill(server, number)
            assert own.train()[1:] == first[1:]
            wait_for(lambda pid=server: not is_running(pid))
            assert own.server() != server
        server = own.server()
        assert own.train(TFDIST_ANY="1")[1:] == first[1:]  # an import might read it
        wait_for(lambda: len(children(own.process.pid)) == 2)
        assert own.train(TFDIST_ANY="2")[1:] == first[1:]
        wait_for(lambda: not is_running(server))
        assert own.train(TFDIST_FORK_SERVER="0")[1:] == first[1:]
        assert children(own.process.pid) == []
        assert own.train(TFDIST_FORK_SERVER="1")[1:] == first[1:]
        server = own.server()
        assert own.train(forks=True)[1:] == first[1:]
        assert own.server() == server
        assert own.train()[1:] == first[1:]
        assert own.server() == server


@pytest.mark.full
def test_without_it_nothing_is_left_after_a_call(tmp_path: Path) -> None:
    with session(tmp_path, TFDIST_FORK_SERVER="0") as own:
        own.train()
        assert children(own.process.pid) == []


@pytest.mark.parametrize(
    ("idle", "session", "closes"), [(0.1, None, False), (600, "1-0", False), (600, None, True)]
)
def test_it_ends_when_it_is_idle_or_without_its_session(
    idle: float, session: str | None, closes: bool
) -> None:
    ours, theirs = socket.socketpair()
    owner = name_process(os.getpid()) if session is None else session
    code = f"from pybackend.launchers import fork_serving as f; f.IDLE_SECONDS = {idle}; " + (
        f"f._LOOK_SECONDS = 0.1; f.serve({theirs.fileno()}, {owner!r}, '')"
    )
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.close()
        if closes:
            ours.close()
        assert process.wait(timeout=60) == 0


def test_a_server_that_has_ended_is_no_server() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(OSError):
        forking.ForkedProcess(ours, [], {})


def test_one_that_is_stopped_as_it_is_forked_is_known_and_can_be_killed() -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import os, signal, socket, sys; from pybackend.launchers.forking import attend; "
        "attend(socket.socket(fileno=int(sys.argv[1])), "
        "lambda message: os.kill(os.getpid(), signal.SIGSTOP))"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as guardian:
        theirs.close()
        worker = forking.ForkedProcess(ours, [], dict(os.environ))
        wait_for(lambda: (known := read_main_thread(worker.pid)) is not None and known[0] == "T")
        assert worker.poll() is None
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(60) == -signal.SIGKILL
        worker.stdin.close()
        worker.stdout.close()
    assert guardian.returncode == 0


@pytest.mark.parametrize("changed", [{"CUDA_VISIBLE_DEVICES": "0"}, {}])
def test_workers_are_alike_or_not_forked(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    kinds = [
        describe_worker({**os.environ, "TFDIST_RANK": rank, **own}, sys.executable)
        for rank, own in [("0", {}), ("1", {}), ("1", {"OMP_NUM_THREADS": "7"})]
    ]
    if changed:
        assert kinds == [None] * 3
    else:
        assert kinds[0] is not None
        assert kinds[0] == kinds[1]
        assert kinds[0] != kinds[2]
