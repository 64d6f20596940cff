"""Hosts on one machine: network namespaces with their own addresses and names, on one bridge.

The test itself is in the root namespace, on the address of the bridge; nothing of it is reachable
from outside this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_ETC = Path("/etc/netns")  # `ip netns exec` shows these files instead of those of /etc


@dataclass(frozen=True)
class Host:
    """A host: its addresses, and its port of the bridge."""

    name: str
    address: str
    namespace: str | None = None
    port: str | None = None
    address6: str | None = None

    @property
    def seen_as(self) -> str:
        """Return the address by which other workers know it: loopback connections have one."""
        return self.address if self.namespace else "127.0.0.1"

    @property
    def enter(self) -> list[str]:
        """Return the prefix of a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


@dataclass(frozen=True)
class Network:
    """Hosts, and the test's own addresses, by which they reach it."""

    address: str
    address6: str
    hosts: tuple[Host, ...]

    @contextmanager
    def firewall(self, *hosts: int) -> Iterator[None]:
        """Cut the connections between these hosts; the test and all others still reach them."""
        with isolated(self.hosts[number] for number in hosts):
            yield


@contextmanager
def isolated(hosts: Iterator[Host] | Sequence[Host]) -> Iterator[None]:
    """Cut the connections between these hosts."""
    ports = [str(host.port) for host in hosts]
    try:
        for port in ports:
            run("bridge", "link", "set", "dev", port, "isolated", "on")
        yield
    finally:
        for port in ports:
            run("bridge", "link", "set", "dev", port, "isolated", "off")


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Create hosts that know each other by these names, and with "-6" by their IPv6 addresses.

    Needs root; `no_namespaces` returns the reason if it is not possible.
    """
    _remove_leftovers()
    # Several test runs may run at once.
    number, bridge = _free_number(), f"tfb{os.getpid()}"
    net, net6 = f"10.213.{number}", f"fd77:{number:x}:"
    with ExitStack() as stack:
        run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(run, "ip", "link", "del", bridge)
        run("ip", "address", "add", f"{net}.1/24", "dev", bridge)
        run("ip", "address", "add", f"{net6}:1/64", "dev", bridge, "nodad")
        run("ip", "link", "set", bridge, "up")
        hosts = tuple(
            Host(
                name,
                f"{net}.{11 + place}",
                f"tfdist-{os.getpid()}-{place}",
                f"{bridge}h{place}",
                f"{net6}:{11 + place}",
            )
            for place, name in enumerate(names)
        )
        known = "".join(f"{h.address} {h.name}\n{h.address6} {h.name}-6\n" for h in hosts)
        for host in hosts:
            _make(stack, bridge, host, f"127.0.0.1 localhost\n::1 localhost\n{known}")
        yield Network(f"{net}.1", f"{net6}:1", hosts)


def no_namespaces() -> str:
    """Return the reason why there can be no namespaces, or an empty text."""
    if os.geteuid() != 0:
        return "not root"
    if not shutil.which("ip") or not shutil.which("bridge"):
        return "no iproute2"
    name = f"tfdist-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        linked = ["ip", "link", "add", "tfprobe", "netns", name, "type", "bridge"]
        tried = subprocess.run(linked, capture_output=True, text=True)
        run("ip", "netns", "del", name)
    return tried.stderr.strip() if tried.returncode else ""


def run(*command: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run(command, check=True, timeout=60)


def _make(stack: ExitStack, bridge: str, host: Host, known: str) -> None:
    etc = _ETC / str(host.namespace)
    etc.mkdir(parents=True)
    stack.callback(shutil.rmtree, etc, ignore_errors=True)
    (etc / "hosts").write_text(known)
    run("ip", "netns", "add", str(host.namespace))
    stack.callback(run, "ip", "netns", "del", str(host.namespace))
    inside = ["name", "eth0", "netns", str(host.namespace)]
    run("ip", "link", "add", str(host.port), "type", "veth", "peer", *inside)
    # Removing a namespace removes its links later; removing the bridge's end takes effect at once.
    stack.callback(run, "ip", "link", "del", str(host.port))
    run("ip", "link", "set", str(host.port), "master", bridge, "up")
    for command in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{host.address}/24", "dev", "eth0"],
        ["address", "add", f"{host.address6}/64", "dev", "eth0", "nodad"],
        ["link", "set", "eth0", "up"],
    ):
        run(*host.enter, "ip", *command)


def _free_number() -> int:
    """Return a number that no other test run uses: process ids may have the same last digits."""
    shown = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True).stdout
    taken = {int(number) for number in re.findall(r" 10\.213\.(\d+)\.", shown)}
    # Not 0: ssh looks for the key of fd77:0::1 as that of fd77::1.
    wanted = (1 + n % 255 for n in range(os.getpid(), os.getpid() + 255))
    return next(number for number in wanted if number not in taken)


def _remove_leftovers() -> None:
    """Remove the leftovers of a killed test run, whose processes ended with it."""
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, owner in re.findall(r"^(tfdist-(\d+)-\w+)", named, re.MULTILINE):
        if not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "link", "del", f"tfb{owner}"], check=False, capture_output=True)
            shutil.rmtree(_ETC / name, ignore_errors=True)
