"""Whether rows that are to be in memory fit into it; if not, they stay on the worker's disk."""

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

# Of what is free: the rest is for the model, and for whatever else the machine does.
_SHARE = 0.5


def fit_in_memory(
    folders: Iterable[Path], limit: int | None, collective: Collective, emit: Emit
) -> bool:
    """Whether this worker's rows fit into memory; a note says for which workers they do not.

    Parameters
    ----------
    folders
        Of the rows, as a `SpoolWriter` has filled them.
    limit
        Bytes that the worker may use; None: as many as are free.
    """
    needed = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    own = np.array([needed, find_free_memory(), _hash_machine()], np.float64)
    everyone = np.stack(collective.all_gather(own))
    # Workers of one machine share what is free there.
    neighbours = (everyone[:, 2:] == everyone[:, 2]).sum(axis=1)
    shares = np.minimum(everyone[:, 1] / neighbours, limit or np.inf) * _SHARE
    is_large = everyone[:, 0] > shares
    if is_large.any():
        first = int(is_large.argmax())
        emit(
            Note(
                f"in_memory: the rows of {_name(is_large.nonzero()[0].tolist())} stay on disk, in "
                f"the same order: those of worker {first} are {show_bytes(everyone[first, 0])}, "
                f"and it may keep {show_bytes(shares[first])} in memory"
            )
        )
    return not is_large[collective.rank]


def count_neighbours(collective: Collective) -> int:
    """Workers on this worker's machine, itself included."""
    own = np.array([_hash_machine()], np.float64)
    return sum(bool(other == own) for other in collective.all_gather(own))


def find_free_memory() -> float:
    """Bytes that the machine has free, or that a container leaves this process."""
    free = [read_meminfo("MemAvailable")]
    for folder in _list_control_groups():
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / "memory.max").read_text())
            free.append(float(max(0, most - int((folder / "memory.current").read_text()))))
    return min(free)


def read_memory() -> float:
    """Bytes that this process has in memory; 0 where Linux does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return float(pages * resource.getpagesize())


def read_peak_memory() -> float:
    """The most that it has had so far."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _hash_machine() -> float:
    """A number that is the same in all processes of a machine."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return 0.0
    return float(int(text[:8], 16))


def _list_control_groups() -> list[Path]:
    """This process's own group and those above it; a container often sees its own as the root."""
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
