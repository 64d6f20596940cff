"""ssh's command line, run against real servers on separate hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence

import pytest
from sshd import SshHosts, no_ssh_hosts, ssh_hosts

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.hosts.ssh import HostSlots, Ssh, environment

pytestmark = pytest.mark.skipif(bool(no_ssh_hosts()), reason="NO HOSTS WITH SSH")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(["a"], tmp_path_factory.mktemp("ssh")) as made:
        yield made


def call(ssh: Ssh, host: HostSlots, remote: Sequence[str]) -> tuple[int, str, list[str]]:
    """Return exit status, output, and lines of errors."""
    ended = subprocess.run(
        ssh.command(host, remote),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        start_new_session=True,
    )
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


def test_a_command_runs_there_word_by_word(there: SshHosts) -> None:
    words = ["printf", "%s.", "it's", "two words", '"', "$HOME", "*"]
    assert call(Ssh(tuple(there.options)), HostSlots("a"), words) == (
        0,
        "it's.two words.\".$HOME.*.",
        [],
    )


def test_the_address_is_the_one_that_ssh_uses(there: SshHosts) -> None:
    ssh = Ssh(tuple(there.options))
    assert ssh.address(HostSlots("a")) == there.hosts[0].address
    assert ssh.address(HostSlots("fd00::1", user="ann")) == "fd00::1"
    with pytest.raises(ClusterError, match="ssh does not accept its settings for a"):
        Ssh(("-F", "/nonexistent")).address(HostSlots("a"))


@pytest.mark.parametrize(
    ("host", "extra", "expected"),
    [
        ("a", ["-p", "23"], "Connection refused.*specify its port"),
        ("a", ["-o", "IdentityFile=none", "-F", "none"], "Host key verification failed.*accept it"),
        ("nowhere.invalid", [], "Could not resolve hostname.*spelling"),
        ("a", ["-l", "nobody"], "Permission denied.*ssh-copy-id"),
    ],
)
def test_failures_are_explained(
    there: SshHosts, host: str, extra: list[str], expected: str
) -> None:
    ssh = Ssh((*extra, *([] if "-F" in extra else there.options)))
    known = there.hosts[0].address if "-F" in extra else host
    status, _, printed = call(ssh, HostSlots(known), ["true"])
    assert status == 255
    with pytest.raises(ClusterError, match=rf"cannot reach {known} over ssh.*{expected}"):
        raise ssh.explain(HostSlots(known), printed)
