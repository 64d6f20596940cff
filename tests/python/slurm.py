"""A real Slurm: three nodes, each a network namespace with its own host name and processes.

All its files are in one folder, and its daemons end with the test run in any case. A node is a
tree of processes with a first one; killing that one looks like a power failure to the others.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import Host, network, no_namespaces

from pybackend.core.machine.janitor import swept_folder

# In Slurm's order; sorted as text, n2 would be the last one.
NODES = ("n2", "n10", "n11")
_CONTROLLER = "ctl"
_START_SECONDS = 120.0
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")

_SETTINGS = """\
ClusterName=tfdist
SlurmctldHost={controller.name}({controller.address})
SlurmctldPort=25100
SlurmdPort=25101
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=4
MessageTimeout=4
TCPTimeout=1
KillWait=3
SrunPortRange=25200-25299
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=4
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes
    ----------
    address
        Address of the test itself, by which nodes reach it.
    folder
        Contains all files of the daemons; nodes share it, like all files.
    """

    address: str
    hosts: Mapping[str, Host]
    folder: Path
    _nodes: dict[str, subprocess.Popen[bytes]]

    @property
    def private(self) -> Path:
        """Return a folder that nodes do not share with the test: each node has its own there."""
        return self.folder / "private"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment for Slurm's commands."""
        return {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    @property
    def entry(self) -> list[str]:
        """Return the words that run a command on the controller's host."""
        return _mortal(self.hosts[_CONTROLLER])

    def command(
        self, *words: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on the controller's host, on which srun may listen."""
        return subprocess.Popen(
            [*self.entry, *words],
            env={**os.environ, **self.variables, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, seconds: float = 60.0) -> str:
        """Run a command there, which must succeed; return its output."""
        process = self.command(*words)
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, f"{' '.join(words)}: {err}{out}"
        return out

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()

    def start(self, node: str) -> None:
        """Restart a killed node, and wait until Slurm uses it again."""
        self._nodes[node] = _daemon(self, self.hosts[node], "slurmd", "-N", node)
        _wait_for_nodes(self)

    def empty(self) -> None:
        """End all jobs, and wait until all nodes are idle."""
        self.run("scancel", "--user=root")
        _wait_for_nodes(self)


@contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Start the cluster; remove its processes, network and folder at the end."""
    with ExitStack() as stack:
        # Not a folder of pytest's: paths of sockets must be short.
        folder = stack.enter_context(swept_folder())
        made = stack.enter_context(network([_CONTROLLER, *NODES]))
        hosts = {host.name: host for host in made.hosts}
        cluster = Slurm(made.address, hosts, folder, {})
        stack.callback(_end, cluster._nodes)
        _write_settings(cluster)
        others = {"munged": _munge(cluster)}
        stack.callback(_end, others)
        others["slurmctld"] = _daemon(cluster, hosts[_CONTROLLER], "slurmctld", "-i")
        for node in NODES:
            cluster._nodes[node] = _daemon(cluster, hosts[node], "slurmd", "-N", node)
        _wait_for_nodes(cluster)
        yield cluster


def _find_obstacle() -> str:
    """Return the reason why there can be no Slurm here, or an empty text."""
    absent = [program for program in _PROGRAMS if not shutil.which(program)]
    return f"NO {', '.join(absent)}: RUN make setup" if absent else no_namespaces()


_OBSTACLE = _find_obstacle()
needs_slurm = pytest.mark.skipif(
    bool(_OBSTACLE) and os.environ.get("TFDIST_TEST_REQUIRE") != "1", reason=_OBSTACLE
)


def _write_settings(cluster: Slurm) -> None:
    machine = "CPUs=2 RealMemory=4000 State=UNKNOWN"
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={cluster.hosts[node].address} {machine}" for node in NODES
    )
    settings = _SETTINGS.format(
        controller=cluster.hosts[_CONTROLLER], folder=cluster.folder, nodes=nodes
    )
    (cluster.folder / "slurm.conf").write_text(settings)
    # To detect the version, slurmd would look for a mount that namespaces lack.
    (cluster.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (cluster.folder / "state").mkdir()
    cluster.private.mkdir()
    for node in NODES:
        (cluster.folder / f"spool-{node}").mkdir()


def _munge(cluster: Slurm) -> subprocess.Popen[bytes]:
    """Start the daemon that authenticates Slurm's processes; one serves all hosts."""
    key = cluster.folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {
        "socket": "munge.sock",
        "key-file": key.name,
        "log-file": "munge.log",
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
    }
    options = [f"--{option}={cluster.folder / name}" for option, name in files.items()]
    return _start(cluster, ["setpriv", "--pdeathsig", "KILL", "munged", "-F", "-f", *options])


def _daemon(cluster: Slurm, host: Host, *command: str) -> subprocess.Popen[bytes]:
    """Start a daemon as the child of a host's first process, a shell that adopts orphans."""
    script = 'mount -t tmpfs none "$1" && hostname "$2" && shift 2 && "$@" & wait'
    private = str(cluster.private)
    inside = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    shell = ["sh", "-c", script, "sh", private, host.name, command[0], "-D", *command[1:]]
    return _start(cluster, [*_mortal(host), *inside, *shell])


def _mortal(host: Host) -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", *host.enter]


def _start(cluster: Slurm, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with (cluster.folder / "daemons.log").open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **cluster.variables}
        )


def _end(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()


def _wait_for_nodes(cluster: Slurm) -> None:
    """Wait until all nodes are up and without a job."""
    deadline = time.monotonic() + _START_SECONDS
    shown = ""
    while shown.split() != ["idle"] * len(NODES):
        if time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in sorted(cluster.folder.glob("*.log"))]
            raise AssertionError("\n".join([f"the nodes are {shown!r}", *logs]))
        time.sleep(0.1)
        asked = cluster.command("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        shown = asked.communicate(timeout=_START_SECONDS)[0]
