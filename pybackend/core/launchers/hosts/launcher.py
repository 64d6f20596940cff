"""Workers on hosts that are reachable by ssh."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pybackend.core.errors import ClusterError, Failure, InputError
from pybackend.core.job.arguments import counted, is_variable_name, name_arguments, wrong
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.base import DataSets, Files, Outcome, Submission
from pybackend.core.launchers.environment import installing
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.hosts.ssh import (
    CONNECTION_LOST,
    HostPython,
    HostSlots,
    Ssh,
    divide_slots,
    environment,
    parse_hosts,
    ranks_by_host,
    read_hostfile,
)
from pybackend.core.launchers.hosts.ssh_host import SshHost, find_keepers, reached
from pybackend.core.launchers.hosts.ssh_task import RANKS
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.bundle import Bundle, HostGreeting, find_obstacle, read_blocks
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group, run_on_hosts
from pybackend.core.launchers.remote.task import RemoteTask, files_of_ranks, pack_task
from pybackend.core.launchers.shares import Machine, find_shortage
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.net.authentication import new_token
from pybackend.core.words import call_of, show, show_bytes


def _option() -> str:
    return call_of("hosts", ..., python=...)


def _choose_python() -> str:
    return f"specify a Python that has it on every host: {_option()}"


@dataclass(frozen=True)
class Hosts:
    """Launcher that starts workers by ssh; returned by `hosts`."""

    hosts: tuple[HostSlots, ...]
    python: str
    ssh: Ssh
    environment: Mapping[str, str]
    is_here: ClassVar[bool] = False
    session: ClassVar[None] = None
    workers: ClassVar[None] = None
    why_fixed: ClassVar[None] = None

    @property
    def where(self) -> str:
        names = ", ".join(host.name for host in self.hosts)
        return f"processes on hosts that ssh can reach ({names})"

    def describe(self, job: Job) -> Submission:
        placed = ranks_by_host(self.hosts, job.workers)
        later = "whether ssh can reach the hosts, and which packages their Python has"
        return Submission(tuple(host.name for host, ranks in placed for _ in ranks), later=(later,))

    def count_workers(self, wanted: Any) -> Any:
        if wanted is None:
            return sum(host.slots for host in self.hosts)
        if isinstance(wanted, int):  # other types are checked later
            ranks_by_host(self.hosts, wanted)
        return wanted

    @contextmanager
    def divide(self, job: Job, most: int, parallelism: int | None) -> Iterator[Sequence[Hosts]]:
        slots, workers = sum(host.slots for host in self.hosts), job.most_workers
        ranks_by_host(self.hosts, workers)
        jobs = min(most, parallelism or slots // workers)
        if jobs * workers > slots:
            has = f"the hosts have {counted(slots, 'slot')}, and each trial needs {workers}"
            most = slots // workers
            raise InputError(f"`parallelism` is {parallelism}, but {has}: use at most {most}")
        yield [replace(self, hosts=tuple(own)) for own in divide_slots(self.hosts, workers, jobs)]

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        placed = ranks_by_host(self.hosts, job.workers)
        used = self.hosts if job.is_elastic else [host for host, _ in placed]
        slots = [host for host in used for _ in range(host.slots)]
        interpreters = install_on_hosts(self.ssh, used, job, on_event)
        asked = {host: self.ssh.address(host) for host in used}
        remedy, hosts = _choose_python(), slots if job.is_elastic else slots[: job.workers]
        member = Member(job, files, None, new_token(), None, len(used) == 1, remedy=remedy)
        task = RemoteTask(member, tuple(asked[host] for host in hosts), self.environment)
        with swept_folder() as folder:
            way = _Slots(self, slots, task, datasets, folder, interpreters)
            return run_on_hosts(way, job, datasets, on_event, len(slots), remedy)


@dataclass(frozen=True)
class _Slots(Way):
    """A `Way` with an ssh process per host, or per elastic worker, so that each can end by itself.

    The slots are those of all hosts, in order.
    """

    launcher: Hosts
    slots: Sequence[HostSlots]
    task: RemoteTask
    datasets: DataSets
    folder: Path
    interpreters: Mapping[str, installing.Interpreter]  # of the environment of the job, by host
    _contents: dict[str, bytes] = field(default_factory=dict)
    _packing: threading.Lock = field(default_factory=threading.Lock)

    def name_host(self, number: int, place: int) -> str:
        return self.slots[place].name

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        job, hosts = start.job, ranks_by_host(self._slots_of(start), start.job.workers)
        names = [host.name for host, ranks in hosts for _ in ranks]
        with reached(self._start(hosts, start)) as there:
            contents = self._pack()
            keepers = find_keepers(job, [host.python for host in there], contents)
            for (host, ranks), process, keeper in zip(hosts, there, keepers, strict=True):
                neighbours = _count_neighbours(host, ranks)
                placed = {"ranks": [*ranks], "first": host.first, "neighbours": neighbours}
                own = {RANKS: json.dumps(placed).encode(), **start.post(start.place), **keeper}
                process.send(Bundle({**contents, **own, **files_of_ranks(self.folder, ranks)}))

            def look() -> list[Failure]:
                return [failure for host in there for failure in host.look()]

            # Hosts are watched while they receive their rows, which may take long.
            yield partial(run_group, start.meeting, job, names, look=look, meet_seconds=math.inf)

    def _start(self, placed: Sequence[tuple[HostSlots, range]], start: Start) -> Iterator[SshHost]:
        settings, resources = self.launcher, start.job.resources
        # A function may not need TensorFlow.
        wanted = "numpy" if start.job.kind == "run" else "tensorflow numpy"
        temporary = settings.environment.get("TMPDIR")
        for host, ranks in placed:
            interpreter = self.interpreters.get(host.name)
            python = HostPython(settings.ssh, host, settings.python, temporary, interpreter)
            check = partial(_check_workers, host.name, resources, _count_neighbours(host, ranks))
            task, option = "hosts.ssh_task.run_workers", _option()
            yield SshHost(python, ranks, start.meeting, task, option, wanted, check)

    def _slots_of(self, start: Start) -> Sequence[HostSlots]:
        """Return the hosts of a group, or the slot of an elastic worker."""
        if start.number is None:
            return self.launcher.hosts
        host = self.slots[start.place]
        first = host.first + sum(slot is host for slot in self.slots[: start.place])
        return [replace(host, slots=1, first=first, neighbours=host.neighbours or host.slots)]

    def _pack(self) -> Mapping[str, bytes]:
        with self._packing:  # once, while ssh connects to the hosts
            if not self._contents:
                self._contents.update(pack_task(self.task, self.folder, self.datasets))
        return self._contents


def _count_neighbours(host: HostSlots, ranks: range) -> int:
    """Return the number of workers on a host, of all jobs that run there."""
    return host.neighbours or len(ranks)


def _check_workers(host: str, resources: Resources, workers: int, greeting: HostGreeting) -> None:
    """Raise `ClusterError` if a host has another Python, or lacks a package, cores or memory."""
    other = f"Specify a Python {{own}} that all hosts have: {_option()}"
    install = "Install it there with `{python} -m pip install {package}`, or " + _choose_python()
    if obstacle := find_obstacle(greeting, host, f"on {host}", other, install):
        raise obstacle
    if shortage := find_shortage(resources, workers, Machine(**greeting.machine), host):
        raise ClusterError(shortage)


def install_on_hosts(
    ssh: Ssh, hosts: Sequence[HostSlots], job: Job, on_event: Emit
) -> dict[str, installing.Interpreter]:
    """Return the Python of a job's environment by host; empty if the job has none.

    Raises `ClusterError` if a host cannot be reached, or cannot run the environment.
    """
    packed = pack_for(job, lambda text: on_event(Note(text)))
    if packed is None:
        return {}
    # On an error, the shells end first: threads may wait for a host that does not respond.
    with ThreadPoolExecutor(len(hosts)) as threads, ExitStack() as stack:
        started = [stack.enter_context(_Installation(ssh, host, packed)) for host in hosts]
        answers = list(threads.map(installing.Installation.ask, started))
        missing = [one.host for one, is_there in zip(started, answers, strict=True) if not is_there]
        if missing:
            size, there = show_bytes(packed.size), ", ".join(missing)
            on_event(Note(f"sending the Python environment ({size}) to {there}"))
        found = threads.map(lambda one: one.finish(read_blocks(packed.path)), started)
        return {one.host: interpreter for one, interpreter in zip(started, found, strict=True)}


class _Installation(installing.Installation):
    def __init__(self, ssh: Ssh, host: HostSlots, packed: PackedEnvironment) -> None:
        command = ssh.command(host, installing.install_command(packed.name))
        super().__init__(packed, command, host.name, environment())
        self._ssh = ssh
        self._slots = host

    def explain(self) -> ClusterError:
        status, printed = self.wait()
        if status == CONNECTION_LOST:
            return self._ssh.explain(self._slots, printed)
        return super().explain()


@name_arguments
def hosts(
    hosts: str | Sequence[str] | None = None,
    *,
    hostfile: str | os.PathLike[str] | None = None,
    python: str | None = None,
    ssh_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Hosts:
    """Run workers on hosts that are reachable by ssh. Pass it as the first argument of a call.

    The hosts need an ssh server that accepts this user without a password, and Python with
    TensorFlow. This package, the model and the rows are sent to them. This machine uses only ssh to
    reach them; the workers connect to each other. When a call ends, for any reason, it leaves
    nothing behind on the hosts. Only with ``Resources(fork_server=True)``, a process on each host
    waits for later calls; it ends with this session, or after ten minutes without a call.

    Parameters
    ----------
    hosts
        ``"a:2,b:2"``, or a list of such texts: host names, each with its number of slots (default
        1). ``user@name:2`` logs in as another user, ``[fd00::1]:2`` is an IPv6 address. Workers
        fill the hosts in this order.
    hostfile
        A file instead of ``hosts``, with a host per line: ``a slots=2`` or ``a:2``.
    python
        Path of the hosts' Python, of the same release as this one (e.g. 3.11). None (default): the
        path of this Python.
    ssh_options
        Command-line options for ssh, e.g. ``["-p", "2222", "-i", "~/.ssh/cluster"]``.
        ``~/.ssh/config`` is respected.
    environment
        Environment variables of the workers, e.g. ``{"NCCL_DEBUG": "INFO"}``. With ``TMPDIR``, they
        store their rows there during the call.

    Returns
    -------
    Hosts
        The first argument for `barrier_train`, `barrier_evaluate`, `barrier_predict`, `barrier_run`
        or `train_mnist`.

    Raises
    ------
    InputError
        An argument, or a host in it, is invalid. The message names it.

    Examples
    --------
    >>> machines = pybackend.hosts("a:2,b:2")
    >>> result = pybackend.barrier_train(machines, model, (x, y), workers=4)  # doctest: +SKIP
    """
    if (hosts is None) == (hostfile is None):
        raise InputError('pass either `hosts`, e.g. "a:2,b:2", or `hostfile`')
    listed = read_hostfile(hostfile) if hostfile is not None else parse_hosts(hosts or "")
    for name, value in (("python", python), ("hostfile", hostfile)):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise wrong(name, "a path", value)
    ssh = Ssh(_check_words(ssh_options))
    return Hosts(listed, python or sys.executable, ssh, _check_variables(environment))


def _check_words(options: Any) -> tuple[str, ...]:
    is_list = isinstance(options, Sequence) and not isinstance(options, str)
    if not is_list or not all(isinstance(word, str) for word in options):
        raise wrong("ssh_options", f"a list of words, e.g. {show(['-p', '2222'])}", options)
    # ssh would read "-p 22" as the port " 22".
    if joined := next((word for word in options if re.match(r"-[A-Za-z]\s", word)), None):
        advice = f"split it into two words, {show(joined.split(None, 1))}"
        raise InputError(f"`ssh_options` has {show(joined)}: {advice}")
    return tuple(options)


def _check_variables(environment: Any) -> dict[str, str]:
    given = environment or {}
    is_mapping = isinstance(given, Mapping)
    if not is_mapping or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise wrong("environment", f"like {show({'NAME': 'value'})}", environment)
    for name in given:
        if not is_variable_name(name):
            raise InputError(f"`environment` has {show(name)}, which is not a valid variable name")
    return dict(given)
