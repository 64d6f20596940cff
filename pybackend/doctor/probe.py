"""Check of a cluster before training: one short barrier job on its slots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.core.api.function_run import barrier_run
from pybackend.core.errors import ClusterError, WorkerFailedError
from pybackend.core.job.arguments import counted
from pybackend.core.launchers import ask_executors, check_slots, count_slots, launcher_for
from pybackend.core.machine.capacity import count_cores
from pybackend.core.r.function import ADVICE
from pybackend.doctor.diagnosis import (
    TITLES,
    explain_missing_packages,
    find_problems,
    name_host,
)
from pybackend.doctor.machine import inspect_machine
from pybackend.doctor.reach import inspect_host, inspect_worker

_PACKAGES = tuple(TITLES)
_NO_PACKAGE = re.compile("No module named|PACKAGE_NOT_INSTALLED|UNSUPPORTED_PACKAGE_VERSION")


def probe(spark: Any, workers: int | None = None) -> dict[str, Any]:
    """Check the software and hardware of every slot, and its TCP connections to all others.

    Parameters
    ----------
    spark
        A ``pyspark.sql.SparkSession``; or ``"local"`` or ``"local[N]"`` for N (default: 2)
        processes on this machine, without Spark.
    workers
        Number of slots to probe. None (default): all slots of the session.

    Returns
    -------
    dict
        ``workers``: the result of `inspect_worker` for each rank, with ``reaches`` (whether it
        reached all others); ``hosts``: for each a dict of ``name``, ``slots`` and ``lines`` to
        print; ``problems``: sentences about what to fix, and where; ``verdict``: a summary line. If
        the job fails, ``problems`` has the reason, and ``workers`` is empty.

    Raises
    ------
    InputError
        ``spark`` or ``workers`` is invalid.
    """
    session = launcher_for(spark).session
    try:
        count = _count_slots(session, spark) if workers is None else workers
        seen = barrier_run(spark, inspect_worker, workers=count, verbose=0)
    except (ClusterError, WorkerFailedError) as error:
        is_missing_package = _NO_PACKAGE.search(str(error)) is not None
        return _report(
            [], (_missing_packages(session) if is_missing_package else []) or [_summarize(error)]
        )
    for worker in seen:
        worker["reaches"] = not worker["unreached"]
    return _report(seen, find_problems(seen, inspect_machine(), on_spark=session is not None))


def _missing_packages(session: Any) -> list[str]:
    """Return the packages that hosts lack for a barrier job, using a job that needs only Python."""
    if session is None:
        return []
    try:
        seen = ask_executors(session, inspect_host)
    except Exception:  # then only the barrier job's error is known
        return []
    return explain_missing_packages(seen, on_spark=True)


def _report(workers: list[dict[str, Any]], wrong: list[str]) -> dict[str, Any]:
    found = group_by_host(workers)
    if wrong:
        begin = "fix the problem above" if len(wrong) == 1 else "fix the first problem above"
        verdict = f"not ready: {begin}, then probe again"
    else:
        reach = ", and each can reach all others" if len(workers) > 1 else ""
        size = f"{counted(len(workers), 'worker')} on {counted(len(found), 'host')}"
        verdict = f"ready: {size}{reach}"
    return {"workers": workers, "hosts": found, "problems": wrong, "verdict": verdict}


def group_by_host(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group workers by host, and describe each host in lines to print."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for worker in workers:
        grouped.setdefault((name_host(worker), worker["hostname"]), []).append(worker)
    return [
        {
            "name": name if name == hostname else f"{name} ({hostname})",
            "slots": len(there),
            "lines": [*describe(there[0]), _reaching(there, len(workers))],
        }
        for (name, hostname), there in grouped.items()
    ]


def describe(found: Mapping[str, Any]) -> list[str]:
    """Describe the result of `inspect_machine` on one host in four lines."""
    packages = [f"{TITLES[n]} {found[n]}" if found[n] else f"no {TITLES[n]}" for n in _PACKAGES]
    return [
        f"Python {found['python_version']}, {found['python']}",
        ", ".join(packages),
        ", ".join(_r(found)),
        ", ".join(_machine(found)),
    ]


def _r(found: Mapping[str, Any]) -> list[str]:
    r = f"R {found['r'] or '(no version)'}, {found['rscript']}" if found["rscript"] else "no R"
    extras = [f"{n} {found[n]}" if found[n] else f"no {n}" for n in ("reticulate", "rpy2")]
    if found["rpy2_problem"]:
        extras[-1] += f", which cannot be used: {found['rpy2_problem']}; install it {ADVICE}"
    return [r, *extras]


def _machine(found: Mapping[str, Any]) -> list[str]:
    memory = found["memory_gb"]
    gpus = found["gpus"]
    names = ", ".join(dict.fromkeys(gpus))
    return [
        counted(found["cores"], "core"),
        "unknown memory" if memory is None else f"{memory:g} GB of memory",
        f"{counted(len(gpus), 'GPU')} ({names})" if gpus else "no GPU",
    ]


def _reaching(there: Sequence[Mapping[str, Any]], workers: int) -> str:
    slots = f"{counted(len(there), 'slot')} here"
    if workers == 1:
        return f"{slots}, the only one"
    cut_off = sum(not worker["reaches"] for worker in there)
    if cut_off == 0:
        return f"{slots}, which can reach all other workers"
    return f"{slots}, of which {cut_off} cannot reach all other workers"


def _count_slots(session: Any, spark: Any) -> int:
    if session is None:
        named = re.fullmatch(r"local\[(\d+|\*)\]", spark or "")
        if named is None:
            return 2
        return count_cores() if named[1] == "*" else int(named[1])
    check_slots(session, 1)
    return max(1, count_slots(session))


def _summarize(error: Exception) -> str:
    """Return a failure as one sentence, without Spark's message and the worker's traceback."""
    text = str(error)
    advice = re.search(r"^What to do: (.*)$", text, re.MULTILINE)
    first = text.split("\n", 1)[0]
    # Spark names the executor's host after the number of the task.
    host = re.search(r"\(TID \d+\) \((\S+) executor", text)
    place = f" (on {host[1]})" if host and f" on {host[1]} " not in first else ""
    return f"{first}{place}: {advice[1]}" if advice else f"{first}{place}"
