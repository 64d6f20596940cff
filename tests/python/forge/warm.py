"""Worker processes forked from one that has already imported TensorFlow.

The import takes most of the time of a small training. Tests whose subject is not the launcher
avoid it: the worker is a separate process and runs the same code as every worker, with the same
folder, descriptors and environment, but it starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

# Limits for a busy machine: the import of TensorFlow usually takes 5 s.
_START_SECONDS = _END_SECONDS = 180.0
ROOT = Path(__file__).parents[3]
VARIABLE = "TFDIST_TEST_FORGE"
# Set if Spark's Python processes are forked, too.
OF_SPARK = "TFDIST_TEST_FORGE_SPARK"
# The environment of the Python that the forge belongs to.
_PREFIX = "TFDIST_TEST_FORGE_PREFIX"
_POPEN = subprocess.Popen
# The program from which Spark forks the Python processes of its tasks.
DAEMON = "pyspark.daemon"
# Linux namespaces that a host of `namespaces` has for itself.
_NAMESPACES = ("net", "mnt")


class Forge:
    """The process from which workers are forked; ``path`` is its socket while it may be used."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forge-")
        self.path = Path(self._folder.name, "socket")
        self._hidden = self.path.with_name("hidden")
        self._is_hidden = False
        self._lock = threading.Lock()

    def variables(self) -> dict[str, str]:
        """Return variables with which Python processes use it, through `sitecustomize`."""
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            VARIABLE: str(self.path),
            _PREFIX: sys.prefix,
            "TFDIST_FORK_SERVER": "0",  # the forge serves all
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def start(self) -> None:
        """Start it, unless it runs."""
        with self._lock:
            if self._process is None:
                self._process = self._start()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Start workers as for users in this context, even if the forge is started meanwhile."""
        self._is_hidden = True
        if self.path.exists():
            self.path.rename(self._hidden)
        try:
            yield
        finally:
            self._is_hidden = False
            if self._hidden.exists():
                self._hidden.rename(self.path)

    def workers(self) -> list[int]:
        """Return the process ids of its workers that still run."""
        if self._process is None:
            return []
        forked = [pid for waiting in children(self._process.pid) for pid in children(waiting)]
        return [pid for pid in forked if _name(pid) != DAEMON]

    def popen(self, command: Any, **options: Any) -> Any:
        """Act as `subprocess.Popen`, but fork a Python worker's process."""
        if not _is_worker(command):
            return _POPEN(command, **options)
        self.start()
        return _fork(self.path, command, options)

    def close(self) -> None:
        """Stop it; its workers end when their launchers close them."""
        if self._process is not None:
            self._process.communicate(timeout=_END_SECONDS)
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        process = _POPEN(
            [sys.executable, "-u", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # As launchers divide two cores among two workers; it is read at the import.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        assert ready, f"it did not start within {_START_SECONDS:g} s"
        if self._is_hidden:
            self.path.rename(self._hidden)
        return process


class Popen(_POPEN):  # type: ignore[type-arg]
    """Act as `subprocess.Popen` in a process whose environment names a forge."""

    def __new__(cls, command: Any, *others: Any, **options: Any) -> Any:
        """Fork a worker where the forge may be used."""
        path = Path(os.environ.get(VARIABLE, "/nonexistent"))
        if _is_worker(command) and path.exists():
            return _fork(path, command, options)
        return super().__new__(cls)


def _is_worker(command: Any) -> bool:
    is_python = isinstance(command, list) and command[0] == sys.executable
    return is_python and any("'pybackend.core.worker'" in str(word) for word in command)


def _fork(path: str | Path, command: Any, options: Any) -> Any:
    """Have the forge fork what a launcher would start."""
    from pybackend.core.launchers.forking import ForkedProcess

    passed = options["pass_fds"]
    words = command[command.index("-c") + 2 :]
    arguments = words[: len(words) - len(passed)]
    return ForkedProcess(_connect(path), passed, options["env"], arguments)


def run_daemon() -> None:
    """Let a forked process run what Spark started this process for, if possible.

    Spark ends its daemon by closing the standard input, which both have.
    """
    path = os.environ[VARIABLE]
    if not Path(path).exists() or sys.prefix != os.environ.get(_PREFIX):
        return
    message = {
        "arguments": sys.orig_argv[sys.orig_argv.index(DAEMON) + 1 :],
        "environment": dict(os.environ),
        "path": sys.path,
    }
    with _connect(path) as connection:
        connection.recv(1)  # it is ready
        folder = os.open(".", os.O_PATH)
        socket.send_fds(connection, [b"."], [0, 1, 2, folder])
        connection.sendall(json.dumps(message).encode() + b"\n")
        # As in `forking`: PID and exit status.
        if connection.recv(5, socket.MSG_WAITALL):
            connection.sendall(b"g")
        answer = connection.recv(5, socket.MSG_WAITALL)
        os._exit(max(0, struct.unpack("<ci", answer)[1]) if answer else 1)


def _connect(path: str | Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def serve(path: str) -> None:
    """Fork a worker for each connection, until standard input closes."""
    gc.disable()
    import cloudpickle  # noqa: F401
    import h5py  # noqa: F401
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import pybackend.core.engine.evaluation
    import pybackend.core.engine.train  # noqa: F401

    gc.freeze()  # garbage collection in a forked process would copy all of this
    gc.enable()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready")
        while 0 not in select.select([0, server], [], [])[0]:
            with server.accept()[0] as connection:
                if os.fork() == 0:
                    server.close()
                    _attend(connection)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; those of its main thread alone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except OSError:  # it has ended
        return ""


def _attend(connection: socket.socket) -> NoReturn:
    """Fork a process, with its guardian, and run its program."""
    from pybackend.core.launchers.forking import attend

    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    asking, _, _ = struct.unpack("3i", credentials)

    def enter(message: Mapping[str, Any]) -> None:
        if "path" not in message:  # Spark's daemon creates its own group
            os.setsid()
        _enter_host(asking)

    try:
        _run(attend(connection, enter))
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _enter_host(pid: int) -> None:
    """Enter the launcher's host, if that is another one of the test's."""
    entered = [
        os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        for kind in _NAMESPACES
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    ]
    # A mount namespace comes with its own root, also where the launcher's root is another one.
    root, folder = os.open(f"/proc/{pid}/root", os.O_RDONLY), os.getcwd()
    for namespace in entered:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(namespace)
    if entered and os.geteuid() == 0:
        os.fchdir(root)
        os.chroot(".")
        os.chdir(folder)
    os.close(root)


def _run(message: Mapping[str, Any]) -> None:
    """Run the program of the message; `-c` is the first argument of one that Python starts so."""
    if "path" in message:
        sys.argv[0] = program = DAEMON
        _become_daemon(message["path"])
    else:
        sys.argv[0], program = "-c", "pybackend.core.worker"
        inherited = os.environ["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*inherited, *(p for p in sys.path[1:] if p not in inherited)]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _become_daemon(path: list[str]) -> None:
    """Become Spark's daemon with its ``path``; only TensorFlow and Keras stay imported."""
    Path("/proc/self/comm").write_text(DAEMON)
    # The package installed by pip is the same, and compiled.
    sys.path[:] = [place for place in path if not place.endswith("/lib/pyspark.zip")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "pybackend"]:
        del sys.modules[name]
    import warm

    subprocess.Popen = warm.Popen  # type: ignore[misc]


def run(command: list[str]) -> int:
    """Run a command whose Python processes, and Spark, fork their workers; return its exit status.

    A forge that the environment names is used, if there is one.
    """
    forge = Forge()
    variables = {**forge.variables(), OF_SPARK: "1"}
    if Path(os.environ.get(VARIABLE, "/nonexistent")).exists():
        variables[VARIABLE] = os.environ[VARIABLE]
    else:
        forge.start()
    try:
        return subprocess.run(command, env={**os.environ, **variables}).returncode
    finally:
        forge.close()


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2:]))
    serve(sys.argv[1])
