"""How a gang's end is told: its exit status, and a last message."""

from __future__ import annotations

import signal

from pybackend.launchers.script.gang import Fault, Outcome
from pybackend.launchers.script.plan import Plan

_LOST = 1
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def exit_status(outcome: Outcome) -> int:
    """0 only if all ranks have ended so; of a signal, 128 and its number, as in a shell."""
    is_well = outcome.fault is None and outcome.has_begun
    if outcome.caught is not None and not is_well:
        return 128 + outcome.caught
    if outcome.fault is None:
        return 0
    status = outcome.fault.status
    if status is None:
        return _LOST
    return status if status > 0 else 128 - status


def describe(outcome: Outcome, plan: Plan) -> str:
    """What has happened, and what to do; empty if all ranks have just done their work."""
    fault, caught = outcome.fault, outcome.caught
    if caught is not None and not outcome.has_begun:
        return f"ended by {caught.name} before a rank was started"
    if fault is None:
        return f"all ranks have ended with exit status 0 after {caught.name}" if caught else ""
    where = f"rank {fault.rank} on {fault.host}"
    if caught is not None:
        own = "" if fault.status == -caught else f"; {where} {_end_of(fault)}"
        return f"ended by {caught.name}{own}"
    others = "; the other ranks were ended" if plan.world_size > 1 else ""
    return f"{where} {_end_of(fault)}{others}. {_advice(fault, plan)}"


def _end_of(fault: Fault) -> str:
    if fault.status is None:
        return f"was lost: {fault.loss}"
    if fault.status >= 0:
        return f"ended with exit status {fault.status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-fault.status, f'signal {-fault.status}')}"


def _advice(fault: Fault, plan: Plan) -> str:
    seen = _where_seen(fault.rank, plan)
    if fault.status is None:
        return f"Look whether {fault.host} still runs and can be reached; {seen}"
    if fault.status == -signal.SIGKILL:
        return (
            "Someone has killed it, or its machine's memory ran out: look into that host's system "
            "log (dmesg), then use smaller batches or fewer ranks per host"
        )
    if -fault.status in _CRASHES:
        return f"It crashed in compiled code: run again with --env PYTHONFAULTHANDLER=1; {seen}"
    return f"Fix what its own error says: {seen}"


def _where_seen(rank: int, plan: Plan) -> str:
    if plan.output is not None:
        return f"see {plan.output / f'{rank}.err'}"
    if plan.shown is None or rank in plan.shown:
        return f"see the lines above that begin with [{rank}]"
    return f"its lines were not shown, run again with --show {rank} or --output-dir"
