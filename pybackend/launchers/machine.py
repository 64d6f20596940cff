"""What a machine has for workers: cores, memory and GPUs.

The text of this file also goes to hosts that ssh has reached, in front of `bootstrap`, with the
same limits: the standard library, and of the language what Python 3.6 knows.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_DEVICES = Path("/dev")
_CGROUPS = Path("/sys/fs/cgroup")


def read_machine() -> Any:
    """This machine's ``cores`` and ``memory`` (bytes) for this process, and numbers of ``gpus``."""
    return {"cores": count_cores(), "memory": read_memory(), "gpus": list_gpus()}


def count_cores() -> int:
    """Cores that this process may use: a container, or Slurm, may leave it some of a machine's."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_memory() -> int:
    """Bytes that this machine has, or that a container leaves to all of its processes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, name in cgroups():
        with suppress(OSError, ValueError):  # "max": no limit
            found.append(int((folder / name).read_text()))
    return min(found)


def cgroups() -> Any:
    """Folders of this process's control groups of memory, and how each names its limit.

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
    """Numbers of the NVIDIA GPUs that the system shows, or those that the user has chosen.

    CUDA counts those that it sees from 0: a container may have `nvidia3` alone.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [number for number in chosen.split(",") if number]
    return [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]
