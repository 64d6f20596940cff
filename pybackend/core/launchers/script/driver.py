"""Driver of `tfdist run`: start the ranks, follow and show them, and restart them after failures.

It begins with one start of the worker group (`ScriptGroup`); `run_script` is the whole run.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from pybackend.core.errors import ClusterError, Failure, InputError, WorkerFailedError
from pybackend.core.job.codec import encode
from pybackend.core.job.messages import Announced, Deliver, Event, Note
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.crew import Crew, take_all
from pybackend.core.launchers.forking import adopt_orphans, end_descendants, name_signal
from pybackend.core.launchers.hosts.ssh import HostPython, HostSlots, Ssh
from pybackend.core.launchers.hosts.ssh_host import SshHost, reached
from pybackend.core.launchers.remote.bundle import Bundle, HostGreeting, library
from pybackend.core.launchers.script.agent import STATUS, Stream
from pybackend.core.launchers.script.ranks import TASK, HostRanks, ScriptRun
from pybackend.core.launchers.script.slurm import describe_step, requeue_preempted
from pybackend.core.machine.processes import list_children
from pybackend.core.net.meeting import MeetingServer

_LEAST_PYTHON = (3, 11)
# Blocks of output that wait to be printed; then the ranks wait.
_MOST_WAITING = 8
# For all agents to be reached, and to check the script. A host whose disk hangs shows signs of life
# (test_an_agent_that_never_starts_its_ranks_is_named).
_START_SECONDS = 180.0
# `timeout` signals its child, then its group, which contains the child.
_SAME_SECONDS = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class GroupEnd:
    """End of a worker group: the first failure, and any signal with which the user ended it.

    ``status`` is the exit status of the rank that failed, or the negated signal number; None if it
    was lost with its host. ``has_begun`` is True if the ranks had been started by then.
    """

    failure: Failure | None
    status: int | None = None
    caught: signal.Signals | None = None
    has_begun: bool = True

    @property
    def is_well(self) -> bool:
        return self.failure is None and self.has_begun


class ScriptGroup:
    """The ranks of one start: a `Crew` that is stopped at the first failure, or by signals."""

    def __init__(
        self, plan: ScriptRun, restart: int, output: ScriptOutput, signals: CaughtSignals
    ) -> None:
        self._plan, self._restart = plan, restart
        self._output, self._signals = output, signals
        names = {rank: site.name for site in plan.sites for rank in site.ranks}
        # Ranks that other drivers start have no name.
        self._hosts = [names.get(rank, "") for rank in range(plan.world_size)]
        self._crew = Crew(None, _show_note, hosts=self._hosts, grace=plan.grace)
        self._meeting = MeetingServer(None, "", plan.world_size, most=_MOST_WAITING)
        self._statuses: dict[int, int] = {}
        self._caught: signal.Signals | None = None
        self._caught_at, self._is_ending = 0.0, False

    def run(self) -> GroupEnd:
        """Start all ranks, and wait until they have ended.

        Raises `ClusterError` if a host cannot run the script.
        """
        listen = partial(take_all, self._meeting.queue, self._take)
        # The meeting ends first: then what ranks still print is dropped as it arrives.
        with self._reach() as hosts, self._meeting as meeting:
            for rank, host in enumerate(self._hosts):
                if not host:  # other drivers start it
                    meeting.join(rank, "")
                    self._crew.hear(WorkerReport(rank, "", 0))

            def look() -> None:
                found = [failure for host in hosts for failure in host.look()]
                # Reports of these ranks before they were lost have precedence.
                listen(0)
                self._crew.lose(found)
                self._check_start(began)

            began = time.monotonic()
            try:
                self._crew.follow(listen, look, self._check)
            finally:
                # No more output is printed, and threads must not wait for that.
                meeting.queue.maxsize = sys.maxsize
                take_all(meeting.queue, lambda event: None, 0)
        return self._conclude()

    def _reach(self) -> AbstractContextManager[list[SshHost]]:
        plan, secret = self._plan, self._plan.choose_secret()
        # Once, not per host: its sources are read to see whether they have changed.
        packed = library() if any(site.host for site in plan.sites) else {}

        def start() -> Iterator[SshHost]:
            for site in plan.sites:
                python, module = python_of(plan, site)
                check = partial(_check_python, site.name)
                host = SshHost(python, site.ranks, self._meeting, module, "--python", check=check)
                task = {TASK: encode(plan.task(site, secret, self._restart)).encode()}
                host.send(Bundle({**packed, **task} if site.host else task))
                yield host

        return reached(start())

    def _take(self, event: Event) -> None:
        if not isinstance(event, Announced):
            self._crew.hear(event)
        elif event.name == STATUS:
            self._end(event.rank, int(event.text))
        else:
            stream: Stream = "out" if event.name == "out" else "err"
            self._output.write(event.rank, stream, event.text.encode("latin-1"))

    def _end(self, rank: int, status: int) -> None:
        host, failure = self._hosts[rank], None
        self._statuses[rank] = status
        if status:
            # The time of this machine: clocks of hosts may differ.
            text = f"ended with status {status}"
            failure = Failure(rank, host, "ProcessDied", text, time=time.time())
        self._crew.hear(WorkerReport(rank, host, 0, failure=failure))

    def _check(self) -> None:
        for number in self._signals.take():
            self._pass_on(number)
        if self._is_ending or not self._crew.has_failed:
            return
        if not self._has_begun:
            failure = next(r.failure for r in self._crew.reports.values() if r.failure)
            raise ClusterError(f"{failure.host}: {failure.message}")
        self._is_ending = True
        self._meeting.order(Deliver(signal.SIGTERM))

    def _check_start(self, began: float) -> None:
        missing = self._meeting.missing()[0]
        if missing and time.monotonic() > began + _START_SECONDS:
            names = ", ".join(sorted({self._hosts[rank] for rank in missing}))
            raise ClusterError(
                f"no response from {names} within {_START_SECONDS:g} s: check whether you can log "
                "in there manually, and whether the script's folder can be read there"
            )

    @property
    def _has_begun(self) -> bool:
        return not self._meeting.missing()[0]

    def _pass_on(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number in ENDING and self._caught in ENDING:
            if now > self._caught_at + _SAME_SECONDS:
                self._crew.latest = now
            return
        if number in ENDING or (number == signal.SIGHUP and self._caught is None):
            self._caught, self._caught_at = number, now
        if number in ENDING:
            self._is_ending = True
            grace = self._plan.grace if self._has_begun else 0.0
            self._crew.latest = min(self._crew.latest, now + grace)
        if self._has_begun:
            self._meeting.order(Deliver(number))

    def _conclude(self) -> GroupEnd:
        failure = status = None
        try:
            self._crew.conclude()
        except WorkerFailedError as error:
            failure = error.failures[0]
            status = self._statuses.get(failure.rank)
            if failure.exception_type == "Stopped":  # the grace period was over
                status = -signal.SIGKILL
        return GroupEnd(failure, status, self._caught, self._has_begun)


def _check_python(name: str, greeting: HostGreeting) -> None:
    if greeting.version < _LEAST_PYTHON:
        version = ".".join(map(str, greeting.version))
        raise ClusterError(
            f"{name}: {greeting.python} is Python {version}, but tfdist needs 3.11 or later: use "
            "--python to specify one that every host has"
        )


def python_of(plan: ScriptRun, site: HostRanks) -> tuple[HostPython, str]:
    """Return the Python that starts the ranks of a host, and the function that does so."""
    module = "script.step.run" if site.is_step else "script.agent.run"
    if site.host is None:
        return HostPython(None, HostSlots(site.name), sys.executable), module
    return HostPython(Ssh(plan.ssh_options), site.host, plan.python), module


def describe_plan(plan: ScriptRun) -> str:
    """Return the commands for all ranks, by host; unknown secrets and ports become placeholders."""
    return "\n".join(line for site in plan.sites for line in _describe_site(plan, site))


def _describe_site(plan: ScriptRun, site: HostRanks) -> Iterator[str]:
    if site.is_step:
        yield from describe_step(plan, site, os.environ)
        return
    python, module = python_of(plan, site)
    if site.host is not None:
        words = python.command("", module)[:-1]
        yield f"agent on {site.name}, started with: {shlex.join(words)} ..."
    for rank, variables in zip(site.ranks, _variables(plan, site), strict=True):
        yield (
            f"rank {rank} of {plan.world_size} on {site.name} "
            f"(local rank {variables['LOCAL_RANK']} of {site.size}):"
        )
        yield f"  cd {shlex.quote(plan.folder)}"
        for name, value in variables.items():
            yield f"  export {name}={shlex.quote(value)}"
        yield f"  {shlex.join(plan.script.command(python.path))}"


def _variables(plan: ScriptRun, site: HostRanks) -> list[dict[str, str]]:
    hosts = [one.address or one.name for one in plan.sites for _ in one.ranks]
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    made_up = tuple(f"{host}:{port}" for port, host in enumerate(shown, 1))
    known = os.environ if site.host is None else None
    found = plan.task(site, "<secret>", 0).variables_of(plan.addresses or made_up, known)
    if not plan.addresses:
        for one in found:
            one["TF_CONFIG"] = re.sub(r':(\d+)"', ':<port>"', one["TF_CONFIG"])
    return found


def _show_note(event: Event) -> None:
    if isinstance(event, Note):
        print(event.text, file=sys.stderr, flush=True)


class CaughtSignals:
    """Context in which signals are queued for forwarding, instead of acting on this process.

    Signals that were ignored before (by nohup, or a shell's background job) stay ignored.
    """

    def __enter__(self) -> CaughtSignals:
        self._caught: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda n, _: self._caught.append(signal.Signals(n)))
            for number in _FORWARDED
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def take(self) -> list[signal.Signals]:
        return [self._caught.pop(0) for _ in range(len(self._caught))]


_LONGEST_LINE = 65536
# Interval of showing a progress bar that redraws itself.
_REDRAW_SECONDS = 1.0


class ScriptOutput:
    """Destination of the output of all ranks.

    Only the lines of the ranks in ``shown`` are printed; None: of all. ``folder`` gets the
    unchanged output of each rank, in ``0.out``, ``0.err`` and so on.
    """

    def __init__(self, shown: Collection[int] | None = None, folder: Path | None = None) -> None:
        self._shown, self._folder = shown, folder
        self._lines: dict[tuple[int, Stream], LineSplitter] = {}
        self._files: dict[Path, IO[bytes]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot write to --output-dir: {error}") from error

    def write(self, rank: int, stream: Stream, content: bytes) -> None:
        if self._folder is not None:
            self._store(self._folder / f"{rank}.{stream}", content)
        if self._shown is None or rank in self._shown:
            lines = self._lines.setdefault((rank, stream), LineSplitter())
            self._print(rank, stream, lines.add(content))

    def end_lines(self) -> None:
        for (rank, stream), lines in self._lines.items():
            self._print(rank, stream, lines.end())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _store(self, path: Path, content: bytes) -> None:
        try:
            if path not in self._files:
                # Unbuffered: the files can be followed, and are complete if the driver is killed.
                self._files[path] = open(path, "wb", buffering=0)  # noqa: SIM115 (see `close`)
            self._files[path].write(content)
        except OSError as error:  # such as a full disk, which must not end a training run
            say(f"nothing more is written to {self._folder}: {error}")
            self._folder = None

    def _print(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        if lines:
            target = (sys.stdout if stream == "out" else sys.stderr).buffer
            target.write(b"".join(b"[%d] %s\n" % (rank, line) for line in lines))
            target.flush()


class LineSplitter:
    """Splitter that turns output that arrives in pieces into whole lines.

    A line that redraws itself with carriage returns yields its last state, as on a terminal, and
    until then one state per second.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn = time.monotonic()
        self._was_shown = False

    def add(self, content: bytes) -> list[bytes]:
        """Return the lines that a piece completes."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = [_last_state(line) for line in whole]
        if lines and self._was_shown:  # a state of this line, which may have been its last
            lines = lines if lines[0] else lines[1:]
            self._was_shown = False
        states, _, newest = self._rest.rpartition(b"\r")
        state = _last_state(states)
        if state and time.monotonic() >= self._drawn + _REDRAW_SECONDS:
            self._rest, self._drawn, self._was_shown = newest, time.monotonic(), True
            lines.append(state)
        elif state:
            self._rest = state + b"\r" + newest
        if len(self._rest) > _LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        rest, self._rest = _last_state(self._rest), b""
        return [rest] if rest else []


def _last_state(line: bytes) -> bytes:
    """Return the state of a redrawn line that a terminal would show."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


def say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)


_END_SECONDS = 5.0
_REQUEUED_SECONDS = 600.0
# Slurm sends its signal this long before the grace period begins, or a minute earlier.
_LATE_SECONDS = 90.0
_NOBODY_READS = 141  # as for a process that SIGPIPE killed
_LOST = 1
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def run_script(plan: ScriptRun, is_dry: bool = False) -> int:
    """Start the script on every rank, wait until all have ended, and return the exit status.

    This process becomes the parent of orphaned descendants of the ranks, and kills them. Raises
    `ClusterError` if a host cannot run the script.
    """
    if is_dry:
        print(describe_plan(plan))
        return 0
    output = ScriptOutput(plan.shown, plan.output)
    spared = list_children()  # of a shell that started this program by `exec`
    adopt_orphans()
    try:
        with CaughtSignals() as signals:
            return _run(plan, output, signals)
    except BrokenPipeError:
        # Python would try to write the rest at exit, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    finally:
        output.close()
        end_descendants(_END_SECONDS, spared)


def _run(plan: ScriptRun, output: ScriptOutput, signals: CaughtSignals) -> int:
    for restart in range(plan.restarts + 1):
        outcome = ScriptGroup(plan, restart, output, signals).run()
        output.end_lines()
        requeued = not outcome.is_well and _requeue(plan.grace + _LATE_SECONDS)
        is_settled = outcome.failure is None or outcome.caught is not None
        message = describe(outcome, plan)
        if is_settled or restart == plan.restarts or requeued:
            break
        say(f"{message}. Restart {restart + 1} of {plan.restarts}")
    if message:
        say(message)
    if requeued:
        say("Slurm will start this job again")
        # Slurm ends this process before. When it ended by itself, Slurm could take that for the end
        # of the next run (test_a_job_that_gives_way_has_notice_and_goes_on).
        time.sleep(_REQUEUED_SECONDS)
    return exit_status(outcome)


def _requeue(late_seconds: float) -> bool:
    try:
        return requeue_preempted(os.environ, late_seconds)
    except ClusterError as error:
        say(f"this job was not requeued: {error}")
        return False


# Exit status and last message of a run.


def exit_status(outcome: GroupEnd) -> int:
    """Return 0 if all ranks exited with 0; for a signal, 128 plus its number, as in a shell."""
    status = outcome.status
    if outcome.caught is not None and not outcome.is_well:
        return 128 + outcome.caught
    if outcome.failure is None:
        return 0
    if status is None:
        return _LOST
    return status if status > 0 else 128 - status


def describe(outcome: GroupEnd, plan: ScriptRun) -> str:
    failure, caught = outcome.failure, outcome.caught
    if caught is not None and not outcome.has_begun:
        return f"ended by {caught.name} before a rank was started"
    if failure is None:
        return f"all ranks ended with exit status 0 after {caught.name}" if caught else ""
    end, advice = _explain(failure, outcome.status, plan)
    ended = f"rank {failure.rank} on {failure.host} {end}"
    if caught is not None:
        own = "" if outcome.status == -caught else f"; {ended}"
        return f"ended by {caught.name}{own}"
    others = "; the other ranks were ended" if plan.world_size > 1 else ""
    return f"{ended}{others}. {advice}"


def _explain(failure: Failure, status: int | None, plan: ScriptRun) -> tuple[str, str]:
    """Return how a rank ended, and advice."""
    rank, seen = failure.rank, f"see the lines above that begin with [{failure.rank}]"
    if plan.output is not None:
        seen = f"see {plan.output / f'{rank}.err'}"
    elif plan.shown is not None and rank not in plan.shown:
        seen = f"its lines were not shown; run again with --show {rank} or --output-dir"
    if status is None:
        advice = f"Check whether {failure.host} is still running and can be reached; {seen}"
        return f"was lost: {failure.message}", advice
    advice = f"Fix the error that it printed: {seen}"
    if status == -signal.SIGKILL:
        advice = (
            "It was killed, or its machine ran out of memory: check that host's system log "
            "(dmesg), then use smaller batches or fewer ranks per host"
        )
    elif -status in _CRASHES:
        advice = f"It crashed in compiled code: run again with --env PYTHONFAULTHANDLER=1; {seen}"
    killed = f"was killed by {name_signal(-status)}" if status < 0 else ""
    return killed or f"ended with exit status {status}", advice
