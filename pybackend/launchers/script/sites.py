"""The hosts of a gang, and which ranks each has."""

from __future__ import annotations

from collections.abc import Sequence

from pybackend.errors import ClusterError, InputError
from pybackend.launchers.hosts.host_list import HostSlots, ranks_by_host
from pybackend.launchers.hosts.ssh import Ssh
from pybackend.launchers.script.plan import HERE, HostRanks, SshSite
from pybackend.net.rendezvous import own_address, split_address

THIS_MACHINE = "this machine"
_LOOPBACK = ("localhost", "ip6-localhost", "::1")


def site_here(size: int) -> HostRanks:
    """All ranks on this machine."""
    return HostRanks(THIS_MACHINE, tuple(range(size)), tuple(range(size)), size)


def site_by_hand(addresses: Sequence[str], index: int) -> HostRanks:
    """One rank on this machine, the others by other drivers; ``addresses`` of all, by rank."""
    hosts = [split_address(address)[0] for address in addresses]
    own = hosts[index]
    return HostRanks(THIS_MACHINE, (index,), (hosts[:index].count(own),), hosts.count(own))


def sites_of(
    hosts: Sequence[HostSlots], workers: int, ssh: Ssh, python: str
) -> tuple[HostRanks, ...]:
    """The ranks by host; ssh reaches all but ``localhost``, which is this machine.

    Raises
    ------
    InputError
        There are fewer slots than workers, or this machine has no address for another host.
    """
    placed = ranks_by_host(hosts, workers)
    others = [host for host, _ in placed if not is_loopback(host.name)]
    own = _address_here(others[0], ssh) if len(others) < len(placed) and others else HERE
    sites: list[HostRanks] = []
    for host, ranks in placed:
        numbers, size = tuple(range(len(ranks))), len(ranks)
        if is_loopback(host.name):
            sites.append(HostRanks(THIS_MACHINE, tuple(ranks), numbers, size, own))
        else:
            place = (host.name, tuple(ranks), numbers, size, None)
            sites.append(SshSite(*place, host=host, ssh=ssh, python=python))
    return tuple(sites)


def is_loopback(host: str) -> bool:
    """Whether a name or address always means the machine itself."""
    return host in _LOOPBACK or host.startswith("127.")


def _address_here(other: HostSlots, ssh: Ssh) -> str:
    """This machine's address for the other hosts."""
    try:
        address = own_address(ssh.address(other))
    except ClusterError as error:
        raise InputError(str(error)) from None
    if address is None or is_loopback(address):
        raise InputError(
            f"localhost has no address at which {other.name} would reach it: name this machine in "
            "--hosts as the others know it"
        )
    return address
