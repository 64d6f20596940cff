"""Checked options of `tfdist run`, and the environment variables of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pybackend.errors import InputError
from pybackend.job.arguments import is_variable_name
from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh import Ssh
from pybackend.launchers.package_files import run_here
from pybackend.launchers.script.connection import (
    AgentConnection,
    SshConnection,
    agent_there,
)
from pybackend.launchers.script.messages import ScriptCommand
from pybackend.net.rendezvous import new_token
from pybackend.tf_config import make_tf_config

HERE = "127.0.0.1"


@dataclass(frozen=True)
class HostRanks:
    """Ranks that run on one host.

    Attributes
    ----------
    name
        Name of the host, for messages.
    local_ranks, local_size
        The local ranks, and the number of ranks on the host.
    address
        Address of the host for other ranks; None: the address that ssh uses.
    """

    name: str
    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    local_size: int
    address: str | None = HERE

    def command(self) -> list[str]:
        """Return the command that starts the agent on the host."""
        return run_here("launchers.script.agent")

    def connect(self) -> AgentConnection:
        """Start the agent on the host."""
        return AgentConnection(self.name, self.ranks, self.command())


@dataclass(frozen=True, kw_only=True)
class SshSite(HostRanks):
    """Ranks on a host that is reachable by ssh, and the Python that runs them."""

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
        ``host:port`` of every rank, if the user chose them; otherwise, ports are reserved.
    secret
        Shared secret, if other drivers start other ranks; otherwise, each start gets a new one.
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


# Variables that `tfdist run` itself sets.
NAMES = frozenset(
    (
        "TF_CONFIG",
        "TFDIST_SECRET",
        "TFDIST_RESTART",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    )
)


def split_variable(text: str) -> tuple[str, str | None]:
    """Return the name and value in ``NAME=VALUE``; the value of ``NAME`` alone is None.

    Raises
    ------
    InputError
        The name is invalid, or `tfdist run` sets it itself.
    """
    name, equals, value = text.partition("=")
    if name in NAMES:
        raise InputError(f"--env {text}: tfdist sets it itself")
    if not is_variable_name(name):
        raise InputError(
            f"--env {text}: expected NAME=VALUE or NAME; a name consists of letters, digits and "
            "'_', and does not begin with a digit"
        )
    return name, value if equals else None


def choose_secret(plan: ScriptRun) -> str | None:
    """Return the secret for one start; None if several drivers on one machine share none."""
    return plan.secret if plan.addresses else new_token()


def variables_of(
    plan: ScriptRun, site: HostRanks, addresses: Sequence[str], secret: str | None, restart: int
) -> tuple[dict[str, str], ...]:
    """Return the variables of each rank of a site, including those that the user set."""
    common = {**plan.variables, "WORLD_SIZE": str(plan.world_size), "TFDIST_RESTART": str(restart)}
    if secret is not None:
        common["TFDIST_SECRET"] = secret
    return tuple(
        {
            **common,
            "TF_CONFIG": make_tf_config(addresses, rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(site.local_size),
        }
        for rank, local_rank in zip(site.ranks, site.local_ranks, strict=True)
    )
