"""The environment of the workers on hosts over ssh, unpacked once per host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from pybackend.errors import ClusterError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.resources import show_bytes
from pybackend.launchers.environment.archive import PackedEnvironment
from pybackend.launchers.environment.installing import (
    Installation,
    Interpreter,
    install_command,
    read_blocks,
)
from pybackend.launchers.environment.packing import pack_for
from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh import CONNECTION_LOST, Ssh, environment


def install_on_hosts(
    ssh: Ssh, hosts: Sequence[HostSlots], job: Job, on_event: Emit
) -> dict[str, Interpreter]:
    """Return the Python of a job's environment by host; empty if the job has none.

    Raises
    ------
    ClusterError
        A host cannot be reached, or cannot run the environment.
    """
    packed = pack_for(job, lambda text: on_event(Note(text)))
    if packed is None:
        return {}
    # On an error, the shells end first: threads may wait for a host that does not respond.
    with ThreadPoolExecutor(len(hosts)) as threads, ExitStack() as stack:
        started = [stack.enter_context(_Installation(ssh, host, packed)) for host in hosts]
        answers = list(threads.map(Installation.ask, started))
        missing = [one.host for one, is_there in zip(started, answers, strict=True) if not is_there]
        if missing:
            size = show_bytes(packed.size)
            names = ", ".join(missing)
            on_event(Note(f"sending the Python environment ({size}) to {names}"))
        found = threads.map(lambda one: one.finish(read_blocks(packed.path)), started)
        return {one.host: interpreter for one, interpreter in zip(started, found, strict=True)}


class _Installation(Installation):
    """An installation over ssh."""

    def __init__(self, ssh: Ssh, host: HostSlots, packed: PackedEnvironment) -> None:
        command = ssh.command(host, install_command(packed.name))
        super().__init__(packed, command, host.name, environment())
        self._ssh = ssh
        self._slots = host

    def explain(self) -> ClusterError:
        status, printed = self.wait()
        if status == CONNECTION_LOST:
            return self._ssh.explain(self._slots, printed)
        return super().explain()
