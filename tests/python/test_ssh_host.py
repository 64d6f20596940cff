"""A fork server on hosts: later calls use it, with the same results, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import full, wait_for
from sshd import SshHosts, no_ssh_hosts, ssh_hosts

pytestmark = pytest.mark.skipif(bool(no_ssh_hosts()), reason="NO HOSTS WITH SSH")

# Each request is a call; the answer has the ranks whose workers were forked.
SCRIPT = """
import io, json, os, sys, zipfile
import keras, numpy as np
import pybackend
from pybackend.core.launchers.remote import task
from pybackend.core.launchers.remote.bundle import LIBRARY

folder, *options = sys.argv[1:]
library = task.library

class Look(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        with open("/proc/self/cmdline") as line, open(f"{folder}/{os.getpid()}", "w") as found:
            found.write(str("forking import serve" in line.read()))
        raise_if_wanted()

def raise_if_wanted():
    if fails:
        raise ValueError("no such luck")

def look():
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    found = []
    for path in paths:
        with open(path) as file:
            found.append(file.read() == "True")
        os.remove(path)
    return found

def shorten(idle):
    name, long = "pybackend/core/launchers/forking.py", b"IDLE_SECONDS = 600.0"
    shorter = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(library()[LIBRARY])) as packed,
        zipfile.ZipFile(shorter, "w") as written,
    ):
        assert long in packed.read(name)
        for one in packed.namelist():
            content = packed.read(one)
            if one == name:
                content = content.replace(long, f"IDLE_SECONDS = {idle}".encode())
            if one != f"{name}c":
                written.writestr(one, content)
    return {LIBRARY: shorter.getvalue()}

def call(workers=1, elastic=False, trials=0, environment={}, **more):
    hosts = pybackend.hosts(request["hosts"], ssh_options=options, environment=environment)
    resources = pybackend.Resources(fork_server=True)
    common = dict(seed=1, verbose=0, callbacks=[Look()], resources=resources)
    if trials:
        grid = {"batch_size": list(range(4, 4 + trials))}
        found = pybackend.train_many(
            hosts, build, (x, x.sum(1)), grid=grid, workers_per_trial=1, **common
        )
        return [found.best("loss").result.history["loss"]]
    workers = pybackend.Elastic(workers) if elastic else workers
    result = pybackend.barrier_train(hosts, model, (x, x.sum(1)), workers=workers, **common)
    return [result.history["loss"], result.workers[0].weights_sha256]

def build():
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model

keras.utils.set_random_seed(0)
model = build()
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
for line in sys.stdin:
    request = json.loads(line)
    fails = request.pop("fails", False)
    os.environ["TFDIST_FORK_SERVER"] = request.pop("variable", "1")
    idle = request.pop("idle", None)
    task.library = library if idle is None else lambda: shorten(idle)
    try:
        found = call(**{k: v for k, v in request.items() if k != "hosts"})
    except pybackend.WorkerFailedError as error:
        found = [error.exception_type]
    print(json.dumps([look(), *found]), flush=True)
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Start the hosts a and b."""
    with ssh_hosts(["a", "b"], tmp_path_factory.mktemp("hosts")) as made:
        yield made


class Session:
    """A session with its own Python, whose workers do not come from the tests' forge."""

    def __init__(self, there: SshHosts, folder: Path) -> None:
        own = {name: value for name, value in os.environ.items() if "TFDIST_TEST_FORGE" not in name}
        folder.mkdir()
        self._there = there
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), *there.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own,
        )

    def call(self, hosts: str = "a", **settings: Any) -> Any:
        """Train; return whether each worker was forked, the losses and a digest."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"hosts": hosts, **settings}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def servers(self, host: int = 0) -> dict[int, int]:
        """Return the keepers on a host by the process IDs of their fork servers."""
        lines = self._there.processes(host).items()
        pattern = re.compile(r"forking import serve.* (\d+)-\d+\b", re.DOTALL)
        found = [(pid, pattern.search(line)) for pid, line in lines]
        return {pid: int(one[1]) for pid, one in found if one}


@pytest.fixture
def session(there: SshHosts, tmp_path: Path) -> Iterator[Session]:
    """Start a session, after which nothing may be left."""
    with starting(there, tmp_path / "seen") as started:
        yield started
    wait_for(lambda: left_on(there) == [])


@contextmanager
def starting(there: SshHosts, folder: Path) -> Iterator[Session]:
    started = Session(there, folder)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def left_on(there: SshHosts) -> list[Any]:
    """Return the processes and files on the hosts."""
    processes = [line for host in range(2) for line in there.processes(host).values()]
    return [*processes, *there.files()]


@pytest.mark.parametrize("end", ["kill", full("exit")])
def test_later_calls_use_it_and_nothing_is_left(
    there: SshHosts, session: Session, end: str
) -> None:
    first, second = session.call(), session.call()
    assert [first[0], second[0]] == [[True], [True]]
    assert second[1:] == first[1:]
    # The keeper's folder alone, without rows and model.
    (folder,) = there.files()
    assert sorted(path.name for path in folder.iterdir()) == ["calls", "lib.zip"]
    if end == "kill":
        session.process.kill()
    else:
        session.process.communicate(timeout=30)
        assert there.files() == []
    wait_for(lambda: left_on(there) == [])


@pytest.mark.full
def test_workers_on_several_hosts(there: SshHosts, session: Session) -> None:
    settings: dict[str, Any] = {"hosts": "a:2,b:2", "workers": 4}
    first, second = session.call(**settings), session.call(**settings)
    assert [first[0], second[0]] == [[True] * 4, [True] * 4]
    assert second[1:] == first[1:]
    alone = session.call("b")  # another number of threads
    assert alone[0] == [True]
    assert session.call("b", fails=True) == [[True], "ValueError"]
    assert session.call("b") == [[True], *alone[1:]]
    assert len(session.servers(0)) == len(session.servers(1)) == 1


@pytest.mark.full
@pytest.mark.parametrize("victim", ["server", "keeper"])
def test_a_killed_server_or_keeper_is_replaced(
    there: SshHosts, session: Session, victim: str
) -> None:
    first = session.call()
    assert session.call() == [[True], *first[1:]]
    ((server, keeper),) = session.servers().items()
    if victim == "server":
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: session.servers() == {})
    else:
        os.kill(keeper, signal.SIGKILL)
        wait_for(lambda: left_on(there) == [])
    assert session.call() == [[True], *first[1:]]
    assert (keeper in session.servers().values()) is (victim == "server")
    assert session.call() == [[True], *first[1:]]


@pytest.mark.full
def test_it_ends_when_it_is_idle_or_turned_off(there: SshHosts, session: Session) -> None:
    first = session.call(idle=20.0)
    assert session.call(idle=20.0) == [[True], *first[1:]]
    wait_for(lambda: left_on(there) == [])
    assert session.call(idle=20.0) == [[True], *first[1:]]
    assert session.call() == [[True], *first[1:]]
    assert session.call(variable="0") == [[False], *first[1:]]
    wait_for(lambda: left_on(there) == [])


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"trials": 4}, {"elastic": True, "workers": 2}])
def test_trials_and_elastic_workers_use_it(
    there: SshHosts, session: Session, settings: dict[str, Any]
) -> None:
    first, second = (session.call("a:2", **settings) for _ in range(2))
    assert all(first[0])
    assert all(second[0])
    assert second[1:] == first[1:]
