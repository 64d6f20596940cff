"""Where the workers of an elastic training on hosts that ssh reaches run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit
from pybackend.launchers.base import Outcome
from pybackend.launchers.elastic import Said
from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh_host import SshHost
from pybackend.launchers.remote.bundle import Bundle
from pybackend.launchers.remote.elastic_task import POST, Post
from pybackend.launchers.remote.elastic_worker import Packages, RemoteWorker, as_gang
from pybackend.launchers.remote.gang import run_gang
from pybackend.launchers.remote.row_files import files_of_ranks
from pybackend.net.meeting import MeetingServer

# For what runs there to end and to remove its files.
_END_SECONDS = 15.0


class HostSite:
    """A `Site`: slots of hosts, in their order; a context manager, which ends what runs there.

    Parameters
    ----------
    slots
        The host of each place.
    reach
        Has ssh start Python on a host, for a meeting with one member.
    contents, folder
        What every worker gets, and where the files of the rows are.
    remedy
        As in `Member`.
    """

    def __init__(
        self,
        job: TrainingJob,
        slots: Sequence[HostSlots],
        reach: Callable[[HostSlots, MeetingServer], SshHost],
        contents: Mapping[str, bytes],
        folder: Path,
        remedy: str,
    ) -> None:
        self.places = len(slots)
        self._job = as_gang(job)
        self._slots = slots
        self._reach = reach
        self._contents = contents
        self._folder = folder
        self._packages = Packages(remedy)
        self._reached: list[SshHost] = []

    def __enter__(self) -> HostSite:
        return self

    def __exit__(self, *_: object) -> None:
        for ssh in self._reached:
            ssh.let_go()
        deadline = time.monotonic() + _END_SECONDS
        for ssh in self._reached:
            ssh.wait(deadline - time.monotonic())

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> RemoteWorker:
        """See `Site`; each worker has an ssh of its own, so that one ends without the others."""
        host = self._slots[place]
        share = sum(slot is host for slot in self._slots[:place])
        post = Post(number, place, host.slots, share)
        own = {POST: json.dumps(asdict(post)).encode()}
        worker = RemoteWorker(number, host.name, say, self._packages)
        ssh = self._reach(host, worker.meeting)
        ssh.send(Bundle({**self._contents, **own}, files_of_ranks(self._folder, [])))
        self._reached.append(ssh)

        def run(hear: Emit) -> Outcome:
            names = [host.name]
            return run_gang(worker.meeting, self._job, names, hear, ssh.look, meet_seconds=math.inf)

        worker.follow(run, ssh.let_go)
        return worker
