"""`tfdist run --hosts`: ranks on other hosts, behind real ssh servers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import full, python_without_blanks, wait_for
from namespaces import no_namespaces
from sshd import SshHosts, ssh_hosts

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.hosts.ssh import HostSlots
from pybackend.core.launchers.script import driver
from pybackend.core.launchers.script.driver import CaughtSignals, ScriptGroup, ScriptOutput
from pybackend.core.launchers.script.ranks import HostRanks, ScriptCommand, ScriptRun

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.skipif(bool(no_namespaces()), reason="NO NETWORK NAMESPACES"),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(["a", "b"], tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def start(there: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a script on the hosts; the hosts have the file, but not the test's variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def start_script(text: str, *options: str) -> subprocess.Popen[str]:
        head = "import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n"
        (tmp_path / "script.py").write_text(head + text)
        command = [sys.executable, "-m", "pybackend", "run", *options, "script.py", "it's"]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start_script


def options(there: SshHosts, hosts: str, *more: str) -> list[str]:
    return ["--hosts", hosts, "--ssh-options", shlex.join(there.options), *more]


def lines(text: str, rank: int) -> list[str]:
    return [line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] ")]


def nothing_is_left(there: SshHosts) -> bool:
    return not any(there.processes(host) for host in range(2))


PLACE = """
import pybackend, socket
config = __import__("json").loads(os.environ["TF_CONFIG"])
print(__import__("json").dumps([config["cluster"]["worker"], config["task"]["index"]]))
print(os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GIVEN"], sys.argv[1:])
secret = os.environ["TFDIST_SECRET"]
commands = [p.read_bytes() for p in __import__("pathlib").Path("/proc").glob("[0-9]*/cmdline")]
print(len(secret), "HIDDEN" in os.environ, any(secret.encode() in one for one in commands))
print(pybackend.__file__)
print("error", file=sys.stderr)
"""


@pytest.mark.full
def test_ranks_fill_the_hosts(there: SshHosts, start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HIDDEN", "this machine's")
    process = start(PLACE, *options(there, "a:2,b:2", "-w", "3", "--env", "GIVEN=x y"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    a, b = (host.address for host in there.hosts)
    for rank, place in enumerate(("0 2", "1 2", "0 1")):
        printed = lines(out, rank)
        addresses, index = json.loads(printed[0])
        assert [address.rpartition(":")[0] for address in addresses] == [a, a, b]
        assert index == rank
        assert printed[1] == f'{place} x y ["it\'s"]'
        assert printed[2] == "64 False False"
        assert not printed[3].startswith(str(Path(__file__).parents[2]))
        assert not Path(printed[3]).exists()
        assert lines(err, rank) == ["error"]
    wait_for(lambda: nothing_is_left(there))


@pytest.mark.parametrize("first", ["localhost", full("a-6")])
def test_addresses_are_those_that_ssh_has_reached(first: str, there: SshHosts, start: Any) -> None:
    a, b = there.hosts
    names = {"localhost": f"localhost,{b.name}", "a-6": f"[{a.address6}],[{b.address6}]"}[first]
    seen = {"localhost": there.network.address, "a-6": f"[{a.address6}]"}[first]
    text = "import socket\nprint(os.environ['TF_CONFIG'], os.environ['LOCAL_WORLD_SIZE'])"
    process = start(text, *options(there, names))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    config = json.loads(lines(out, 1)[0].rpartition(" ")[0])
    own, other = (host.rpartition(":")[0] for host in config["cluster"]["worker"])
    assert own == seen
    assert other == (b.address if first == "localhost" else f"[{b.address6}]")


@pytest.mark.full
def test_a_failure_ends_all_hosts(there: SshHosts, start: Any) -> None:
    text = "if RANK == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)"
    process = start(text, *options(there, "a,b"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGSEGV
    assert "rank 1 on b was killed by SIGSEGV" in err.splitlines()[-1]
    wait_for(lambda: nothing_is_left(there))


WAITING = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
os.write(1, os.environ["PYTHONPATH"].encode() + b"\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "guard", *map(full, ("SIGINT", "sshd", "agent"))])
def test_nothing_is_left_on_any_host(how: str, there: SshHosts, start: Any) -> None:
    process = start(WAITING, *options(there, "a,b", "--grace", "0.1"))
    folders = [Path(process.stdout.readline()[4:-1]).parent for _ in range(2)]
    assert all(folder.is_dir() for folder in folders)
    if how.startswith("SIG"):
        process.send_signal(signal.Signals[how])
    else:
        name = "sshd" if how == "sshd" else "exec(base64"
        victims = sorted(p for p, line in there.processes(1).items() if name in line)
        os.kill(victims[-1 if how == "agent" else 0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    expected = {"SIGINT": 130, "SIGKILL": -signal.SIGKILL}.get(how, 1)
    assert process.returncode == expected, err
    if expected == 1:
        lost = "the ssh connection to its host ended" if how == "sshd" else "the process that runs "
        assert f"rank 1 on b was lost: {lost}" in err.splitlines()[-1]
    wait_for(lambda: nothing_is_left(there))
    wait_for(lambda: not any(folder.exists() for folder in folders))


@pytest.mark.parametrize(
    ("hosts", "more", "named"),
    [
        full("a,b", ["--cwd", "/nonexistent"], "there is no folder /nonexistent"),
        full("a,b", ["--env", "TMPDIR=/none"], "TMPDIR is /none, but "),
        ("a,b", ["--cwd", "/"], "there is no file /script.py: the script must be at the same"),
        (
            "a,b",
            ["--python", "/nonexistent/python"],
            "has no Python at /nonexistent",
        ),
        ("a,nowhere.invalid", [], "cannot reach nowhere.invalid over ssh"),
        ("a:1,b:1", ["-w", "3"], "2 slots"),
    ],
)
def test_what_cannot_start_is_named(
    hosts: str, more: list[str], named: str, there: SshHosts, start: Any
) -> None:
    process = start("", *options(there, hosts, *more))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert named in err
    assert "Traceback" not in err
    wait_for(lambda: nothing_is_left(there))


# Greets as `bootstrap` does, and then reads nothing more.
DEAF_SSH = f"""#!{python_without_blanks()}
import os, pathlib, select, signal
machine = '{{"cores": 1, "memory": 1, "gpus": []}}'
greeting = '{{"version": [3, 11, 0], "python": "p", "missing": [], "machine": ' + machine + '}}'
print('tfdist ' + greeting, flush=True)
select.select([0], [], [])
pathlib.Path(os.environ["MARK"]).touch()
signal.alarm(600)  # at the latest
signal.pause()
"""


def test_a_host_that_takes_nothing_in_does_not_hold_up_signals(
    start: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    ssh, mark = tmp_path / "ssh", tmp_path / "mark"
    ssh.write_text(DEAF_SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MARK", str(mark))
    process = start("", "--hosts", "deaf")
    try:
        wait_for(mark.exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_an_agent_that_never_starts_its_ranks_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    ssh, mark = tmp_path / "ssh", tmp_path / "mark"
    ssh.write_text(DEAF_SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MARK", str(mark))
    monkeypatch.setattr(driver, "_START_SECONDS", 1.0)
    script = ScriptCommand("python", "script.py", ())
    site = HostRanks("deaf", (0, 1), None, HostSlots("deaf"))
    plan = ScriptRun(script, 2, (site,), str(tmp_path), python=sys.executable)
    said = "^no response from deaf within 1 s: check whether you can log in there"
    with CaughtSignals() as signals, pytest.raises(ClusterError, match=said):
        ScriptGroup(plan, 0, ScriptOutput(), signals).run()


def test_a_dry_run_shows_ssh_and_reaches_nobody(there: SshHosts, start: Any) -> None:
    process = start("", *options(there, "no-host:2,[fd00::1]:1", "--dry-run"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "agent on no-host, started with: " in out
    assert f"-F {there.folder}/ssh_config" in out
    assert "rank 2 of 3 on fd00::1 (local rank 0 of 1):" in out
