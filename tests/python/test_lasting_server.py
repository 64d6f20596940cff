"""The fork server of a Spark executor: later calls use it, and it ends with the executor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, is_running, marked_processes, spark_session, wait_for

from pybackend import Elastic, InputError, Resources, barrier_train, kubernetes, slurm
from pybackend.launchers.fork_serving import OTHER, REQUEST, SAME
from pybackend.launchers.lasting_server import LastingServer, name_socket
from pybackend.launchers.worker_kind import describe_worker
from pybackend.machine.processes import name_process

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = np.arange(32) % 3
SERVER = b"fork_serving import serve"
FORKING = Resources(fork_server=True)
# Workers of these executors start as users' do.
AS_USERS_DO = {
    "spark__executorEnv__TFDIST_TEST_FORGE": "",
    "spark__executorEnv__TFDIST_FORK_SERVER": "1",
}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_FORK_SERVER", "1")


class KeepCommand(keras.callbacks.Callback):
    """Writes the command with which each worker's process, or the one it was forked from, began."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_train_begin(self, logs: Any = None) -> None:
        command = Path("/proc/self/cmdline").read_bytes()
        Path(self.folder, os.environ["TFDIST_RANK"]).write_bytes(command)


def train(spark: Any, folder: Path, **options: Any) -> tuple[Any, list[bool]]:
    """Train; return the result, and which of the workers were forked from a server."""
    for path in folder.iterdir():
        path.unlink()
    result = barrier_train(
        spark,
        build_dense,
        (X, Y),
        **{"workers": 2, "resources": FORKING} | options,
        seed=1,
        verbose=0,
        callbacks=[KeepCommand(folder)],
    )
    return result, [SERVER in path.read_bytes() for path in sorted(folder.iterdir())]


def servers() -> list[int]:
    """Return the PIDs of the servers of this run; a worker's guardian has the same command."""
    found = [pid for pid, command in marked_processes() if SERVER in command]
    return [pid for pid in found if parent_of(pid) not in found]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def wait_until_ready(server: int) -> None:
    """Wait until a server has imported TensorFlow, and answers."""
    words = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    request(words[-3].decode(), b"")


def digests(result: Any) -> list[str]:
    return [worker.weights_sha256 for worker in result.workers]


@pytest.mark.timeout(240)
def test_later_calls_fork_their_workers_and_the_server_ends_with_its_executor(
    tmp_path: Path,
) -> None:
    with spark_session("local-cluster[1,2,1024]", **AS_USERS_DO) as spark:
        first, forked = train(spark, tmp_path)
        assert forked == [False, False]
        wait_for(lambda: len(servers()) == 1)
        (server,) = servers()
        wait_until_ready(server)
        second, forked = train(spark, tmp_path)
        assert forked == [True, True]
        assert digests(first) == digests(second)
        assert servers() == [server]
    wait_for(lambda: not is_running(server))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_other_workers_elastic_ones_and_killed_servers(tmp_path: Path) -> None:
    with spark_session("local-cluster[1,2,1024]", **AS_USERS_DO) as spark:
        train(spark, tmp_path, resources=None)
        assert servers() == []
        train(spark, tmp_path)
        (server,) = servers()
        # Other variables: these workers are of another kind, and so is the next server.
        other = Resources(cpus=2, fork_server=True)
        _, forked = train(spark, tmp_path, workers=1, resources=other)
        assert forked == [False]
        assert not is_running(server)
        _, forked = train(spark, tmp_path, workers=1, resources=other)
        assert forked == [True]
        (server,) = servers()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            wait_until_ready(server)
            os.kill(server, number)
            _, forked = train(spark, tmp_path, workers=1, resources=other)
            assert forked == [False]
            assert not is_running(server)
            wait_for(lambda: len(servers()) == 1)
            (server,) = servers()
        elastic = {"workers": Elastic(workers=2), "resources": FORKING}
        first, forked = train(spark, tmp_path, **elastic)
        assert forked == [False, False]
        second, forked = train(spark, tmp_path, **elastic)
        assert forked == [True, True]
        assert digests(first) == digests(second)
        found = servers()
    wait_for(lambda: not any(map(is_running, found)))


SERVE = "from pybackend.launchers import fork_serving as f; f._LOOK_SECONDS = 0.1; "


def start(owner: str, digest: bytes, idle: float = 600.0) -> subprocess.Popen[bytes]:
    """Start a server that has not imported TensorFlow."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name_socket(owner))
        listener.listen()
        number = listener.fileno()
        serve = f"f.IDLE_SECONDS = {idle}; f.serve({number}, {owner!r}, {digest.hex()!r})"
        return subprocess.Popen([sys.executable, "-c", SERVE + serve], pass_fds=[number])


def request(owner: str, content: bytes) -> bytes:
    """Send a server a request; return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name_socket(owner))
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        try:
            return connection.recv(1)
        except ConnectionResetError:  # it was closed without reading
            return b""


@pytest.fixture
def owner() -> Any:
    """The name of a process that runs as long as the test."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        yield name_process(process.pid)


def test_it_ends_when_it_is_idle_or_without_its_owner() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        owner = name_process(process.pid)
        assert start(owner, bytes(32), idle=0.1).wait(timeout=60) == 0
        assert not LastingServer(owner).is_running()
        server = start(owner, bytes(32))
        assert request(owner, b"") == b""
        assert LastingServer(owner).is_running()
    assert server.wait(timeout=60) == 0


def test_one_that_starts_other_workers_leaves_its_name_to_the_next(owner: str) -> None:
    server = start(owner, bytes(32))
    assert request(owner, REQUEST + bytes(31) + b"1") == OTHER
    assert server.wait(timeout=60) == 0
    kind = describe_worker(dict(os.environ), sys.executable)
    assert kind is not None
    server = start(owner, kind.digest())
    assert request(owner, REQUEST + kind.digest()) == SAME  # this connection forks nothing
    other = describe_worker({**os.environ, "TFDIST_ANY": "1"}, sys.executable)
    assert other is not None
    assert LastingServer(owner).fork(other, "/", [], {}) is None
    assert server.wait(timeout=60) == 0
    assert LastingServer(owner).fork(other, "/", [], {}) is None  # there is none


def test_a_client_that_sends_no_whole_request_loses_its_own_connection_only(owner: str) -> None:
    whole = REQUEST + bytes(32)
    server = start(owner, bytes(32))
    for content in (b"", whole[:5], whole[:30], whole[:-1], b"GET / HTTP/1.1\r\n" * 9):
        assert request(owner, content) == b""
    for rest in (b"", b"{}\n", b"garbage" * 100):  # of the guardian that it forks
        assert request(owner, whole + rest) == SAME
    assert request(owner, whole) == SAME
    assert server.poll() is None
    server.kill()
    server.wait()


def test_other_users_get_no_workers(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = describe_worker(dict(os.environ), sys.executable)
    assert kind is not None
    mine, own = os.geteuid(), name_socket(owner)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own)
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        assert LastingServer(owner).fork(kind, "/", [], {}) is None
        accepted = listener.accept()[0]
        with accepted:
            assert accepted.recv(1) == b""  # not even the kind was sent
    code = f"import os; os.geteuid = lambda: {mine + 1}; {SERVE}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own)
        listener.listen()
        number = listener.fileno()
        serve = f"f.serve({number}, {owner!r}, {kind.digest().hex()!r})"
        server = subprocess.Popen([sys.executable, "-c", code + serve], pass_fds=[number])
    assert request(owner, REQUEST + kind.digest()) == b""
    server.kill()
    server.wait()


@pytest.mark.parametrize("launcher", [slurm(), kubernetes("image")], ids=["slurm", "kubernetes"])
def test_launchers_without_one_say_so(launcher: Any) -> None:
    with pytest.raises(InputError, match=r"`fork_server` .* is for this machine, Spark and hosts"):
        barrier_train(launcher, build_dense, (X, Y), workers=2, resources=FORKING)
