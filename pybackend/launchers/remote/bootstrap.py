"""The first code on a host that ssh has reached: it takes in what the driver sends, and starts it.

Only the text of this file goes there, behind that of `machine`, on Python's command line. So it
uses nothing but the standard library, and of the language what Python 3.6 knows: an old release
must live to say which one it is.
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
    """Say what this Python is, unpack the bundle from standard input, and run its task.

    Parameters
    ----------
    sweep
        Shell text of `pybackend.launchers.remote.janitor`.
    wanted
        Names of packages, with blanks between them, that the driver asks for.
    task
        Module of `pybackend.launchers` that has the task.
    machine
        What `pybackend.launchers.machine` has found.
    """
    channel = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not print between messages
    missing = [name for name in wanted.split() if find_spec(name) is None]
    version = sys.version_info[:3]
    greeting = {"version": version, "python": sys.executable, "missing": missing}
    greeting["machine"] = machine
    # What a login shell has printed may lack its newline.
    os.write(channel, b"\n" + MARK + json.dumps(greeting).encode() + b"\n")
    pipe = sys.stdin.buffer
    manifest = pipe.readline()
    if not manifest:  # the driver does not want this Python
        return
    folder = tempfile.mkdtemp(prefix="tfdist-")
    # It holds the channel: ssh ends when the folder is gone.
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", sweep, folder],
        stdin=subprocess.PIPE,
        stdout=channel,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _unpack(json.loads(manifest.decode()), pipe, folder)
    sys.path.insert(0, os.path.join(folder, "lib"))
    import_module("pybackend.launchers." + task).run(folder, pipe, channel)
    if janitor.stdin is not None:
        janitor.stdin.close()
    os._exit(0)  # threads that read may still wait


def _unpack(manifest: Any, pipe: IO[bytes], folder: str) -> None:
    for name, size in manifest:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            while size:
                block = pipe.read(min(size, 1 << 20))
                if not block:
                    sys.exit("the driver has ended before it had sent everything")
                file.write(block)
                size -= len(block)
