"""Cores, memory and GPUs of a machine.

The text of this file is also sent to ssh hosts, before that of `bootstrap`. So it has the same
limits: only the standard library, and the syntax of Python 3.6.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_DEVICES = Path("/dev")
_CGROUPS = Path("/sys/fs/cgroup")


def read_machine() -> Any:
    """Return the ``cores``, ``memory`` (bytes) and ``gpus`` (numbers) that this process may use."""
    return {"cores": count_cores(), "memory": read_memory(), "gpus": list_gpus()}


def count_cores() -> int:
    """Return the number of cores that this process may use; a container or Slurm may limit them."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_memory() -> int:
    """Return the memory of this machine, or its container's limit, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, name in cgroups():
        with suppress(OSError, ValueError):  # "max": no limit
            found.append(int((folder / name).read_text()))
    return min(found)


def cgroups() -> Any:
    """Return the folders of this process's memory control groups, and the name of each limit.

    A container often sees its own group as the root.
    """
    found = [
        (_CGROUPS, "memory.max"),
        (_CGROUPS / "memory", "memory.limit_in_bytes"),
    ]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0":
            found.append((_CGROUPS / path.lstrip("/"), "memory.max"))
        elif "memory" in kinds.split(","):
            found.append((_CGROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return found


def list_gpus(environment: Any = os.environ, devices: Path = _DEVICES) -> Any:
    """Return the numbers of the NVIDIA GPUs of the system, or of those that the user selected.

    CUDA numbers visible GPUs from 0: the only GPU of a container may be `nvidia3`.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [number for number in chosen.split(",") if number]
    return [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]
