"""Checked options of `tfdist run`."""

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
        Name of the host, for messages.
    local_ranks, local_size
        Their local ranks, and the number of ranks on the host.
    address
        Address of the host for other ranks; None: the address that ssh uses.
    """

    name: str
    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    local_size: int
    address: str | None = HERE

    def command(self) -> list[str]:
        """Return the command that starts the agent there."""
        return agent_here()

    def connect(self) -> AgentConnection:
        """Start the agent there."""
        return AgentConnection(self.name, self.ranks, self.command())


@dataclass(frozen=True, kw_only=True)
class SshSite(HostRanks):
    """Some ranks on a host that is reachable by ssh, and the Python that runs them."""

    host: HostSlots
    ssh: Ssh
    python: str

    def command(self) -> list[str]:
        return agent_there(self.ssh, self.host, self.python)

    def connect(self) -> AgentConnection:
        return SshConnection(self.ssh, self.host, self.ranks, self.python)


@dataclass(frozen=True)
class ScriptRun:
    """A run of a script.

    Attributes
    ----------
    world_size
        Number of ranks, including those of other drivers.
    sites
        Hosts, and the ranks that this driver starts there.
    folder
        Working directory of the script.
    variables
        Variables that the user set for all ranks.
    addresses
        ``host:port`` of every rank, if the user chose them; else ports are reserved.
    secret
        Shared secret, if other drivers start other ranks; else each start gets a new one.
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
