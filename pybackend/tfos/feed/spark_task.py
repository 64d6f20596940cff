"""Member process that outlives the Spark task that started it, and the tasks that feed it rows.

The tasks that feed it need its slot. So its task returns immediately and leaves a process in its
own session, which Spark's Python daemon does not kill along with its children. The process lives as
long as its connection to the driver: when that closes, it stops its worker and exits. It writes to
only one folder, which a shell process removes in any case. This file is imported on the executors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

import pybackend
from pybackend.core.errors import ClusterError
from pybackend.core.job.messages import Announced, Event
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import load_own_libraries
from pybackend.core.launchers.remote.task import TASK, RemoteTask, take_part
from pybackend.core.launchers.spark.barrier_task import BarrierGroup, living_with_driver
from pybackend.core.machine.janitor import sweep
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.tfos.feed.client import Feeder
from pybackend.tfos.feed.dialog import FEED, FEED_TOKEN

if TYPE_CHECKING:  # it has files of the driver
    from pybackend.core.launchers.spark.barrier_task import SparkEnvironment

_LOOK_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_LOG = "member.log"
# File that a member creates when it has reached the driver.
_READY = "ready"
_TAIL_BYTES = 4000
_START = (
    "import sys; del sys.path[0]; import runpy; "
    "runpy.run_module('pybackend.tfos.feed.spark_task', run_name='__main__')"
)


@dataclass(frozen=True)
class StartMember:
    """Function of the barrier stage: each task starts one member and returns its host.

    A failed start is returned, not raised: otherwise Spark would retry the stage.
    """

    member: Member
    cores: int
    environment: SparkEnvironment | None = None

    def __call__(self, numbers: Iterable[int]) -> Iterator[tuple[int, str, str | None]]:
        """Start a member; yield its rank and host, and its output if it exited right away."""
        from pyspark import BarrierTaskContext

        for _ in numbers:
            pass
        context = BarrierTaskContext.get()
        # Only used for the rank, hosts, cores and GPUs, not to meet other workers.
        group = BarrierGroup(context, None, self.cores)  # type: ignore[arg-type]
        slot = {"rank": group.rank, "hosts": group.hosts, "cores": group.cores, "gpus": group.gpus}
        member, failure = self.member, None
        try:
            if self.environment is not None:
                member = replace(member, interpreter=self.environment.install())
        except ClusterError as error:
            failure = str(error)
        failure = failure or _start(member, json.dumps(slot))
        yield group.rank, group.hosts[group.rank], failure


def _start(member: Member, slot: str) -> str | None:
    """Start a member and wait until it has reached the driver; return its log if it exited."""
    # Not in a folder of Spark, which removes it with the executor.
    folder = tempfile.mkdtemp(prefix="tfdist-")
    janitor = sweep(folder)
    assert janitor.stdin is not None
    with janitor.stdin as pipe:  # the member holds it open as long as it lives
        Path(folder, TASK).write_bytes(cloudpickle.dumps(member))
        with Path(folder, _LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _START, folder, slot],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(pipe.fileno(),),
                cwd=folder,
                env={**os.environ, "TMPDIR": folder, "PYTHONPATH": _copy_library(folder)},
                start_new_session=True,
            )
        while not Path(folder, _READY).exists():
            if process.poll() is not None:
                tail = Path(folder, _LOG).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
                return tail.strip() or f"it exited with status {process.returncode}"
            time.sleep(_LOOK_SECONDS)
    return None


def _copy_library(folder: str) -> str:
    """Return the member's PYTHONPATH: a copy, since the executor's folder may be removed first."""
    own = Path(pybackend.__file__).resolve().parents[1]
    paths = [os.path.abspath(path or ".") for path in sys.path]
    if own.is_file():
        copy = Path(folder, own.name)
        copy.write_bytes(own.read_bytes())
        paths = [str(copy), *(path for path in paths if path != str(own))]
    return os.pathsep.join(dict.fromkeys([str(own) if own.is_dir() else paths[0], *paths]))


class _Meeting(MeetingClient):
    """Connection to the driver that also records the address at which the worker takes rows."""

    fed: str | None = None

    def __call__(self, event: Event) -> bool:
        if isinstance(event, Announced) and event.name == FEED:
            self.fed = event.text
        return super().__call__(event)


def main(folder: str, slot: str) -> None:
    """Run the member until its worker ends or its driver disconnects.

    ``folder`` has the pickled `Member`, and all files are written below it. ``slot`` is JSON with
    ``rank``, ``hosts``, ``cores`` and ``gpus``.
    """
    load_own_libraries()
    given = json.loads(slot)
    # The driver pickled its own objects, and Spark delivered them like its tasks.
    member: Member = cloudpickle.loads(Path(folder, TASK).read_bytes())
    Path(folder, TASK).unlink()
    rank = given["rank"]
    with living_with_driver(_Meeting, member, rank) as meeting:
        Path(folder, _READY).touch()
        threading.Thread(target=_close_feeds, args=(meeting, member, rank), daemon=True).start()
        task = RemoteTask(member, tuple(given["hosts"]))
        take_part(task, rank, [Path(folder)], meeting, given["cores"], given["gpus"])


def _close_feeds(meeting: _Meeting, member: Member, rank: int) -> None:
    with suppress(OSError):
        if meeting.receive(threading.TIMEOUT_MAX) is None:
            return
        while True:  # until this process exits, as the function may wait for nothing else
            fed = meeting.fed
            if fed is not None:
                feeder = Feeder({rank: fed}, member.files[FEED_TOKEN].decode(), 0.0)
                if feeder.close():
                    return
            time.sleep(_RETRY_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
