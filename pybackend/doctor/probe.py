"""Check of a cluster before training: one short barrier job on its slots, and advice."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from pybackend.core.api.function_run import barrier_run
from pybackend.core.errors import ClusterError, WorkerFailedError
from pybackend.core.job.arguments import counted
from pybackend.core.launchers import ask_executors, check_slots, count_slots, launcher_for
from pybackend.core.machine.capacity import count_cores
from pybackend.core.machine.packages import TITLES
from pybackend.core.r.function import ADVICE
from pybackend.doctor.machine import find_missing, inspect_machine, install_command
from pybackend.doctor.reach import REFUSED, TIMED_OUT, inspect_host, inspect_worker

_PACKAGES = ("tensorflow", "keras", "numpy", "h5py", "cloudpickle", "pyarrow")
_TITLES = {name: TITLES.get(name, name) for name in _PACKAGES}
# With different versions of these, workers could compute different weights from the same rows.
_SAME_EVERYWHERE = ("tensorflow", "keras", "numpy")
_MOST = 10
Worker = Mapping[str, Any]
_NO_PACKAGE = re.compile("No module named|PACKAGE_NOT_INSTALLED|UNSUPPORTED_PACKAGE_VERSION")


def probe(spark: Any, workers: int | None = None) -> dict[str, Any]:
    """Check the software and hardware of every slot, and its TCP connections to all others.

    ``spark`` is a session; or ``"local"`` or ``"local[N]"`` for N (default: 2) processes on this
    machine, without Spark. ``workers``: None (default) means all slots of the session.

    The result has ``workers``: what `inspect_worker` returns for each rank, and ``reaches``
    (whether it reached all others); ``hosts``: for each a dict of ``name``, ``slots`` and ``lines``
    to print; ``problems``: sentences about what to fix, and where; and ``verdict``: a summary line.
    If the job fails, ``problems`` has the reason, and ``workers`` is empty.
    """
    session = launcher_for(spark).session
    try:
        count = _count_slots(session, spark) if workers is None else workers
        seen = barrier_run(spark, inspect_worker, workers=count, verbose=0)
    except (ClusterError, WorkerFailedError) as error:
        missing = _missing_packages(session) if _NO_PACKAGE.search(str(error)) else []
        return _conclude([], missing or [_summarize(error)])
    for worker in seen:
        worker["reaches"] = not worker["unreached"]
    return _conclude(seen, find_problems(seen, inspect_machine(), on_spark=session is not None))


def _missing_packages(session: Any) -> list[str]:
    """Return the packages that hosts lack for a barrier job, using a job that needs only Python."""
    if session is None:
        return []
    try:
        seen = ask_executors(session, inspect_host)
    except Exception:  # then only the barrier job's error is known
        return []
    return explain_missing_packages(seen, on_spark=True)


def _conclude(workers: list[dict[str, Any]], wrong: list[str]) -> dict[str, Any]:
    found = group_by_host(workers)
    if wrong:
        which = "problem" if len(wrong) == 1 else "first problem"
        verdict = f"not ready: fix the {which} above, then probe again"
    else:
        reach = ", and each can reach all others" if len(workers) > 1 else ""
        size = f"{counted(len(workers), 'worker')} on {counted(len(found), 'host')}"
        verdict = f"ready: {size}{reach}"
    return {"workers": workers, "hosts": found, "problems": wrong, "verdict": verdict}


def group_by_host(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str], list[Worker]] = defaultdict(list)
    for worker in workers:
        grouped[name_host(worker), worker["hostname"]].append(worker)
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
    packages = [f"{t} {found[n]}" if found[n] else f"no {t}" for n, t in _TITLES.items()]
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
    memory, gpus = found["memory_gb"], found["gpus"]
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
    which = f"of which {cut_off} cannot" if cut_off else "which can"
    return f"{slots}, {which} reach all other workers"


def _count_slots(session: Any, spark: Any) -> int:
    if session is None:
        named = re.fullmatch(r"local\[(\d+|\*)\]", spark or "")
        count = named[1] if named else "2"
        return count_cores() if count == "*" else int(count)
    check_slots(session, 1)
    return max(1, count_slots(session))


def _summarize(error: Exception) -> str:
    """Return a failure as one sentence, without Spark's message and the worker's traceback."""
    text = str(error)
    advice = re.search(r"^What to do: (.*)$", text, re.MULTILINE)
    first = text.split("\n", 1)[0]
    # Spark names the executor's host after the number of the task.
    host = re.search(r"\(TID \d+\) \((\S+) executor", text)
    where = f" (on {host[1]})" if host and f" on {host[1]} " not in first else ""
    return f"{first}{where}: {advice[1]}" if advice else f"{first}{where}"


def find_problems(workers: Sequence[Worker], driver: Worker, on_spark: bool) -> list[str]:
    """Return sentences that name the host and what to do; an empty list if training can begin.

    ``driver`` is the result of `inspect_machine` there. Workers that Spark started need pyarrow.
    """
    return [
        *explain_missing_packages(workers, on_spark),
        *_different_versions(workers),
        *_unlike_the_driver(workers, driver),
        *_loopback_addresses(workers),
        *_not_listening(workers),
        *_unreached(workers),
    ]


def name_host(worker: Worker) -> str:
    """Return the address of a worker's host, or its name if the address is unknown or loopback."""
    return str(worker["hostname"] if _is_loopback(worker) else worker["host"])


def explain_missing_packages(workers: Sequence[Worker], on_spark: bool) -> list[str]:
    """Return what to install on which host. The workers need not be connected to each other."""
    lacks = ((tuple(find_missing(worker, on_spark)), worker) for worker in workers)
    found = _group_hosts(
        ((missing, worker["python"], install_command(worker, on_spark)), worker)
        for missing, worker in lacks
        if missing
    )
    return [
        f"{', '.join(map(_describe_missing, missing))} for {python} on {_list_hosts(hosts)}: "
        f"run {command} there"
        for (missing, python, command), hosts in found.items()
    ]


def _describe_missing(missing: tuple[str, str | None, str]) -> str:
    name, have, _ = missing
    return f"{_TITLES[name]} {'is not installed' if have is None else f'{have} is too old'}"


def _different_versions(workers: Sequence[Worker]) -> list[str]:
    sentences = []
    for name in _SAME_EVERYWHERE:
        found = _group_hosts((w[name], w) for w in workers if w[name] is not None)
        if len(found) > 1:
            shown = "; ".join(f"{one} on {_list_hosts(there)}" for one, there in found.items())
            sentences.append(
                f"hosts have different versions of {_TITLES[name]}: {shown}: install the same "
                "version on all of them"
            )
    return sentences


def _unlike_the_driver(workers: Sequence[Worker], driver: Worker) -> list[str]:
    own = _minor_version(driver)
    sentences = [
        f"Python {minor} on {_list_hosts(hosts)} differs from the driver's {own}, but functions "
        "are sent as code that runs only on the same minor version: set PYSPARK_PYTHON to a "
        f"Python {own} that exists there"
        for minor, hosts in _group_hosts((_minor_version(w), w) for w in workers).items()
        if minor != own
    ]
    same_path = [
        w
        for w in workers
        if (w["python"], _minor_version(w)) == (driver["python"], own)
        and w["python_version"] != driver["python_version"]
    ]
    if same_path:  # R puts its own folders before others
        sentences.append(
            f"{driver['python']} is Python {same_path[0]['python_version']} on the workers "
            f"and {driver['python_version']} here: they load a different libpython. Unset "
            "LD_LIBRARY_PATH where Spark is started, or in R, start Python with "
            "reticulate::py_config() before spark_connect()"
        )
    # A model is sent as a Keras file, which an older Keras may not read.
    # Different versions among the workers are a problem of their own.
    theirs = {w["keras"] for w in workers}
    if len(theirs) == 1 and driver["keras"] is not None and not theirs & {driver["keras"], None}:
        sentences.append(
            f"the driver has Keras {driver['keras']} and the workers have {theirs.pop()}: install "
            "the same version on all of them, because models are sent between them as files"
        )
    return sentences


def _loopback_addresses(workers: Sequence[Worker]) -> list[str]:
    """Report hosts with a loopback address, which no other host can reach."""
    if len({worker["hostname"] for worker in workers}) < 2:
        return []
    found = _group_hosts((w["host"], w) for w in workers if _is_loopback(w))
    return [
        f"{_list_hosts(hosts)} joined as {address}, which no other host can reach: in /etc/hosts "
        "there, give the host's own name its real address, or set SPARK_LOCAL_IP there"
        for address, hosts in found.items()
    ]


def _not_listening(workers: Sequence[Worker]) -> list[str]:
    return [
        f"worker {w['rank']} on {name_host(w)} cannot listen at {w['address']} "
        f"({w['listen_error']}): find out what uses that port or blocks listening on it, then "
        "probe again"
        for w in workers
        if w["listen_error"] is not None
    ]


def _unreached(workers: Sequence[Worker]) -> list[str]:
    """Return one sentence per pair of hosts, because hosts with many slots have many pairs."""
    pairs: dict[tuple[str, str, str], list[tuple[Worker, Worker]]] = defaultdict(list)
    for worker in workers:
        for missed in worker["unreached"]:
            other = workers[missed["rank"]]
            # Only causes: `_not_listening` and `_loopback_addresses` explain the others.
            # Another host's loopback address does not test the network.
            is_elsewhere = worker["hostname"] != other["hostname"] and _is_loopback(other)
            if other["listen_error"] is None and not is_elsewhere:
                pairs[name_host(worker), name_host(other), missed["reason"]].append((worker, other))
    sentences = [_describe_pair(found, reason) for (_, _, reason), found in pairs.items()]
    if len(sentences) > _MOST:
        more = f"and the same between {len(sentences) - _MOST} more pairs of hosts"
        return [*sentences[:_MOST], more]
    return sentences


def _describe_pair(found: Sequence[tuple[Worker, Worker]], reason: str) -> str:
    worker, other = found[0]
    count = len(found) - 1
    more = f"; the same for {counted(count, 'more pair')} of workers there" if count else ""
    return (
        f"worker {worker['rank']} on {name_host(worker)} cannot reach worker {other['rank']} at "
        f"{other['address']} ({reason}){more}: {_advise(worker, other, reason)}"
    )


def _advise(worker: Worker, other: Worker, reason: str) -> str:
    one, two = name_host(worker), name_host(other)
    ports = "the TCP ports {}-{}".format(*other["ports"]) if other["ports"] else "all TCP ports"
    if one == two:
        return f"a firewall on that host: open {ports} to its own workers"
    opened = f"open {ports} of {two} to {one}"
    elsewhere = f"set SPARK_LOCAL_IP on {two} to an address that {one} can reach"
    if reason == TIMED_OUT:
        return f"a firewall between the two hosts: {opened}, or {elsewhere}"
    if reason == REFUSED:
        return (
            "a firewall rejects it, or the address belongs to another machine (a container, or a "
            f"host behind NAT): {opened}, or {elsewhere}"
        )
    return f"the network between the two hosts: fix the route, or {elsewhere}"


def _is_loopback(worker: Worker) -> bool:
    return worker["host"] is None or ipaddress.ip_address(worker["host"]).is_loopback


def _minor_version(found: Worker) -> str:
    return ".".join(found["python_version"].split(".")[:2])


def _group_hosts(pairs: Iterable[tuple[Any, Worker]]) -> dict[Any, list[str]]:
    """Return the names of hosts by key, each name once, in the order of the pairs."""
    found: dict[Hashable, dict[str, None]] = defaultdict(dict)
    for key, worker in pairs:
        found[key][name_host(worker)] = None
    return {key: list(hosts) for key, hosts in found.items()}


def _list_hosts(hosts: list[str], most: int = 5) -> str:
    more = f" and {len(hosts) - most} more hosts" if len(hosts) > most else ""
    return ", ".join(hosts[:most]) + more
