"""`tfdist run`: scripts that are started once per rank, on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import marked_processes, wait_for

from pybackend.cli import main

pytestmark = pytest.mark.launcher
COMMAND = (sys.executable, "-m", "pybackend", "run")


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    """Reset the signals that nohup ignored, which started processes would ignore, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a script that has `os`, `sys`, `time`, `RANK`; the test runs in its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # without the user's secret
    head = "import os, signal, subprocess, sys, time\nRANK = int(os.environ['RANK'])\n"

    def write_script(text: str, name: str = "script.py") -> str:
        Path(name).write_text(text if name.endswith(".R") else head + text)
        return name

    return write_script


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **variables},
    )


def lines(text: str, rank: int) -> list[str]:
    """Return the output of a rank."""
    return [line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] ")]


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run in the background, and end it with the test."""
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def await_lines(process: subprocess.Popen[str], *expected: str) -> None:
    """Read the run's output until each of these lines was found."""
    assert process.stdout is not None
    missing = set(expected)
    while missing:
        line = process.stdout.readline()
        assert line, f"the run has ended without {missing}"
        missing.discard(line.rstrip("\n"))


def has_pending_signals(pid: int) -> bool:
    """Return whether a process has not yet handled a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(found, 16) for found in re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", status, re.M))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Set a text in the environment of all processes of this test."""
    monkeypatch.setenv("TFDIST_TEST_MARK", str(tmp_path))
    return f"TFDIST_TEST_MARK={tmp_path}"


def test_each_rank_finds_its_place(write: Any) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TFDIST_RESTART"]
    write(
        f"print(*[os.environ[name] for name in {names}])\n"
        "print(os.environ['TF_CONFIG'])\n"
        "print(os.environ['TFDIST_SECRET'])\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "print(sys.argv[1:], file=sys.stderr)\n"
    )
    gpus = ("--env", "CUDA_VISIBLE_DEVICES=4,5,6")
    shown = run("-w", "3", *gpus, "script.py", "-w", "7", "--", "x")
    assert shown.returncode == 0
    printed = [lines(shown.stdout, rank) for rank in range(3)]
    places = [f"{rank} 3 {rank} 3 0" for rank in range(3)]
    assert [one[0] for one in printed] == places
    configs = [json.loads(one[1]) for one in printed]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    (addresses,) = {tuple(config["cluster"]["worker"]) for config in configs}
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    (secret,) = {one[2] for one in printed}
    assert len(secret) == 64
    cores = max(1, (os.cpu_count() or 1) // 3)
    assert [one[3] for one in printed] == [f"{cores} {4 + rank}" for rank in range(3)]
    assert [lines(shown.stderr, rank) for rank in range(3)] == [["['-w', '7', '--', 'x']"]] * 3


def test_the_ports_are_held_for_the_rank(write: Any) -> None:
    write(
        "import json, socket\n"
        "own = json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][RANK].rpartition(':')\n"
        "address = own[0], int(own[2])\n"
        "try:\n"
        "    socket.socket().bind(address)\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
        "server = socket.socket()\n"
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "server.bind(address)\n"
        "server.listen()\n"
        "print('listens')"
    )
    assert run("-w", "1", "script.py").stdout == "[0] 98\n[0] listens\n"


def test_ranks_that_start_workers_of_their_own_are_told_once_how_to_train_together(
    write: Any,
) -> None:
    write(
        "from pybackend import barrier_run\n"
        "for _ in range(2):\n"
        "    print(barrier_run('local', lambda context: context.world_size, workers=1))"
    )
    shown = run("-w", "2", "script.py")
    assert lines(shown.stdout, 0) == [
        "note: 'local' starts workers for this process only. This is one of 2 processes "
        "(TF_CONFIG), and each that makes this call does the whole work: to work together, pass "
        "None as the first argument",
        "[1]",
        "[1]",
    ]
    assert lines(shown.stdout, 1) == ["[1]", "[1]"]


def test_a_module_and_an_r_file(write: Any) -> None:
    write("print('module', RANK, sys.argv[1:])", "part.py")
    write("cat('R', Sys.getenv('RANK'), commandArgs(TRUE), '\\n')", "script.R")
    shown = run("-w", "2", "-m", "part", "--lr", "3")
    assert sorted(shown.stdout.splitlines()) == [
        f"[{rank}] module {rank} ['--lr', '3']" for rank in range(2)
    ]
    shown = run("-w", "2", "script.R", "--lr", "3")
    assert sorted(shown.stdout.splitlines()) == [f"[{rank}] R {rank} --lr 3 " for rank in range(2)]


def test_lines_stay_whole(write: Any) -> None:
    write(
        "for number in range(200):\n"
        "    for part in ('a' * 500, 'b' * 500, '\\n'):\n"
        "        os.write(1, part.encode())\n"
        "os.write(1, b'c' * 200_000 + b'\\n')\n"
        "for percent in range(101):\n"
        "    os.write(2, b'%d%%\\r' % percent)\n"
        "os.write(2, b'\\ndone\\xff')\n"
    )
    shown = subprocess.run([*COMMAND, "-w", "2", "script.py"], capture_output=True, timeout=120)
    found = shown.stdout.split(b"\n")
    assert {line[4:] for line in found if b"a" in line} == {b"a" * 500 + b"b" * 500}
    assert sum(line.count(b"a" * 500) for line in found) == 400
    assert all(line[:4] in (b"[0] ", b"[1] ") for line in found[:-1])
    assert sum(line.count(b"c") for line in found) == 400_000
    for rank in (b"[0] ", b"[1] "):
        drawn = [line[4:] for line in shown.stderr.splitlines() if line.startswith(rank)]
        assert drawn[-2:] == [b"100%", b"done\xff"]
        assert len(drawn) < 20


def test_files_and_ranks_that_are_shown(write: Any, tmp_path: Path) -> None:
    write(
        "print('out', RANK, flush=True); print('err', RANK, file=sys.stderr)\n"
        "if RANK == 0: open('done', 'w')\n"
        "while not os.path.exists('done'): time.sleep(0.01)\n"  # rank 1 ends the group
        "sys.exit(RANK)\n"
    )
    shown = run("-w", "2", "--show", "0", "--output-dir", "logs", "script.py")
    assert shown.returncode == 1
    assert shown.stdout == "[0] out 0\n"
    assert [path.name for path in sorted(Path("logs").iterdir())] == [
        f"{rank}.{stream}" for rank in range(2) for stream in ("err", "out")
    ]
    assert Path("logs/1.out").read_text() == "out 1\n"
    assert Path("logs/1.err").read_text() == "err 1\n"
    assert f"see {tmp_path}/logs/1.err" in shown.stderr
    assert "--show 1" in run("-w", "2", "--show", "0", "script.py").stderr


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 on this machine ended with exit status 3"),
        ("raise ValueError('bad')", 1, "exit status 1"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "SIGKILL; the other ranks were ended. It was",
        ),
        ("os.abort()", 134, "SIGABRT"),
    ],
)
def test_the_first_failure_ends_the_group(end: str, status: int, said: str, write: Any) -> None:
    write(f"if RANK == 1:\n    {end}\ntime.sleep(600)")
    shown = run("-w", "3", "script.py")
    assert shown.returncode == status
    assert said in shown.stderr.splitlines()[-1]


def test_what_does_not_end_by_sigterm_is_killed(write: Any, mark: str) -> None:
    write(
        "if RANK == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists('ready'):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    assert run("-w", "2", "--grace", "0.2", "script.py").returncode == 5
    assert marked_processes(mark) == []


def test_a_rank_that_was_stopped_is_named(write: Any) -> None:
    write(
        "if RANK == 1:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    sys.exit()\n"
        "print('waits', flush=True)\n"
        "while os.path.exists('waits'):\n"
        "    time.sleep(0.05)\n"
    )
    Path("waits").touch()
    with started("-w", "2", "script.py") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"\[1\] tfdist: process (\d+) was stopped by a signal; (.*)\n", line)
        assert found, line
        assert found[2] == f"`kill -CONT {found[1]}` resumes it"
        os.kill(int(found[1]), signal.SIGCONT)
        Path("waits").unlink()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_a_restart_has_new_ports_and_a_new_secret(write: Any) -> None:
    write(
        "print(os.environ['TFDIST_RESTART'], os.environ['TFDIST_SECRET'])\n"
        "sys.exit(os.environ['TFDIST_RESTART'] != '2')"
    )
    shown = run("-w", "1", "--max-restarts", "5", "--output-dir", "logs", "script.py")
    assert shown.returncode == 0
    numbers, secrets = zip(*(line.split() for line in lines(shown.stdout, 0)), strict=True)
    assert numbers == ("0", "1", "2")
    assert len(set(secrets)) == 3
    assert Path("logs/0.out").read_text().count("\n") == 3
    assert "Restart 1 of 5" in shown.stderr
    assert "Restart 2 of 5" in shown.stderr
    assert "Restart 3" not in shown.stderr


def test_a_dry_run_starts_nothing(write: Any) -> None:
    write("open('started', 'w')")
    shown = run("-w", "2", "--env", "A=b c", "--dry-run", "script.py", "it's", TFDIST_SECRET="own")
    assert shown.returncode == 0
    assert not Path("started").exists()
    assert "own" not in shown.stdout
    assert shown.stdout.count("export TFDIST_SECRET='<secret>'") == 2
    assert shown.stdout.count("export A='b c'") == 2
    assert "rank 1 of 2 on this machine" in shown.stdout
    assert f"{shlex.quote(sys.executable)} -u script.py 'it'\"'\"'s'" in shown.stdout


def test_a_full_disk_ends_no_training(write: Any) -> None:
    Path("logs").mkdir()
    Path("logs/0.out").symlink_to("/dev/full")
    write("print('one'); print('two')")
    shown = run("-w", "1", "--output-dir", "logs", "script.py")
    assert (shown.returncode, shown.stdout) == (0, "[0] one\n[0] two\n")
    assert shown.stderr.count("No space left") == 1


def test_variables_and_the_folder(write: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("print(os.environ['A'], os.environ['B'], os.getcwd())", "sub/script.py")
    shown = run("-w", "1", "--env", "A=x=y", "--env", "B", "--cwd", "sub", "script.py", B="passed")
    assert shown.stdout == f"[0] x=y passed {tmp_path}/sub\n"


WAITING = """
def say(number, frame):
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, say)
print("ready", flush=True)
while True:
    time.sleep(600)
"""


def test_a_second_interrupt_does_not_wait_for_the_grace(write: Any, mark: str) -> None:
    write("signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n" + WAITING)
    with started("-w", "1", "--grace", "600", "script.py") as process:
        await_lines(process, "[0] ready")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: not has_pending_signals(process.pid))
        process.send_signal(signal.SIGINT)  # the same signal: `timeout` sends it twice
        await_lines(process, "[0] no")
        threading.Event().wait(1.5)  # a signal more than a second later is another one
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert marked_processes(mark) == []


def test_an_interrupt_before_the_ranks_are_started(write: Any, mark: str) -> None:
    write("")
    with socket.create_server(("127.0.0.1", 0)) as server:  # it does not print that it is ssh
        options = f"-o HostName=127.0.0.1 -p {server.getsockname()[1]}"
        with started("--hosts", "silent", "--ssh-options", options, "script.py") as process:
            server.accept()[0].detach()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "tfdist: ended by SIGINT before a rank was started\n"
    assert marked_processes(mark) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on(number: signal.Signals, status: int, write: Any, mark: str) -> None:
    write(WAITING)
    with started("-w", "2", "--max-restarts", "3", "script.py") as process:
        await_lines(process, "[0] ready", "[1] ready")
        for name in ("SIGUSR1", "SIGUSR2", "SIGHUP"):
            process.send_signal(signal.Signals[name])
            await_lines(process, f"[0] {name}", f"[1] {name}")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"ended by {number.name}" in err.splitlines()[-1]
    assert marked_processes(mark) == []


def test_what_nohup_has_ignored_stays_ignored(write: Any) -> None:
    write("print(signal.getsignal(signal.SIGHUP).name)")
    command = ["nohup", *COMMAND, "-w", "1", "script.py"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.stdout == "[0] SIG_IGN\n"


def test_a_rank_may_end_well_after_sigterm(write: Any) -> None:
    write(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with started("-w", "2", "script.py") as process:
        await_lines(process, "[0] ready", "[1] ready")
        process.terminate()
        await_lines(process, "[0] saved", "[1] saved")
        process.communicate(timeout=60)
    assert process.returncode == 0


IGNORING = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
# A rank starts a daemon: a process in its own session, whose parent has ended.
DAEMON = """
daemon = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nos.write(1, b'there\\\\n')"
subprocess.run([sys.executable, "-c", daemon + "\\ntime.sleep(600)"])
os.write(1, b"ready\\n")  # in one piece, unlike print: both write to one pipe
"""


@pytest.mark.parametrize("victim", ["driver", "agent"])
def test_nothing_is_left_when_one_is_killed(victim: str, write: Any, mark: str) -> None:
    write(IGNORING + DAEMON + "time.sleep(600)")
    with started("-w", "2", "script.py") as process:
        await_lines(process, "[0] ready", "[1] ready", "[0] there", "[1] there")
        agents = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid if victim == "driver" else int(agents[0]), signal.SIGKILL)
        process.wait(timeout=60)
        wait_for(lambda: marked_processes(mark) == [])
    assert process.returncode == (-signal.SIGKILL if victim == "driver" else 1)


def test_daemons_end_with_a_group_that_ends_well(write: Any, mark: str) -> None:
    write(DAEMON)
    assert run("-w", "2", "script.py").returncode == 0
    assert marked_processes(mark) == []


def test_what_a_shell_has_started_before_is_left_alone(write: Any) -> None:
    write("")
    shell = f"sleep 600 >/dev/null & echo $!; exec {shlex.join(COMMAND)} -w 1 script.py"
    shown = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True, timeout=120)
    os.kill(int(shown.stdout), signal.SIGKILL)  # an error if it has ended
    assert shown.returncode == 0


@pytest.mark.parametrize("how", ["a signal", "a failure"])
def test_what_prints_without_a_pause_can_be_ended(how: str, write: Any, mark: str) -> None:
    fails = "signal.pause() if RANK == 1 else None\n"
    if how == "a failure":
        fails = "if RANK == 1:\n    time.sleep(0.5)\n    sys.exit(3)\n"
    write(f"print('ready', flush=True)\n{fails}while True:\n    os.write(1, b'more\\n' * 10000)")
    with started("-w", "2", "script.py") as process:
        await_lines(process, "[0] ready", "[1] ready")
        if how == "a signal":
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (143 if how == "a signal" else 3)
    assert err.splitlines()[-1].startswith(
        "tfdist: ended by SIGTERM"
        if how == "a signal"
        else "tfdist: rank 1 on this machine ended with exit status 3"
    )
    assert marked_processes(mark) == []


def test_a_reader_that_leaves_ends_the_group(write: Any, mark: str) -> None:
    write("while True:\n    print('more')")
    with started("-w", "1", "script.py") as process:
        await_lines(process, "[0] more")
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141
    assert marked_processes(mark) == []


def test_ranks_wait_for_a_reader_that_pauses(write: Any) -> None:
    write(
        "for number in range(10**9):\n"
        "    os.write(1, b'x' * 65535 + b'\\n')\n"
        "    os.truncate('printed', number + 1)\n"
    )
    printed = Path("printed")
    printed.touch()

    def rests() -> bool:
        before = printed.stat().st_size
        threading.Event().wait(0.5)
        return 0 < before == printed.stat().st_size

    with started("-w", "1", "script.py") as process:
        wait_for(rests)
        assert printed.stat().st_size < 500
        before = printed.stat().st_size
        assert process.stdout is not None
        while printed.stat().st_size == before:
            process.stdout.read(65536)


def by_hand(index: int, addresses: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("--index", f"{index}", "--addresses", addresses, "script.py", **variables)


def test_one_rank_by_hand(write: Any, tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TF_CONFIG"]
    write(f"print([os.environ.get(name) for name in {names}], os.environ.get('TFDIST_SECRET'))")
    (tmp_path / "secret").write_text("what all ranks share\n")
    (tmp_path / "secret").chmod(0o600)
    shown = by_hand(2, "a:1,b:2,b:3", TFDIST_SECRET_FILE=str(tmp_path / "secret"))
    assert shown.stdout.startswith("[0]") is False
    assert '\'3\', \'1\', \'2\', \'{"cluster": {"worker": ["a:1", "b:2", "b:3"]' in shown.stdout
    assert shown.stdout.endswith("what all ranks share\n")
    assert by_hand(0, '["127.0.0.1:1", "[::1]:2"]').stdout.endswith("None\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["script.py"], "-w"),
        (["-w", "2"], "specify a script"),
        (["-w", "0", "script.py"], "--workers"),
        (["-w", "1", "missing.py"], "missing.py"),
        (["-w", "1", "--cwd", "missing", "script.py"], "missing"),
        (["-w", "1", "--grace", "-1", "script.py"], "--grace"),
        (["-w", "1", "--grace", "nan", "script.py"], "--grace"),
        (["-w", "1", "--max-restarts", "-1", "script.py"], "--max-restarts"),
        (["-w", "1", "--show", "1", "script.py"], "--show"),
        (["-w", "1", "--env", "RANK=1", "script.py"], "RANK"),
        (["-w", "1", "--env", "NOT_SET_HERE", "script.py"], "NOT_SET_HERE"),
        (["-w", "1", "--env", "=x", "script.py"], "--env"),
        (["-w", "1", "--env", "1A=x", "script.py"], "--env 1A=x"),
        (["-w", "1", "--env", "TMPDIR=/none", "script.py"], "TMPDIR is /none"),
        (["-w", "1", "train.sh"], "train.sh is neither a Python file nor an R file"),
        (["--hosts", "a:x", "script.py"], "'a:x'"),
        (["--hosts", "a", "--hostfile", "f", "script.py"], "--hostfile"),
        (["--hostfile", "missing", "script.py"], "'missing'"),
        (["--hosts", "a", "--ssh-options", "-i '", "script.py"], "--ssh-options"),
        (["-w", "3", "--hosts", "localhost:2", "script.py"], "localhost:2"),
        (["-w", "1", "--python", "python3", "script.py"], "--python"),
        (["--hosts", "a", "--index", "0", "--addresses", "[::1]:1", "script.py"], "--index"),
        (["--index", "0", "script.py"], "--addresses"),
        (["--index", "0", "--addresses", "a:1,b:2", "script.py"], "TFDIST_SECRET"),
        (["--index", "2", "--addresses", "a:1,b:2", "script.py"], "`index` is 2"),
        (["--index", "-1", "--addresses", "a:1,b:2", "script.py"], "`index`"),
        (["--index", "0", "--addresses", "a:1,b", "script.py"], "'b'"),
        (["-w", "3", "--index", "0", "--addresses", "a:1,b:2", "script.py"], "--workers"),
        (
            ["--index", "0", "--addresses", "::1", "--max-restarts", "1", "script.py"],
            "--max-restarts",
        ),
    ],
)
def test_wrong_input_is_named(words: list[str], named: str, write: Any, capsys: Any) -> None:
    write("")
    assert main(["run", *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err


STRATEGY = """
import tensorflow as tf
import tf_keras
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((tf.ones((8, 3)), tf.ones((8, 1)))).batch(4)
model.fit(data, epochs=1, verbose=0)
print(strategy.num_replicas_in_sync, float(tf.reduce_sum(model.weights[0])), flush=True)
os._exit(0)  # TensorFlow's servers may wait for each other at the interpreter's end
"""


@pytest.mark.full
def test_tensorflows_own_strategy(write: Any) -> None:
    write(STRATEGY)
    shown = run("-w", "2", "--env", "TF_USE_LEGACY_KERAS=1", "script.py")
    assert shown.returncode == 0, shown.stderr
    (one,), (other,) = lines(shown.stdout, 0), lines(shown.stdout, 1)
    assert one == other
    assert one.startswith("2 ")
