"""Rank and address of a process that ``mpirun`` started."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path

from pybackend.errors import InputError
from pybackend.launchers.joined.place import Place, pick_port

# Rank and size, among all processes and among those of a machine: first of Open MPI, then of MPICH,
# Intel MPI and others with Hydra.
_NAMES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# As in /proc/PID/environ, which has the variables of a process's start.
_RANK_MARKS = tuple(f"{names[0]}=".encode() for names in _NAMES)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a process among those of its ``mpirun``; None: it is the only one.

    Raises
    ------
    InputError
        The processes are on several hosts, and the address of the first one is not set.
    """
    if _is_of_srun(environment):
        return None
    for names in _NAMES:
        if names[0] in environment and int(environment.get(names[1], "1")) > 1:
            defaults = ("0", "1", "0", "1")
            found = (environment.get(*pair) for pair in zip(names, defaults, strict=True))
            rank, size, local_rank, local_size = map(int, found)
            meeting = _find_meeting(environment, local_size == size)
            return Place(rank, size, meeting, None, "mpirun", (), local_rank, local_size)
    return None


def _is_of_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process with MPI's variables, as ``srun --mpi=pmi2`` does.

    In an allocation, mpirun starts its daemons by srun: their processes have the variables of both,
    and only mpirun's are theirs.
    """
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(
        ours in environment and environment[ours] == environment.get(slurms)
        for ours, slurms in pairs
    )


def _find_meeting(environment: Mapping[str, str], is_one_machine: bool) -> str:
    """Return the address of the first process, which MPI does not provide."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if is_one_machine:
        # Common to all processes of one mpirun, and different for another one.
        job = environment.get("PMIX_NAMESPACE") or _name_starter()
        name = f"{job} on {socket.gethostname()}"
        return f"127.0.0.1:{pick_port(zlib.crc32(name.encode()))}"
    raise InputError(
        "mpirun started processes on several hosts, but does not provide the address of the "
        "first one: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it, "
        "e.g. mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
    )


def _name_starter() -> str:
    """Identify the process that started all ranks; processes below it are ranks or wrappers."""
    pid = os.getppid()
    try:
        while _is_rank(pid):
            pid = int(_read_status(pid)[1])
        return f"{pid} since {_read_status(pid)[19]}"
    except OSError:  # not Linux
        return str(pid)


def _is_rank(pid: int) -> bool:
    """Return whether a process has the variables of a rank, as wrapper scripts also have."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:  # another user's, such as a system daemon
        return False
    return any(variable.startswith(_RANK_MARKS) for variable in variables)


def _read_status(pid: int) -> list[str]:
    """Return a process's state, its parent, and so on; its start time is the twentieth field."""
    # The program's name comes before them, and may contain blanks and parentheses.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
