"""`tfdist run`: start the ranks, and restart them after failures while restarts are left."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.launchers.forking import adopt_orphans, end_descendants, name_signal
from pybackend.core.launchers.script.group import CaughtSignals, GroupEnd, ScriptGroup, python_of
from pybackend.core.launchers.script.output import ScriptOutput, say
from pybackend.core.launchers.script.plan import HostRanks, ScriptRun
from pybackend.core.launchers.script.slurm import describe_step, requeue_preempted
from pybackend.core.machine.processes import list_children

_END_SECONDS = 5.0
_REQUEUED_SECONDS = 600.0
# Slurm sends its signal this long before the grace period begins, or a minute earlier.
_LATE_SECONDS = 90.0
_NOBODY_READS = 141  # as for a process that SIGPIPE killed
_LOST = 1
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def run_script(plan: ScriptRun, is_dry: bool = False) -> int:
    """Start the script on every rank, wait until all have ended, and return the exit status.

    This process becomes the parent of orphaned descendants of the ranks, and kills them.

    Raises
    ------
    ClusterError
        A host cannot run the script.
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
        requeued = not _is_well(outcome) and _requeue(plan.grace + _LATE_SECONDS)
        if _is_settled(outcome) or restart == plan.restarts or requeued:
            break
        say(f"{describe(outcome, plan)}. Restart {restart + 1} of {plan.restarts}")
    if message := describe(outcome, plan):
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


def _is_well(outcome: GroupEnd) -> bool:
    return outcome.failure is None and outcome.has_begun


def _is_settled(outcome: GroupEnd) -> bool:
    """Return whether the ranks succeeded, or the user ended them."""
    return outcome.failure is None or outcome.caught is not None


# Plan of `tfdist run`, as text.


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
    """Return the variables of each rank of a host, with placeholders."""
    hosts = [one.address or one.name for one in plan.sites for _ in one.ranks]
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    made_up = tuple(f"{host}:{port}" for port, host in enumerate(shown, 1))
    known = os.environ if site.host is None else None
    found = plan.task(site, "<secret>", 0).variables_of(plan.addresses or made_up, known)
    if not plan.addresses:
        for one in found:
            one["TF_CONFIG"] = re.sub(r':(\d+)"', ':<port>"', one["TF_CONFIG"])
    return found


# Exit status and last message of a run.


def exit_status(outcome: GroupEnd) -> int:
    """Return 0 if all ranks exited with 0; for a signal, 128 plus its number, as in a shell."""
    status = outcome.status
    if outcome.caught is not None and not _is_well(outcome):
        return 128 + outcome.caught
    if outcome.failure is None:
        return 0
    if status is None:
        return _LOST
    return status if status > 0 else 128 - status


def describe(outcome: GroupEnd, plan: ScriptRun) -> str:
    """Return what happened, and advice; empty if all ranks succeeded."""
    failure, caught = outcome.failure, outcome.caught
    if caught is not None and not outcome.has_begun:
        return f"ended by {caught.name} before a rank was started"
    if failure is None:
        return f"all ranks ended with exit status 0 after {caught.name}" if caught else ""
    ended = f"rank {failure.rank} on {failure.host} {_end_of(failure, outcome.status)}"
    if caught is not None:
        own = "" if outcome.status == -caught else f"; {ended}"
        return f"ended by {caught.name}{own}"
    others = "; the other ranks were ended" if plan.world_size > 1 else ""
    return f"{ended}{others}. {_advice(failure, outcome.status, plan)}"


def _end_of(failure: Failure, status: int | None) -> str:
    if status is None:
        return f"was lost: {failure.message}"
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {name_signal(-status)}"


def _advice(failure: Failure, status: int | None, plan: ScriptRun) -> str:
    seen = _where_seen(failure.rank, plan)
    if status is None:
        return f"Check whether {failure.host} is still running and can be reached; {seen}"
    if status == -signal.SIGKILL:
        return (
            "It was killed, or its machine ran out of memory: check that host's system log "
            "(dmesg), then use smaller batches or fewer ranks per host"
        )
    if -status in _CRASHES:
        return f"It crashed in compiled code: run again with --env PYTHONFAULTHANDLER=1; {seen}"
    return f"Fix the error that it printed: {seen}"


def _where_seen(rank: int, plan: ScriptRun) -> str:
    if plan.output is not None:
        return f"see {plan.output / f'{rank}.err'}"
    if plan.shown is None or rank in plan.shown:
        return f"see the lines above that begin with [{rank}]"
    return f"its lines were not shown; run again with --show {rank} or --output-dir"
