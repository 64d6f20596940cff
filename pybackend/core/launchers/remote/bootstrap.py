"""First code to run on a worker's host: it receives the driver's bundle, and starts its task.

Only the text of this file, after that of `machine.capacity`, is passed on Python's command line. So
it uses only the standard library and the syntax of Python 3.6: an old release must be able to
report its version.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any

MARK = b"tfdist "


def main(sweep: str, wanted: str, task: str, machine: Any) -> None:
    """Describe this Python, unpack the bundle from standard input, and run its task.

    ``sweep`` is the shell text of `machine.janitor`, ``wanted`` the names of required packages,
    separated by spaces. ``task`` is a function of a module of `launchers`, such as
    "kubernetes.pod.run". ``machine`` is the result of `read_machine` in `machine.capacity`.
    """
    channel = os.dup(1)
    os.dup2(2, 1)  # other output must not appear between messages
    missing = [name for name in wanted.split() if find_spec(name) is None]
    greeting = {"version": sys.version_info[:3], "python": sys.executable}
    greeting.update(missing=missing, machine=machine)
    # Output of a login shell may lack its newline.
    os.write(channel, b"\n" + MARK + json.dumps(greeting).encode() + b"\n")
    pipe = sys.stdin.buffer
    manifest = pipe.readline()
    if not manifest:  # the driver rejected this Python
        return
    folder = tempfile.mkdtemp(prefix="tfdist-")
    # It keeps the channel open: ssh ends after the folder is removed.
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": channel, "stderr": subprocess.DEVNULL}
    janitor = subprocess.Popen(["/bin/sh", "-c", sweep, folder], start_new_session=True, **pipes)
    _unpack(json.loads(manifest.decode()), pipe, folder)
    sys.path.insert(0, os.path.join(folder, "lib.zip"))
    module, _, function = task.rpartition(".")
    getattr(import_module("pybackend.core.launchers." + module), function)(folder, pipe, channel)
    if janitor.stdin is not None:
        janitor.stdin.close()
    os._exit(0)  # reading threads may still wait


def _unpack(manifest: Any, pipe: IO[bytes], folder: str) -> None:
    for name, size in manifest:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            while size:
                block = pipe.read(min(size, 1 << 20))
                if not block:
                    sys.exit("the driver ended before it had sent everything")
                file.write(block)
                size -= len(block)
