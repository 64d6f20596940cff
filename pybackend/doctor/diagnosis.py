"""Problems of a cluster and how to fix them, from the results of `reach.inspect_worker`."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from pybackend.core.job.arguments import counted
from pybackend.doctor.machine import find_missing, install_command
from pybackend.doctor.reach import REFUSED, TIMED_OUT

TITLES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "numpy": "numpy",
    "h5py": "h5py",
    "cloudpickle": "cloudpickle",
    "pyarrow": "pyarrow",
}
# With different versions of these, workers could compute different weights from the same rows.
_SAME_EVERYWHERE = ("tensorflow", "keras", "numpy")
_MOST = 10
Worker = Mapping[str, Any]


def find_problems(workers: Sequence[Worker], driver: Worker, on_spark: bool) -> list[str]:
    """Return sentences that name the host and what to do; an empty list if training can begin.

    Parameters
    ----------
    workers
        Results of `inspect_worker`, by rank.
    driver
        Result of `inspect_machine` on the driver.
    on_spark
        True if Spark started the workers, which then need pyarrow.
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
    found = _group_hosts(
        (
            (
                worker["python"],
                install_command(worker, on_spark),
                tuple(find_missing(worker, on_spark)),
            ),
            worker,
        )
        for worker in workers
        if find_missing(worker, on_spark)
    )
    return [
        f"{', '.join(map(_describe_missing, missing))} for {python} on {_list_hosts(hosts)}: "
        f"run {command} there"
        for (python, command, missing), hosts in found.items()
    ]


def _describe_missing(missing: tuple[str, str | None, str]) -> str:
    name, have, _ = missing
    return f"{TITLES[name]} {'is not installed' if have is None else f'{have} is too old'}"


def _different_versions(workers: Sequence[Worker]) -> list[str]:
    sentences = []
    for name in _SAME_EVERYWHERE:
        found = _group_hosts((w[name], w) for w in workers if w[name] is not None)
        if len(found) > 1:
            shown = "; ".join(
                f"{number} on {_list_hosts(hosts)}" for number, hosts in found.items()
            )
            sentences.append(
                f"hosts have different versions of {TITLES[name]}: {shown}: install the same "
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
            if other["listen_error"] is None and not _is_foreign_loopback(worker, other):
                pairs[name_host(worker), name_host(other), missed["reason"]].append((worker, other))
    sentences = [_describe_pair(found, reason) for (_, _, reason), found in pairs.items()]
    if len(sentences) > _MOST:
        more = f"and the same between {len(sentences) - _MOST} more pairs of hosts"
        return [*sentences[:_MOST], more]
    return sentences


def _is_foreign_loopback(worker: Worker, other: Worker) -> bool:
    """Return whether this is another host's loopback address, which does not test the network."""
    return _is_loopback(other) and worker["hostname"] != other["hostname"]


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


def _group_hosts(
    pairs: Iterable[tuple[Any, Worker]],
) -> dict[Any, list[str]]:
    """Return the names of hosts by key, each name once, in the order of the pairs."""
    found: dict[Hashable, dict[str, None]] = defaultdict(dict)
    for key, worker in pairs:
        found[key][name_host(worker)] = None
    return {key: list(hosts) for key, hosts in found.items()}


def _list_hosts(hosts: list[str], most: int = 5) -> str:
    more = f" and {len(hosts) - most} more hosts" if len(hosts) > most else ""
    return ", ".join(hosts[:most]) + more
