"""A real ssh server on each of some hosts (`namespaces`), with temporary keys."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from conftest import wait_for
from namespaces import Host, Network, network, no_namespaces

_SSHD = "/usr/sbin/sshd"
# An empty folder that Debian creates when the machine's own server starts.
_RUN = Path("/run/sshd")
_SERVER = """
ListenAddress {host.address}
ListenAddress {host.address6}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv TMPDIR={folder}/tmp-{host.name} XDG_CACHE_HOME={folder}/cache-{host.name}
"""
_CLIENT = """
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  User root
"""


@dataclass(frozen=True)
class SshHosts:
    """Hosts with a server each; ``options`` are the options for ssh to reach them by name."""

    network: Network
    folder: Path
    servers: tuple[subprocess.Popen[bytes], ...]

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.network.hosts

    @property
    def options(self) -> list[str]:
        return ["-F", str(self.folder / "ssh_config")]

    def files(self) -> list[Path]:
        """List the hosts' folders for temporary files."""
        return [path for folder in self.folder.glob("tmp-*") for path in folder.iterdir()]

    def processes(self, host: int) -> dict[int, str]:
        """Return the command lines of a host's processes by id, without those of its server."""
        name = str(self.hosts[host].namespace)
        shown = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        found = {}
        for number in map(int, shown.stdout.split()):
            try:
                line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line and number != self.servers[host].pid:
                found[number] = line
        return found


def no_ssh_hosts() -> str:
    """Return the reason why there can be no hosts, or an empty text."""
    return no_namespaces() or ("" if Path(_SSHD).exists() else f"no {_SSHD}")


@contextmanager
def ssh_hosts(names: Sequence[str], folder: Path) -> Iterator[SshHosts]:
    """Create hosts of these names with a server each; needs the conditions of `no_ssh_hosts`."""
    with ExitStack() as stack:
        made = stack.enter_context(network(names))
        _make_keys(folder, made)
        _RUN.mkdir(mode=0o755, exist_ok=True)
        servers = tuple(_start(stack, folder, host) for host in made.hosts)
        for host, server in zip(made.hosts, servers, strict=True):
            wait_for(lambda host=host, server=server: _listens(host, server))
        yield SshHosts(made, folder, servers)


def _make_keys(folder: Path, made: Network) -> None:
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=60)
    key = (folder / "host_key.pub").read_text()
    places = [place for host in made.hosts for place in (host.address, host.address6)]
    (folder / "known_hosts").write_text("".join(f"{place} {key}" for place in places))
    aliases = "".join(f"Host {h.name}\n  HostName {h.address}\n" for h in made.hosts)
    (folder / "ssh_config").write_text(aliases + _CLIENT.format(folder=folder))


def _start(stack: ExitStack, folder: Path, host: Host) -> subprocess.Popen[bytes]:
    (folder / f"tmp-{host.name}").mkdir()
    config = folder / f"sshd_config-{host.name}"
    config.write_text(_SERVER.format(host=host, folder=folder))
    # The server must end when a test run is killed.
    mortal = ["setpriv", "--pdeathsig", "KILL", *host.enter]
    with (folder / f"sshd-{host.name}.log").open("wb") as log:
        process = subprocess.Popen([*mortal, _SSHD, "-D", "-e", "-f", str(config)], stderr=log)
    stack.callback(process.wait, timeout=60)
    stack.callback(process.terminate)
    return process


def _listens(host: Host, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "sshd has ended: see its log"
    try:
        socket.create_connection((host.address, 22), timeout=1).close()
    except OSError:
        return False
    return True
