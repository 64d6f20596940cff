"""`tfdist run`: one start of a gang after another, until one ends well or none is left."""

from __future__ import annotations

import os
import sys
import time

from pybackend.errors import ClusterError
from pybackend.launchers.script.descendants import adopt_orphans, children, end_descendants
from pybackend.launchers.script.dry_run import describe_plan
from pybackend.launchers.script.ending import describe, exit_status
from pybackend.launchers.script.gang import Gang, Outcome
from pybackend.launchers.script.output import Output, say
from pybackend.launchers.script.plan import Plan
from pybackend.launchers.script.signals import CaughtSignals
from pybackend.launchers.slurm.requeue import requeue_told

_END_SECONDS = 5.0
_REQUEUED_SECONDS = 600.0
# Slurm's notice comes that much before the grace begins, or a minute earlier.
_LATE_SECONDS = 90.0
_NOBODY_READS = 141  # as of a process that SIGPIPE has ended


def run_script(plan: Plan, is_dry: bool = False) -> int:
    """Start the script on every rank, and stay until all have ended; the exit status.

    This process becomes the parent of whatever the ranks leave behind, and ends it.

    Raises
    ------
    ClusterError
        A host cannot run the script.
    """
    if is_dry:
        print(describe_plan(plan))
        return 0
    output = Output(plan.shown, plan.output)
    spared = children()  # of a shell that has become this process by `exec`
    adopt_orphans()
    try:
        with CaughtSignals() as signals:
            return _run(plan, output, signals)
    except BrokenPipeError:
        # Python would try to write the rest at its end, and say that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    finally:
        output.close()
        end_descendants(_END_SECONDS, spared)


def _run(plan: Plan, output: Output, signals: CaughtSignals) -> int:
    for restart in range(plan.restarts + 1):
        outcome = Gang(plan, restart, output, signals).run()
        output.end_lines()
        requeued = not _is_well(outcome) and _requeue(plan.grace + _LATE_SECONDS)
        if _is_settled(outcome) or restart == plan.restarts or requeued:
            break
        say(f"{describe(outcome, plan)}. Restart {restart + 1} of {plan.restarts}")
    if told := describe(outcome, plan):
        say(told)
    if requeued:
        say("Slurm will start this job again")
        time.sleep(_REQUEUED_SECONDS)  # it ends this process before
    return exit_status(outcome)


def _requeue(late_seconds: float) -> bool:
    try:
        return requeue_told(os.environ, late_seconds)
    except ClusterError as error:
        say(f"this job was not requeued: {error}")
        return False


def _is_well(outcome: Outcome) -> bool:
    return outcome.fault is None and outcome.has_begun


def _is_settled(outcome: Outcome) -> bool:
    """Whether the gang has done its work, or the user wants no more of it."""
    return outcome.fault is None or outcome.caught is not None
