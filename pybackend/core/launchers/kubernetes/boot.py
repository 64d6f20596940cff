"""First code to run in a pod, and the code that connects the driver to it; both are sent as text.

A pod's main process waits for the driver on a Unix socket inside the pod. The driver uses
Kubernetes to execute `relay` there, whose two pipes to the driver then become the main process's
pipes. Neither the pod nor the driver has to be reachable from outside. The pod's log contains only
the output of its processes, not their messages.

If the driver sends a Python environment, the main process then unpacks it (`unpack`), and continues
in its Python.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

SOCKET = "driver.sock"
# Begins the line that reports an environment that was not unpacked.
FAILED = b"tfdist failed "


def wait_for_driver(folder: str, seconds: float) -> None:
    """Use the driver's connection as standard input and output, and exec another program.

    The socket is in ``folder``; the driver has ``seconds`` to connect.
    """
    path = os.path.join(folder, SOCKET)
    # The kernel ignores signals to a pod's first process if it has no handler for them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.umask(0o077)  # new files are for this user only
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        server.settimeout(seconds)
        try:
            driver, _ = server.accept()
        except OSError:
            sys.exit(f"the driver did not connect within {seconds:g} s")
        os.unlink(path)  # only one driver connects
    driver.setblocking(True)
    os.dup2(driver.fileno(), 0)
    os.dup2(driver.fileno(), 1)
    driver.close()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (the purpose)


def unpack(command: list[str]) -> None:
    """Unpack an archive from standard input, and exec another program.

    ``command`` prints a line for the driver, and unpacks its input. The driver sends the size in
    bytes on a line, then the archive.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    errors: deque[bytes] = deque(maxlen=20)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    # Not a byte more: what follows is for the other program.
    driver = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 (it stays open)
    if not (line := driver.readline()):  # the driver rejected this pod
        os._exit(1)
    rest = int(line)
    while rest:
        if not (block := driver.read(min(rest, 1 << 18))):
            print("the driver ended before it had sent everything", file=sys.stderr, flush=True)
            os._exit(1)  # ends the other processes of the pod, too
        rest -= len(block)
        with suppress(BrokenPipeError):  # it has failed: the driver reads that after the archive
            process.stdin.write(block)
    with suppress(BrokenPipeError):
        process.stdin.close()
    reader.join()
    if process.wait():
        lines = [line.decode(errors="replace") for line in errors]
        print("the environment cannot be unpacked:", *lines, file=sys.stderr, flush=True)
        os.write(1, b"\n%s%s\n" % (FAILED, json.dumps([process.returncode, lines]).encode()))
        while driver.read(1 << 16):  # until the driver has read it
            pass
        os._exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (the purpose)


def relay(folder: str, seconds: float) -> None:
    """Connect standard input and output to the main process, until either side ends."""
    os.dup2(1, 2)  # the driver reads both from one stream
    deadline = time.monotonic() + seconds
    stream = socket.socket(socket.AF_UNIX)
    while True:
        try:
            stream.connect(os.path.join(folder, SOCKET))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the pod's main process is not waiting for a driver: {error}")
        time.sleep(0.05)

    def bring() -> None:
        with stream.makefile("wb", buffering=0) as end:
            while block := os.read(0, 1 << 16):
                rest = memoryview(block)
                while rest:
                    rest = rest[end.write(rest) or 0 :]
        stream.shutdown(socket.SHUT_WR)

    threading.Thread(target=bring, daemon=True).start()
    with stream.makefile("rb", buffering=0) as source, os.fdopen(1, "wb", buffering=0) as target:
        shutil.copyfileobj(source, target, 1 << 16)
    os._exit(0)  # the other thread may still read
