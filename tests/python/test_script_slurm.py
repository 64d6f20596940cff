"""`tfdist run` in an allocation of a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import full, wait_for
from slurm import Slurm, needs_slurm, slurm_cluster

from pybackend.cli import main
from pybackend.core.net.authentication import new_token

pytestmark = [pytest.mark.launcher, needs_slurm]

RUN = (sys.executable, "-m", "pybackend", "run")
SHOW = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TFDIST_SECRET", "TF_CONFIG")
print(json.dumps({**{name: os.environ[name] for name in names}, "host": socket.gethostname()}))
print("problem", file=sys.stderr)
"""
JOIN = """
import pybackend

def say(context):
    return context.rank

print(pybackend.barrier_run(None, say, verbose=0), "of 4")
"""
STAY = """
import os, pathlib, signal, sys, time

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def leave(number):  # with all others: the first that is gone takes them along
    (folder / f"told{rank}").write_text(str(number))
    while len(list(folder.glob("told*"))) < 4:
        time.sleep(0.01)
    sys.exit(1)

def end(number, frame):
    print("notice", number, flush=True)
    if number == signal.SIGUSR1:
        sys.exit()

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
(folder / rank).touch()
if os.environ["TFDIST_RESTART"] == "0":
    time.sleep(300)
print("again", flush=True)
"""

# Requeues a job too late: Slurm did so itself at the end of the job's grace period.
LATE = """#!/bin/sh
trap '' TERM
if [ "$1" = requeue ]; then
  while {scontrol} show job --oneliner "$2" | grep -q ' Restarts=0 '; do sleep 0.05; done
fi
exec {scontrol} "$@"
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Slurm) -> Iterator[Slurm]:
    yield running
    running.empty()


def lines(text: str) -> dict[int, list[str]]:
    """Return the output of each rank."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        rank, _, content = line.partition("] ")
        if rank.startswith("["):
            found.setdefault(int(rank[1:]), []).append(content)
    return found


def run(cluster: Slurm, path: Path, script: str, *words: str) -> subprocess.Popen[str]:
    """Run a script in an allocation of three nodes and four tasks."""
    (path / "script.py").write_text(script)
    allocation = ("salloc", "-Q", "-N3", "-n4", *RUN, *words)
    return cluster.command(*allocation, str(path / "script.py"), str(path))


def started(path: Path, ranks: int = 4) -> None:
    wait_for(lambda: all((path / str(rank)).exists() for rank in range(ranks)))


@pytest.mark.full
def test_ranks_are_the_tasks_of_a_step(cluster: Slurm, tmp_path: Path) -> None:
    process = run(cluster, tmp_path, SHOW)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = {rank: json.loads(text) for rank, [text] in lines(out).items()}
    assert [found[rank]["host"] for rank in range(4)] == ["n2", "n2", "n10", "n11"]
    assert [found[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "0"]
    assert [found[rank]["LOCAL_WORLD_SIZE"] for rank in range(4)] == ["2", "2", "1", "1"]
    assert {one["WORLD_SIZE"] for one in found.values()} == {"4"}
    assert len({one["TFDIST_SECRET"] for one in found.values()}) == 1
    configs = [json.loads(found[rank]["TF_CONFIG"]) for rank in range(4)]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2, 3]
    assert len({tuple(config["cluster"]["worker"]) for config in configs}) == 1
    addresses = configs[0]["cluster"]["worker"]
    assert [address.partition(":")[0] for address in addresses] == ["n2", "n2", "n10", "n11"]
    assert len(set(addresses)) == 4
    assert lines(err) == {rank: ["problem"] for rank in range(4)}


@pytest.mark.parametrize("starter", [full(RUN), full(("srun", "-m", "cyclic", sys.executable))])
def test_a_script_joins_the_group(cluster: Slurm, tmp_path: Path, starter: tuple[str, ...]) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    secret = {"TFDIST_SECRET": new_token()}
    words = ["salloc", "-Q", "-N3", "-n4", *starter, str(tmp_path / "join.py")]
    process = cluster.command(*words, variables=secret)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("[0, 1, 2, 3] of 4") == 4


@pytest.mark.full
def test_a_carriage_return_ends_no_line(cluster: Slurm, tmp_path: Path) -> None:
    forged = "srun: error: n2: task 0: Exited with exit code 3"
    script = f"import sys; print('50%\\r100%'); print('\\r{forged}', file=sys.stderr)"
    process = run(cluster, tmp_path, script)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert lines(out) == {rank: ["100%"] for rank in range(4)}
    assert lines(err) == {rank: [forged] for rank in range(4)}


def test_the_first_failure_ends_the_others(cluster: Slurm, tmp_path: Path) -> None:
    script = STAY.replace(
        "time.sleep(300)", "os.environ['RANK'] == '2' and sys.exit(7); time.sleep(300)"
    )
    process = run(cluster, tmp_path, script)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "tfdist: rank 2 on the nodes of Slurm job" in err
    assert "ended with exit status 7; the other ranks were ended" in err


@pytest.mark.full
def test_signals_reach_the_script(cluster: Slurm, tmp_path: Path) -> None:
    job, output = submit(cluster, tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # only to `tfdist run`
    wait_for(lambda: not cluster.run("squeue", "-h", "-j", job))
    assert lines(output.read_text()) == {rank: [f"notice {signal.SIGUSR1:d}"] for rank in range(4)}


@pytest.mark.full
@pytest.mark.parametrize(("leaves", "is_late"), [(False, False), (True, False), (True, True)])
def test_a_job_that_gives_way_has_notice_and_goes_on(
    cluster: Slurm, tmp_path: Path, leaves: bool, is_late: bool
) -> None:
    """Slurm requeues a job that runs to the end of its grace, `tfdist run` one that exits."""
    if is_late:
        (tmp_path / "scontrol").write_text(LATE.format(scontrol=shutil.which("scontrol")))
        (tmp_path / "scontrol").chmod(0o755)
    job, output = submit(cluster, tmp_path, "leave(number)" if leaves else "pass")
    cluster.run("srun", "-Q", "-p", "urgent", "-N3", "--exclusive", "true")
    wait_for(lambda: "PENDING" in cluster.run("squeue", "-h", "-j", job, "-o", "%T"))

    # By itself, Slurm would restart it two minutes later; at once, the end of the first run's step
    # could end the next one, which has the same number.
    cluster.run("scontrol", "update", f"job={job}", "StartTime=now+8")
    wait_for(lambda: output.read_text().count("] again") == 4)
    assert ("Slurm will start this job again" in output.read_text()) is leaves
    for rank, printed in lines(output.read_text()).items():
        if leaves:  # Slurm may lose output that a rank prints just before it exits
            assert (tmp_path / f"told{rank}").read_text() == f"{signal.SIGTERM:d}", rank
        else:
            assert f"notice {signal.SIGTERM:d}" in printed[:2], rank
        assert printed[-1] == "again"


def test_a_script_for_sbatch(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import os, sys; print(os.environ['MARK'], *sys.argv[1:])")
    output = tmp_path / "output"
    asked = f"--sbatch=--nodes=3 --requeue --output={output}"
    words = ["-w", "3", asked, "--grace", "40", "--env", "MARK=a b"]
    script = cluster.run(*RUN, *words, str(tmp_path / "say.py"), "--epochs", "3")
    assert "#SBATCH --signal=B:TERM@60\n" in script
    assert "export TFDIST_REQUEUE=1\n" in script
    (tmp_path / "job.sh").write_text(script)
    cluster.run("sbatch", "--wait", str(tmp_path / "job.sh"))
    assert lines(output.read_text()) == {rank: ["a b --epochs 3"] for rank in range(3)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sbatch=--time=60"], "needs the number of ranks"),
        (["-w", "2", "--sbatch=-t60"], "expected long options"),
        (["-w", "2", "--hosts", "a", "--sbatch=--time=60"], "Slurm chooses the hosts"),
        (["-w", "2", "--sbatch=--ntasks=4"], "cannot have --ntasks"),
        (["-w", "2", "--sbatch=--nodes=3"], "3 nodes need at least 3 workers"),
        (["-w", "2", "--sbatch=--nodes=2 --ntasks-per-node=2"], "ntasks-per-node=2 have 4"),
        (["-w", "2", "--sbatch=--time=60", "--env", "1A=x"], "--env 1A=x"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words, "say.py"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_driver_that_is_killed_takes_its_step_along(cluster: Slurm, tmp_path: Path) -> None:
    process = run(cluster, tmp_path, STAY)
    started(tmp_path)
    [driver] = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    os.kill(int(driver), signal.SIGKILL)
    process.communicate(timeout=120)
    wait_for(lambda: not cluster.run("squeue", "--steps", "-h"))


def submit(cluster: Slurm, path: Path, last: str = "pass") -> tuple[str, Path]:
    """Run the script, which does not exit, as a batch job; return the job's number and its output.

    ``last`` is what its ranks do when they receive the termination signal.
    """
    (path / "script.py").write_text(STAY.replace("    if number", f"    {last}\n    if number"))
    words = shlex.join([*RUN, str(path / "script.py"), str(path)])
    (path / "job.sh").write_text(f'#!/bin/sh\nPATH="{path}:$PATH" exec {words}\n')
    output = path / "output"
    options = ["--parsable", "-N3", "-n4", "--requeue", "--open-mode=append", f"--output={output}"]
    job = cluster.run("sbatch", *options, str(path / "job.sh")).strip()
    started(path)
    return job, output
