"""The fork server: later calls use it, with the same results, and it leaves nothing behind."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import is_running, wait_for
from warm import children

from pybackend.core.launchers import fork_server, forking
from pybackend.core.launchers.fork_server import ForkServers, WorkerKind, describe_worker
from pybackend.core.launchers.forking import READY
from pybackend.core.machine.processes import name_process, read_main_thread

SCRIPT = """
import json, os, signal, sys
import keras, numpy as np
import pybackend
from pybackend.core.launchers import forking

forking.ANSWER_SECONDS = 5.0

class LeaveDaemon(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if os.fork() == 0:
            os.setsid()
            open(os.environ["DAEMON"], "w").write(str(os.getpid()))
            signal.pause()

def train(workers):
    result = pybackend.barrier_train(
        "local", model, (x, x.sum(1)), workers=workers, seed=1, verbose=0, callbacks=[LeaveDaemon()]
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
    print(json.dumps(train(request["workers"])), flush=True)
    if request["forks"]:
        sys.exit()
"""


def start_python(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python, with pipes, whose workers do not come from the tests' forge."""
    own = {name: value for name, value in os.environ.items() if "TFDIST_TEST_FORGE" not in name}
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**own, "TFDIST_FORK_SERVER": "1", **variables},
    )


class Session:
    """A session with its own Python, whose workers do not come from the tests' forge."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.daemon = folder / "daemon"
        variables = {"DAEMON": str(self.daemon), **variables}
        self.process = start_python("-c", SCRIPT, **variables)

    def train(self, forks: bool = False, workers: int = 1, **environment: str) -> Any:
        """Train, in a fork of the session if wanted; return PIDs, losses and a digest."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"environment": environment, "forks": forks, "workers": workers}
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


def test_calls_with_any_number_of_workers_use_it_and_leave_nothing(tmp_path: Path) -> None:
    with session(tmp_path) as own:
        first = own.train()
        server = own.server()
        assert not any(pid in children(own.process.pid) for pid in first[0])
        second = own.train(workers=2)
        assert own.train(workers=2)[1:] == second[1:]
        assert own.train()[1:] == first[1:]
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


def test_an_interactive_session_starts_it_with_the_import_of_keras() -> None:
    with start_python("-i") as interpreter:
        assert interpreter.stdin is not None
        assert interpreter.stdout is not None
        print("import pybackend; print('ready')", file=interpreter.stdin, flush=True)
        assert interpreter.stdout.readline() == "ready\n"
        assert children(interpreter.pid) == []
        print("import keras", file=interpreter.stdin, flush=True)
        wait_for(lambda: len(children(interpreter.pid)) == 1)
        (server,) = children(interpreter.pid)
        interpreter.kill()
    wait_for(lambda: not is_running(server))


# As in the program of a server, by which it is known, but without TensorFlow.
SERVE = (
    "from pybackend.core.launchers.forking import serve; "
    "from pybackend.core.launchers import forking as f; f._LOOK_SECONDS = 0.1; "
)


@pytest.fixture
def owner() -> Iterator[str]:
    """The name of a process that runs as long as the test."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        yield name_process(process.pid)


@pytest.fixture
def endless_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers that are started import for longer than the test runs."""
    monkeypatch.setattr(forking, "SERVE", "import time; time.sleep(600)")


def make_kind(**variables: str) -> WorkerKind:
    kind = describe_worker({**os.environ, **variables}, sys.executable)
    assert kind is not None
    return kind


@contextmanager
def serving(
    owner: str, kind: WorkerKind, idle: float = 600.0, before: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server that has not imported TensorFlow."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(ForkServers(owner).name(kind))
        listener.listen()
        number = listener.fileno()
        code = f"{before}{SERVE}f.IDLE_SECONDS = {idle}; serve({number}, {owner!r})"
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[number])
    with process:
        yield process
        process.kill()


@contextmanager
def connected(owner: str, kind: WorkerKind) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(ForkServers(owner).name(kind))
        yield connection


def request(owner: str, kind: WorkerKind, content: bytes) -> bytes:
    """Send a server something; return all that it answers."""
    with connected(owner, kind) as connection:
        answer = connection.recv(1)
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return answer + connection.recv(9)
        except OSError:  # it was closed without reading
            return answer


def test_it_ends_when_it_is_idle_or_without_its_owner() -> None:
    kind = make_kind()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        owner = name_process(process.pid)
        servers = ForkServers(owner)
        with serving(owner, kind, idle=0.1) as server:
            assert server.wait(timeout=60) == 0
        assert servers.list_names() == []
        with serving(owner, kind) as server:
            assert request(owner, kind, b"") == READY
            assert servers.list_names() == [servers.name(kind)]
            process.kill()
            assert server.wait(timeout=60) == 0
    with serving(owner, kind) as server:  # its owner has ended before
        assert server.wait(timeout=60) == 0


def test_a_client_that_sends_no_whole_request_loses_its_own_connection_only(owner: str) -> None:
    kind = make_kind()
    digest = bytes.fromhex(kind.digest())
    with serving(owner, kind) as server:
        for content in (b"", digest[:5], digest, b"{}\n", b"GET / HTTP/1.1\r\n" * 9):
            assert request(owner, kind, content) == READY
        assert request(owner, kind, b"") == READY
        assert server.poll() is None


def test_a_server_of_other_workers_gives_way_and_none_starts_without_memory(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, servers = [make_kind(TFDIST_ANY=value) for value in "ab"], ForkServers(owner)
    with serving(owner, kinds[0]) as first:
        assert request(owner, kinds[0], b"") == READY  # it serves: now it can be found
        servers.start(kinds[0], 1)
        assert servers.list_names() == [servers.name(kinds[0])]
        assert first.poll() is None
        monkeypatch.setattr(fork_server, "read_free_memory", lambda: 1.5e9)
        assert servers.fork(kinds[1], "/", [], {}, processes=2) is None
        assert first.wait(60) == -signal.SIGKILL
    wait_for(lambda: not servers.list_names())  # a guardian that still ends holds the name, too


@pytest.mark.usefixtures("endless_import")
def test_one_that_imports_for_long_is_not_waited_for_and_not_killed(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, servers = make_kind(), ForkServers(owner)
    monkeypatch.setattr(fork_server, "_IMPORT_SECONDS", 0.1)
    began = time.monotonic()
    for _ in range(3):
        assert servers.fork(kind, "/", [], {}) is None
    assert time.monotonic() - began < forking.ANSWER_SECONDS
    assert servers.list_names() == [servers.name(kind)]
    servers.close()
    assert servers.list_names() == []


def test_one_that_cannot_import_is_started_once(
    owner: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, servers = make_kind(), ForkServers(owner)
    code = f"open({str(tmp_path / 'starts')!r}, 'a').write('.'); raise ImportError"
    monkeypatch.setattr(forking, "SERVE", code)
    assert servers.fork(kind, "/", [], {}) is None
    wait_for(lambda: not servers.list_names())
    for _ in range(3):
        assert servers.fork(kind, "/", [], {}) is None
    assert (tmp_path / "starts").read_text() == "."


def test_other_users_get_no_workers(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, servers, mine = make_kind(), ForkServers(owner), os.geteuid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(servers.name(kind))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        assert servers.fork(kind, "/", [], {}) is None
        with listener.accept()[0] as accepted:
            assert accepted.recv(1) == b""  # nothing was sent
        monkeypatch.undo()
    before = f"import os; os.geteuid = lambda: {mine + 1}; "
    with serving(owner, kind, before=before) as server:
        with connected(owner, kind) as connection:
            assert connection.recv(1) == b""
        assert server.poll() is None


def test_a_server_that_has_ended_is_no_server() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(OSError):
        forking.ForkedProcess(ours, [], {})


def test_one_that_is_stopped_as_it_is_forked_is_known_and_can_be_killed() -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import os, signal, socket, sys; from pybackend.core.launchers.forking import attend; "
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
        for rank, own in [("0", {}), ("1", {"OMP_NUM_THREADS": "7"}), ("1", {"TFDIST_ANY": "7"})]
    ]
    if changed:
        assert kinds == [None] * 3
    else:
        assert kinds[0] is not None
        assert kinds[0] == kinds[1]
        assert kinds[0] != kinds[2]
        assert kinds[0] == make_kind(TFDIST_RANK="0", CUDA_VISIBLE_DEVICES="")


@pytest.mark.usefixtures("endless_import")
def test_processes_of_an_owner_that_start_it_at_once_all_use_it(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, servers = make_kind(), ForkServers(owner)
    monkeypatch.setattr(fork_server, "_IMPORT_SECONDS", 0.1)
    servers.start(kind, 1)
    other = ForkServers(owner)
    monkeypatch.setattr(other, "list_names", list)  # it has looked before
    other.start(kind, 1)
    servers.close()
    assert servers.list_names() == []


@pytest.mark.usefixtures("endless_import")
def test_a_worker_in_a_hurry_neither_starts_it_nor_waits(owner: str) -> None:
    kind, servers = make_kind(), ForkServers(owner)
    began = time.monotonic()
    assert servers.fork(kind, "/", [], {}, waits=False) is None
    assert servers.list_names() == []
    servers.start(kind, 1)
    assert servers.fork(kind, "/", [], {}, waits=False) is None
    assert time.monotonic() - began < forking.ANSWER_SECONDS
    servers.close()


def test_files_below_a_folder_named_openblas_do_not_end_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    path = tmp_path / "openblas" / "rows.npy"
    path.parent.mkdir()
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        forking._limit_threads()
