"""Processes of this machine: state, parent, age, memory and variables.

Linux reports them in ``/proc``; for other systems, ``ps`` answers what is needed there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PS_SECONDS = 10


@dataclass(frozen=True)
class Stat:
    """Status of a process or a thread, as the system reports it."""

    # As in `ps`: R running, S sleeping, D in the kernel, T stopped, Z ended and not reaped, ...
    state: str
    parent: int
    session: int  # ID of its leader
    cpu: str  # time that it has computed, in a form that only changes if it computes
    started: str  # in ticks since the machine started


def read_stat(pid: int | str, proc: Path = _PROC) -> Stat:
    """Raise `OSError` if the process has ended and was reaped, or this is not Linux."""
    text = (proc / str(pid) / "stat").read_text(errors="replace")
    # The name of the program comes first, and may contain blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        return Stat(fields[0], int(fields[1]), int(fields[3]), " ".join(fields[11:13]), fields[19])
    except (IndexError, ValueError) as error:  # cut off while the process ended
        raise ProcessLookupError(f"unreadable status: {text!r}") from error


def list_processes(proc: Path = _PROC) -> Iterator[int]:
    """Yield the IDs of all processes; none without ``/proc``."""
    return (int(entry.name) for entry in proc.glob("[0-9]*"))


def list_children() -> list[int]:
    """Return the IDs of this process's children, including zombies."""
    return [pid for pid, stat in _read_all().items() if stat.parent == os.getpid()]


def _read_all() -> dict[int, Stat]:
    found = {}
    for pid in list_processes():
        with contextlib.suppress(OSError):  # it may end meanwhile
            found[pid] = read_stat(pid)
    return found


def find_family(pid: int) -> set[int]:
    """Return a process, its descendants, and all processes of the session that it leads."""
    stats = _read_all()
    found = {pid, *(other for other, stat in stats.items() if stat.session == pid)}
    while new := {child for child, stat in stats.items() if stat.parent in found} - found:
        found |= new
    return found


def name_process(pid: int) -> str:
    """Return the PID and start time of a process, which no later process has; Linux only."""
    stat = read_stat(pid)
    if stat.state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}-{stat.started}"


def is_process(name: str) -> bool:
    """True if the process that `name_process` named is running."""
    try:
        return name_process(int(name.partition("-")[0])) == name
    except OSError:
        return False


def read_main_thread(pid: int) -> tuple[str, str] | None:
    """Return the state and CPU time of a process's main thread; None if it has exited."""
    try:
        if (_PROC / "self/stat").exists():
            stat = read_stat(f"{pid}/task/{pid}")
            return stat.state, stat.cpu
        shown = _ps("-o", "state=,cputime=", "-p", str(pid)).split()
        return shown[0][0], shown[1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def read_variables(pid: int) -> list[bytes]:
    """Return the variables with which a process started, as ``name=value``.

    Raises `OSError` if it has ended, or belongs to another user.
    """
    return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")


def measure_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended.

    Pages that it shares with others are counted whole; see `measure_share`.
    """
    return _read_kilobytes(pid, "status", "VmRSS:")


def measure_share(pid: int) -> int:
    """Return the resident memory of a process, with its share of common pages; this is slower."""
    return _read_kilobytes(pid, "smaps_rollup", "Pss:") or measure_memory(pid)


def measure_peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_group(pid: int) -> int:
    """Return the memory of a process group, on systems without ``/proc``, such as macOS."""
    try:
        shown = _ps("-axo", "pgid=,rss=")
    except (OSError, subprocess.SubprocessError):
        return 0
    pairs = (line.split() for line in shown.splitlines())
    return sum(int(size) * 1024 for group, size in pairs if int(group) == pid)


def _ps(*options: str) -> str:
    shown = subprocess.run(["ps", *options], capture_output=True, text=True, timeout=_PS_SECONDS)
    return shown.stdout


def _read_kilobytes(pid: int, file: str, name: str) -> int:
    try:
        lines = _PROC.joinpath(str(pid), file).read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
