"""The first code in a pod, and the code that joins the driver to it; both travel as text.

A pod's main process waits at a socket of the pod's own for the driver. The driver has Kubernetes
execute `relay` there: its two pipes, which end at the driver, are then the main process's. Neither
the pod nor the driver has to be reachable from outside, and the log of the pod holds what its
processes print, not what they send.
"""

import os
import shutil
import signal
import socket
import sys
import threading
import time

SOCKET = "driver.sock"


def wait_for_driver(folder: str, seconds: float) -> None:
    """Take the driver's connection as standard input and output, and become another program.

    Parameters
    ----------
    folder
        Where the socket is.
    seconds
        How long the driver may take to come.
    """
    path = os.path.join(folder, SOCKET)
    # The system ignores signals to a pod's first process for which there is no handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.umask(0o077)  # what follows is for this user alone
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        server.settimeout(seconds)
        try:
            driver, _ = server.accept()
        except OSError:
            sys.exit(f"the driver has not come within {seconds:g} s")
        os.unlink(path)  # there is one driver
    driver.setblocking(True)
    os.dup2(driver.fileno(), 0)
    os.dup2(driver.fileno(), 1)
    driver.close()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (what this is for)


def relay(folder: str, seconds: float) -> None:
    """Connect standard input and output with the main process, until either side ends."""
    os.dup2(1, 2)  # the driver has one ear for it
    deadline = time.monotonic() + seconds
    stream = socket.socket(socket.AF_UNIX)
    while True:
        try:
            stream.connect(os.path.join(folder, SOCKET))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the pod's main process does not wait for a driver: {error}")
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
