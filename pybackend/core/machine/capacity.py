"""Cores, memory and GPUs that this process may use.

The text of this file is also sent to ssh hosts, before that of `bootstrap`. So it has the same
limits: only the standard library, and the syntax of Python 3.6.

Limits of a container, of a Slurm job or of a systemd slice are those of control groups, which are
often set on a parent of the process's own group. So all parents are read, and the smallest wins.
Version 1 of control groups has a tree per kind of resource, version 2 has one for all.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path("/")
# Files of a memory control group, by version: limit, use, and the counters of `memory.stat` whose
# pages the system gives back before it kills. Rows that were just written fill the page cache: the
# use of a container with 6 GB free then is nearly its limit.
_MEMORY = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def read_machine() -> Any:
    """Return the ``cores``, ``memory`` (bytes) and ``gpus`` (numbers) that this process may use."""
    return {"cores": count_cores(), "memory": int(read_memory()), "gpus": list_gpus()}


def count_cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process may use.

    The affinity of a process, as in Slurm, or the quota of a container may limit them. A fraction
    of a core is not counted, because a thread for it would mostly wait.
    """
    found = [float(os.cpu_count() or 1)]
    if hasattr(os, "sched_getaffinity"):  # Linux
        found = [float(len(os.sched_getaffinity(0)))]
    for version, folder in list_control_groups("cpu", root):
        with suppress(OSError, ValueError):  # "max", or -1: no quota
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                quota, period = (int((folder / name).read_text()) for name in names)
            if quota > 0 and period > 0:
                found.append(quota / period)
    return max(1, int(min(found)))


def read_memory(root: Path = _ROOT) -> float:
    """Return the memory of this machine, or the smallest limit of its control groups, in bytes."""
    found = [read_meminfo("MemTotal", root=root)]
    with suppress(OSError, ValueError):
        found.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    for version, folder in list_control_groups("memory", root):
        found.append(_read_number(folder / _MEMORY[version][0]))
    return min(found)


def read_free_memory(root: Path = _ROOT, swaps: bool = False) -> float:
    """Return the memory in bytes that this process can still use before the system kills.

    With ``swaps``, swap space counts, too; in a group of version 1, it is left out.
    """
    spare = read_meminfo("SwapFree", root=root) if swaps else 0.0
    found = [read_meminfo("MemAvailable", root=root) + spare]
    for version, folder in list_control_groups("memory", root):
        limit, current, given_back = _MEMORY[version]
        with suppress(OSError, ValueError):
            used = int((folder / current).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            counters = dict(line.split() for line in lines)
            used -= sum(int(counters.get(name, 0)) for name in given_back)
            free = max(0.0, _read_number(folder / limit) - used)
            swapped = _read_number(folder / "memory.swap.current", 0.0)
            most = _read_number(folder / "memory.swap.max") if version == 2 else 0.0
            found.append(free + min(spare, max(0.0, most - swapped)))
    return min(found)


def _read_number(file: Path, otherwise: float = float("inf")) -> float:
    """Return the number in a file; infinite by default if there is none, as for "max"."""
    with suppress(OSError, ValueError):
        return float(file.read_text())
    return otherwise


def read_meminfo(*names: str, root: Path = _ROOT) -> float:
    """Return the sum of some entries in /proc/meminfo in bytes; infinite if that does not exist."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, rest in (one.split(":") for one in lines)}
        return 1024.0 * sum(kilobytes[name] for name in names)
    except (OSError, KeyError, ValueError):
        return float("inf")


def list_control_groups(kind: str, root: Path = _ROOT) -> Any:
    """Yield the control groups of this process for "memory" or "cpu", and all their parents.

    A group is its version (1 or 2), and its folder. A container often sees its own group as the
    root, beside the path that the group has on the host.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0":
            version, tops = 2, [mounted, mounted / "unified"]
        elif kind in kinds.split(","):
            version, tops = 1, [mounted / name for name in {kinds, kind}]
        else:
            continue
        names = [name for name in path.split("/") if name]
        for top in tops:
            for depth in range(len(names), -1, -1):
                yield version, top.joinpath(*names[:depth])


def list_gpus(environment: Any = os.environ, devices: Path = _ROOT / "dev") -> Any:
    """Return the numbers of the NVIDIA GPUs of the system, or of those that the user selected.

    CUDA numbers visible GPUs from 0: the only GPU of a container may be `nvidia3`.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [number for number in chosen.split(",") if number]
    return [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def keep_usable(gpus: Iterable[str]) -> list[str]:
    """Return the numbers of GPUs without -1, which users set to hide all of them."""
    return [number for number in gpus if not number.startswith("-")]
