"""Delete a Job when its driver ends for any reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pybackend

_SECONDS = 60.0
# Large modules are imported only when needed, which is rare: a line of text means that the driver
# deleted the Job itself.
_WAIT = (
    "import sys\n"
    "if not sys.stdin.readline():\n"
    "    sys.path[:0] = [sys.argv[1]]\n"
    "    from pybackend.launchers.kubernetes.guard import delete\n"
    "    delete(*sys.argv[2:])\n"
)


@contextmanager
def guarded(context: str | None, namespace: str, name: str) -> Iterator[Callable[[], None]]:
    """Delete the Job if this process ends within this context; yield a function to cancel it."""
    root = str(Path(pybackend.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _WAIT, root, context or "", namespace, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C must reach only the terminal's process group.
        start_new_session=True,
        cwd="/",
    )
    pipe = process.stdin
    assert pipe is not None

    def let_go() -> None:
        pipe.write(b"over\n")

    try:
        yield let_go
    finally:
        pipe.close()
        process.wait(_SECONDS)


def delete(context: str, namespace: str, name: str) -> None:
    """Delete a Job and everything that belongs to it."""
    from pybackend.launchers.kubernetes.cluster import Cluster

    with Cluster(context or None, namespace) as cluster:
        cluster.delete_job(name)
