"""Check that rows for which memory is requested fit into it; if not, they stay on disk."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from pybackend.collective import Collective
from pybackend.job.meminfo import read_meminfo
from pybackend.job.messages import Emit, Note
from pybackend.job.resources import show_bytes

# Share of the free memory: the rest is for the model and other processes.
_SHARE = 0.5


def fit_in_memory(
    folders: Iterable[Path], limit: int | None, collective: Collective, emit: Emit
) -> bool:
    """Return whether this worker's rows fit into memory; a note names workers whose do not.

    Parameters
    ----------
    folders
        Folders of the rows, as written by a `SpoolWriter`.
    limit
        Bytes that the worker may use; None: all free memory.
    """
    needed = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    own = np.array([needed, find_free_memory(), _hash_machine()], np.float64)
    everyone = np.stack(collective.all_gather(own))
    # Workers of one machine share its free memory.
    neighbours = (everyone[:, 2:] == everyone[:, 2]).sum(axis=1)
    shares = np.minimum(everyone[:, 1] / neighbours, limit or np.inf) * _SHARE
    is_large = everyone[:, 0] > shares
    if is_large.any():
        first = int(is_large.argmax())
        emit(
            Note(
                f"in_memory: the rows of {_name(is_large.nonzero()[0].tolist())} stay on disk, in "
                f"the same order: those of worker {first} are {show_bytes(everyone[first, 0])}, "
                f"but it may use {show_bytes(shares[first])} of memory"
            )
        )
    return not is_large[collective.rank]


def count_neighbours(collective: Collective) -> int:
    """Count the workers on this worker's machine, including itself."""
    own = np.array([_hash_machine()], np.float64)
    return sum(bool(other == own) for other in collective.all_gather(own))


def find_free_memory() -> float:
    """Return the free bytes of the machine, or of this process's container."""
    free = [read_meminfo("MemAvailable")]
    for folder in _list_control_groups():
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / "memory.max").read_text())
            free.append(float(max(0, most - int((folder / "memory.current").read_text()))))
    return min(free)


def read_memory() -> float:
    """Return the bytes of this process in memory; 0 if Linux does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return float(pages * resource.getpagesize())


def read_peak_memory() -> float:
    """Return the largest number of bytes that this process has had in memory."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _hash_machine() -> float:
    """Return a number that is the same in all processes of a machine."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return 0.0
    return float(int(text[:8], 16))


def _list_control_groups() -> list[Path]:
    """Return this process's control group and its parents; a container may see its own as root."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::"))[3:]
        own = root / path.lstrip("/")
        return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return [root]


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
