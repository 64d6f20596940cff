"""What `tfdist run` was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh import Ssh
from pybackend.launchers.script.command import ScriptCommand
from pybackend.launchers.script.connection import AgentConnection, agent_here
from pybackend.launchers.script.ssh_connection import SshConnection, agent_there

HERE = "127.0.0.1"


@dataclass(frozen=True)
class HostRanks:
    """Some ranks on one host.

    Attributes
    ----------
    name
        Of the host, for messages.
    local_ranks, local_size
        Their numbers on the host, and how many are there in all.
    address
        Where the other ranks reach these; None: the address that ssh comes to.
    """

    name: str
    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    local_size: int
    address: str | None = HERE

    def command(self) -> list[str]:
        """The command that starts the agent there."""
        return agent_here()

    def connect(self) -> AgentConnection:
        """Start the agent there."""
        return AgentConnection(self.name, self.ranks, self.command())


@dataclass(frozen=True, kw_only=True)
class SshSite(HostRanks):
    """Some ranks on a host that ssh reaches, and the Python that runs them."""

    host: HostSlots
    ssh: Ssh
    python: str

    def command(self) -> list[str]:
        """See `HostRanks`."""
        return agent_there(self.ssh, self.host, self.python)

    def connect(self) -> AgentConnection:
        """See `HostRanks`."""
        return SshConnection(self.ssh, self.host, self.ranks, self.python)


@dataclass(frozen=True)
class ScriptRun:
    """A run of a script.

    Attributes
    ----------
    world_size
        Ranks of the gang, those of other drivers included.
    sites
        Hosts, and the ranks that this driver starts there.
    folder
        In which the script runs.
    variables
        What the user has set for all ranks.
    addresses
        ``host:port`` of every rank, if the user has chosen them; else ports are held.
    secret
        Of the gang, if other drivers start other ranks; else each start gets one of its own.
    """

    script: ScriptCommand
    world_size: int
    sites: tuple[HostRanks, ...]
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)
    grace: float = 10.0
    restarts: int = 0
    shown: frozenset[int] | None = None
    output: Path | None = None
