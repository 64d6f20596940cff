"""Rank of this process among several: set by `join`, or by TF_CONFIG, srun or mpirun."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import name_arguments
from pybackend.core.launchers.slurm import commands
from pybackend.core.machine import is_loopback
from pybackend.core.machine.processes import read_stat, read_variables
from pybackend.core.net.authentication import FILE_VARIABLE, VARIABLE
from pybackend.core.net.rendezvous import pick_port, split_address
from pybackend.core.tf_config import make_tf_config, names_cluster, read_tf_config


@dataclass(frozen=True)
class Place:
    """Rank of a process, and the addresses at which processes connect.

    Attributes
    ----------
    rank, size
        Its rank, from 0, and the number of processes.
    meeting
        ``host:port`` on which the first process listens, and to which the others connect.
    own
        ``host:port`` on which this process listens; None: the system chooses the port.
    source
        Source of these values, for messages: ``"TF_CONFIG"``, ``"srun"``, ``"mpirun"``.
    peers
        Hosts or addresses of all processes, by rank, for messages; empty if unknown.
    local_rank, local_size
        Its rank among the processes on its machine, and how many there are.
    """

    rank: int
    size: int
    meeting: str
    own: str | None
    source: str
    peers: tuple[str, ...] = ()
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_one_machine(self) -> bool:
        """True if all processes connect over the loopback interface."""
        return all(is_loopback(split_host(peer)) for peer in {self.meeting, *self.peers})

    def name(self, rank: int) -> str:
        where = f" ({self.peers[rank]})" if self.peers else ""
        return f"worker {rank}{where}"


def split_host(address: str) -> str:
    """Return the host of ``host:port``, or of a host alone."""
    return split_address(address)[0] if ":" in address else address


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@name_arguments
def join(addresses: Sequence[str] | str, index: int, *, secret_file: str | None = None) -> None:
    """Make this process one of several that train together and that you start yourself.

    Call it in every process with the same addresses. Then call `barrier_train` or a similar
    function with None as its first argument. All processes must make the same call. They can start
    in any order. They connect to the first address and train, and each gets the result. `join` sets
    TF_CONFIG (and TFDIST_SECRET_FILE) in this process's environment; setting these variables
    yourself has the same effect.

    Parameters
    ----------
    addresses
        ``host:port`` of every process, in the same order everywhere, as a list or separated by
        commas. Each process listens on its own address.
    index
        Index of this process in the addresses, from 0.
    secret_file
        File with the shared secret, made by `tfdist secret`. None (default): TFDIST_SECRET or
        TFDIST_SECRET_FILE, or ``~/.config/tfdist/secret``. Not needed on the loopback interface.

    Raises
    ------
    ClusterError, InputError
        An address is invalid. The message names it and the fix.
    """
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    config = make_tf_config(listed, index)
    if secret_file is not None:
        path = os.path.abspath(os.path.expanduser(secret_file))
        if not os.path.exists(path):
            raise InputError(
                f"`secret_file` is {path}, which does not exist: `tfdist secret` creates one"
            )
        os.environ.pop(VARIABLE, None)  # which has precedence
        os.environ[FILE_VARIABLE] = path
    os.environ["TF_CONFIG"] = config


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the `Place` of this process, from TF_CONFIG, srun or mpirun; None: it is the only one.

    `ClusterError` or `InputError` if the environment variables are invalid.
    """
    text = environment.get("TF_CONFIG", "")
    if names_cluster(text):
        return _of_tf_config(text)
    # In an allocation, processes of mpirun also have Slurm's variables, but of its daemons.
    return find_mpi_place(environment) or find_slurm_place(environment)


def _of_tf_config(text: str) -> Place | None:
    try:
        spec = read_tf_config(text)
    except ClusterError as error:
        raise ClusterError(
            f'{error}. To train on this machine alone, pass "local", or unset TF_CONFIG'
        ) from error
    if spec.rank is None:
        raise InputError(
            f"TF_CONFIG specifies that this process is {spec.role} {spec.index}: only the chief "
            'and the workers train. To train on this machine alone, pass "local"'
        )
    if spec.world_size == 1:
        return None
    listed = [*spec.cluster.get("chief", {}).values(), *spec.cluster.get("worker", {}).values()]
    rank, size = spec.rank, len(listed)
    if size < spec.world_size:
        raise InputError(
            f"TF_CONFIG lists the addresses of only {size} of {spec.world_size} processes: list "
            "all of them"
        )
    hosts = list(map(split_host, listed))
    local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Place(rank, size, listed[0], spec.address, "TF_CONFIG", tuple(listed), *local)


# With mpirun.

# Rank and size, among all processes and among those of a machine: first of Open MPI, then of MPICH,
# Intel MPI and others with Hydra.
_NAMES = (
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
)
# As in /proc/PID/environ, which has the variables of a process's start.
_RANK_MARKS = tuple(f"{names[0]}=".encode() for names in _NAMES)


def find_mpi_place(environment: Mapping[str, str]) -> Place | None:
    """Return the `Place` of a process among those of its ``mpirun``; None: it is the only one.

    `InputError` if they are on several hosts, and the address of the first one is not set.
    """
    if _is_of_srun(environment):
        return None
    for names in _NAMES:
        if names[0] in environment and int(environment.get(names[1], "1")) > 1:
            pairs = zip(names, ("0", "1", "0", "1"), strict=True)
            rank, size, *local = (int(environment.get(*pair)) for pair in pairs)
            meeting = _find_meeting(environment, local[1] == size)
            return Place(rank, size, meeting, None, "mpirun", (), *local)
    return None


def _is_of_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process with MPI's variables, as ``srun --mpi=pmi2`` does.

    In an allocation, mpirun uses srun to start its daemons, so their processes have the variables
    of both; only mpirun's apply to them.
    """
    known = [environment.get(name) for name in ("PMI_RANK", "PMI_SIZE")]
    slurms = [environment.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    return None not in known and known == slurms


def _find_meeting(environment: Mapping[str, str], is_one_machine: bool) -> str:
    """Return the address of the first process, which MPI does not provide."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        return join_address(host, port)
    if is_one_machine:
        # Common to all processes of one mpirun, and different for another one.
        job = environment.get("PMIX_NAMESPACE") or _name_starter()
        name = f"{job} on {socket.gethostname()}"
        return f"127.0.0.1:{pick_port(zlib.crc32(name.encode()))}"
    raise InputError(
        "mpirun started processes on several hosts, but does not provide the address of the first "
        "one: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on it, e.g. "
        "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
    )


def _name_starter() -> str:
    """Identify the process that started all ranks; its descendants are ranks or wrappers."""
    pid = os.getppid()
    try:
        while _is_rank(pid):
            pid = read_stat(pid).parent
        return f"{pid} since {read_stat(pid).started}"
    except OSError:  # not Linux
        return str(pid)


def _is_rank(pid: int) -> bool:
    """Return whether a process has the variables of a rank; wrapper scripts have them, too."""
    try:
        variables = read_variables(pid)
    except PermissionError:  # another user's, such as a system daemon
        return False
    return any(variable.startswith(_RANK_MARKS) for variable in variables)


# With srun.


def find_slurm_place(environment: Mapping[str, str]) -> Place | None:
    """Return the `Place` of a process among the tasks of its job step.

    None outside ``srun``, as in a batch script, and in a step of one task, as in ``srun --pty
    bash``. `ClusterError` if the host of the first task cannot be found from the step's variables.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_PROCID" not in environment:
        return None
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        size=int(environment["SLURM_STEP_NUM_TASKS"]),
        meeting=f"{commands.first_host(environment)}:{commands.step_port(environment)}",
        own=None,
        source="srun",
        peers=_find_peers(environment),
        local_rank=int(environment.get("SLURM_LOCALID") or 0),
        local_size=commands.count_local(environment),
    )


def _find_peers(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the node of each task; empty if Slurm's variables do not determine it."""
    # Other parts concern the sockets and cores of a node, or the number of tasks per node.
    words = re.split("[:,]", environment.get("SLURM_DISTRIBUTION") or "block")
    nodes, counts = commands.tasks_by_node(environment)
    if words[0] not in ("block", "cyclic") or len(nodes) != len(counts):
        return ()
    peers = commands.hosts_by_rank(environment)
    if words[0] == "cyclic":
        rounds = range(max(counts))
        peers = tuple(n for r in rounds for n, c in zip(nodes, counts, strict=True) if r < c)
    rank, own = int(environment["SLURM_PROCID"]), int(environment.get("SLURM_NODEID") or 0)
    is_certain = len(peers) == int(environment["SLURM_STEP_NUM_TASKS"])
    return peers if is_certain and peers[rank : rank + 1] == (nodes[own],) else ()
