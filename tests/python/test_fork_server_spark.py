"""Fork servers of Spark's executors: later calls use them, and they end with their executor."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, is_running, marked_processes, spark_session, wait_for

from pybackend import Elastic, InputError, Resources, barrier_train, kubernetes, slurm
from pybackend.core.launchers.fork_server import ForkServers
from pybackend.core.launchers.forking import READY

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = np.arange(32) % 3
SERVER = b"forking import serve"
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
    owner = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")[-2].decode()
    (name,) = ForkServers(owner).list_names()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        assert connection.recv(1) == READY


def digests(result: Any) -> list[str]:
    return [worker.weights_sha256 for worker in result.workers]


@pytest.mark.timeout(240)
def test_the_workers_of_all_calls_are_forked_and_the_server_ends_with_its_executor(
    tmp_path: Path,
) -> None:
    with spark_session("local-cluster[1,2,1024]", **AS_USERS_DO) as spark:
        first, forked = train(spark, tmp_path)
        assert forked == [True, True]
        (server,) = servers()
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
        other = Resources(cpus=2, fork_server=True)  # other numbers of threads
        _, forked = train(spark, tmp_path, workers=1, resources=other)
        assert forked == [True]
        assert servers() == [server]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            wait_until_ready(server)
            os.kill(server, number)
            _, forked = train(spark, tmp_path, workers=1, resources=other)
            assert forked == [number == signal.SIGKILL]  # a stopped one is waited for
            assert not is_running(server)
            _, forked = train(spark, tmp_path, workers=1, resources=other)
            assert forked == [True]
            (server,) = servers()
        elastic = {"workers": Elastic(workers=2), "resources": FORKING}
        wait_until_ready(server)
        first, forked = train(spark, tmp_path, **elastic)
        assert forked == [True, True]
        second, forked = train(spark, tmp_path, **elastic)
        assert forked == [True, True]
        assert digests(first) == digests(second)
        found = servers()
    wait_for(lambda: not any(map(is_running, found)))


@pytest.mark.parametrize("launcher", [slurm(), kubernetes("image")], ids=["slurm", "kubernetes"])
def test_launchers_without_one_say_so(launcher: Any) -> None:
    with pytest.raises(InputError, match=r"`fork_server` .* is for this machine, Spark and hosts"):
        barrier_train(launcher, build_dense, (X, Y), workers=2, resources=FORKING)
