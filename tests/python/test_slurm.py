"""Training as jobs of a real Slurm, and the ways to end them."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mnist_case
import pytest
import test_elastic
from cloudpickle import register_pickle_by_value
from conftest import build_dense, needs_r, wait_for
from contract import System, contract
from detaching import assert_same, drivers, submit_and_kill, train_here
from endless import PATIENCE, EndlessCall
from killing import KillAt
from leaks import find_in_commands, find_in_files, know_token
from pythons import python_with
from slurm import NODES, Slurm, needs_slurm, slurm_cluster
from told import check_goes_on

import pybackend
from pybackend import ClusterError, InputError, WorkerFailedError, barrier_run
from pybackend.core.launchers.slurm import launcher, watch
from pybackend.core.launchers.slurm.commands import (
    SlurmJob,
    notice_seconds,
    read_job,
    signal_option,
)
from pybackend.core.launchers.slurm.watch import describe_end, describe_notice
from pybackend.core.net.meeting import MeetingServer

register_pickle_by_value(test_elastic)

pytestmark = [pytest.mark.launcher, needs_slurm]


@pytest.fixture(scope="module")
def running() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Use the cluster's commands; check that no test leaves a job or a file."""
    for name, value in running.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(temporary(running)))
    yield running
    running.empty()
    wait_for(lambda: not [*jobs(running).iterdir(), *temporary(running).iterdir()], PATIENCE)


@pytest.fixture
def system(cluster: Slurm) -> System:
    def left() -> list[Any]:
        queued = cluster.run("squeue", "--noheader").split()
        return [*queued, *jobs(cluster).iterdir(), *temporary(cluster).iterdir()]

    options = {"folder": str(jobs(cluster)), "nodes": 2}
    return System(
        pybackend.slurm(**options, setup="export GREETING=hi"),
        f"pybackend.slurm(**{options})",
        hosts=tuple(cluster.hosts[name].address for name in NODES[:2]),
        variables={"GREETING": "hi"},
        left=left,
    )


TestContract = contract("test_nothing_outlives_a_driver_that_is_killed")


def temporary(cluster: Slurm) -> Path:
    """Return the folders of the workers."""
    folder = cluster.folder / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


def jobs(cluster: Slurm) -> Path:
    """Return the folders of the jobs."""
    folder = cluster.folder / "jobs"
    folder.mkdir(exist_ok=True)
    return folder


def endless(started: Path) -> Callable[[Any], None]:
    """Return a function for workers that writes a file with its host when it runs."""

    def wait(context: Any) -> None:
        import socket
        import threading

        (started / f"{context.rank}-{socket.gethostname()}-{os.getpid()}").touch()
        threading.Event().wait(300)

    return wait


def have_begun(started: Path) -> bool:
    """Return whether two workers run, from their files."""
    return len(list(started.iterdir())) == 2


def endless_call(cluster: Slurm, started: Path) -> EndlessCall:
    """Start a run of two workers on two nodes."""
    target, work = pybackend.slurm(folder=jobs(cluster), nodes=2), endless(started)
    return EndlessCall(
        lambda: barrier_run(target, work, workers=2, verbose=0),
        lambda: have_begun(started),
    )


@pytest.mark.full
def test_mnist_as_on_this_machine(cluster: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    result = pybackend.train_mnist(
        pybackend.slurm(nodes=2, time=10, folder=jobs(cluster)), **mnist_case.CASE
    )
    shown = capsys.readouterr().out
    assert "running on n2, n10" in shown
    assert "epoch 1/1" in shown
    mnist_case.check(result.model)


@pytest.mark.full
def test_nodes_without_python_run_workers_in_the_environment_of_the_call(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(context: Any) -> list[str]:
        import sys

        import numpy

        return [sys.executable, numpy.__file__]

    environment = python_with(tmp_path, "numpy", "cloudpickle").parents[1]
    shared = cluster.folder / "shared"
    target = pybackend.slurm(nodes=2, folder=shared, python="/nowhere/python")
    found = barrier_run(target, find, resources=pybackend.Resources(environment=environment))
    assert "unpacking the Python environment in" in capsys.readouterr().out
    (kept,) = shared.iterdir()
    assert kept.name == "environments"
    assert all(path.startswith(f"{kept}/") for paths in found for path in paths)
    assert len(found) == 2
    shutil.rmtree(shared)


@pytest.mark.full
def test_each_trial_is_its_own_job(cluster: Slurm, rows: Any) -> None:
    def build(units: int) -> Any:  # inside: nodes cannot import this module
        import keras

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    common: dict[str, Any] = {"epochs": 2, "seed": 3, "verbose": 0}
    trials = pybackend.train_many(
        pybackend.slurm(folder=jobs(cluster), time=10),
        build,
        rows,
        grid={"units": [3, 4, 2]},
        parallelism=2,
        **common,
    )
    # The third has too few outputs for the labels.
    assert [t.status for t in trials.trials] == ["completed", "completed", "failed"]
    assert "failed: InputError: `data` has the label 2" in str(trials.trials[2].error)
    alone = pybackend.barrier_train("local", lambda: build(3), rows, workers=1, **common)
    assert trials.trials[0].result is not None
    assert trials.trials[0].result.history == alone.history


@pytest.mark.full
def test_a_training_goes_on_when_a_worker_was_killed(
    cluster: Slurm, rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        pybackend.barrier_train(
            place,
            build_dense,
            rows,
            workers=2,
            epochs=2,
            seed=3,
            callbacks=[KillAt(1, 1, 2, tmp_path / "mark")],
            recovery=pybackend.Recovery(str(tmp_path / str(number)), every=2, restarts=1 - number),
        )
        for number, place in enumerate((pybackend.slurm(nodes=2, folder=jobs(cluster)), "local"))
    ]
    assert "restarting from the newest checkpoint" in capsys.readouterr().out
    assert results[0].history == results[1].history
    assert results[0].workers[0].weights_sha256 == results[1].workers[0].weights_sha256


@pytest.mark.full
def test_a_detached_job_outlives_its_session(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    name = submit_and_kill(f"""
        job = pybackend.submit_training(
            pybackend.slurm(nodes=2, folder={str(jobs(cluster))!r}), build, rows(), epochs=2,
            **SETTINGS
        )
    """)
    assert_same(pybackend.attach_job(name).result(300, verbose=0), train_here())
    wait_for(lambda: not drivers())


@pytest.mark.full
@needs_r
def test_mnist_from_r(cluster: Slurm, tmp_path: Path) -> None:
    mnist_case.check_r(tmp_path, "slurm", nodes=2, folder=str(jobs(cluster)))


@pytest.mark.full
def test_slurm_gives_workers_their_resources(
    cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slurm stores sbatch's variables in the environment.
    secret = "a secret of processes that join"
    monkeypatch.setenv("TFDIST_SECRET", secret)

    def show(context: Any) -> Any:
        variables = ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "OMP_NUM_THREADS")
        assert secret not in os.environ.values()
        return [os.environ.get(name) for name in (*variables, "CUDA_VISIBLE_DEVICES")]

    def run(**wanted: Any) -> Any:
        target, resources = pybackend.slurm(folder=jobs(cluster)), pybackend.Resources(**wanted)
        return barrier_run(target, show, workers=2, resources=resources, verbose=0)

    assert run(cpus=2, memory="1000MiB", gpus=0) == [["2", "500", "2", ""]] * 2
    for wanted in ({"cpus": 3}, {"memory": "5000MiB"}, {"gpus": 1}):
        with pytest.raises(ClusterError, match="sbatch"):
            run(**wanted)


@pytest.mark.full
def test_a_cancelled_job_has_shown_nobody_its_token(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = know_token(monkeypatch, launcher)
    running = endless_call(cluster, tmp_path)
    number = cluster.run("squeue", "--noheader", "--format=%A").strip()
    shown = cluster.run("scontrol", "show", "job", "--details", number)
    shown += cluster.run("scontrol", "show", "step", number)
    shown += cluster.run("scontrol", "write", "batch_script", number, "-")
    assert "srun" in shown
    assert token not in shown
    assert find_in_commands("pybackend")
    assert find_in_commands(token) == find_in_files(cluster.folder, token) == []
    cluster.run("scancel", "--user=root")
    error = running.failure()
    assert token not in str(error)
    assert error.exception_type == "Cancelled"
    assert error.host == "n2"


def test_a_job_that_gives_way(cluster: Slurm, tmp_path: Path) -> None:
    running = endless_call(cluster, tmp_path)
    urgent = cluster.command("srun", "-p", "urgent", "-N3", "--exclusive", "true")
    assert running.failure().exception_type == "Preempted"
    urgent.communicate(timeout=PATIENCE)
    assert urgent.returncode == 0


@pytest.mark.full
def test_a_training_that_gives_way_goes_on(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urgent = []

    def displace() -> None:
        urgent.append(cluster.command("srun", "-p", "urgent", "-N3", "--exclusive", "true"))

    said = check_goes_on(
        pybackend.slurm(folder=jobs(cluster), nodes=2, time=60), tmp_path, displace, capsys
    )
    assert "Preempted: the job was preempted by one of higher priority" in said
    urgent[0].communicate(timeout=PATIENCE)
    assert urgent[0].returncode == 0


@pytest.mark.full
def test_a_node_that_fails(cluster: Slurm, tmp_path: Path) -> None:
    running = endless_call(cluster, tmp_path)
    cluster.kill("n10")
    try:
        error = running.failure()
    finally:
        cluster.start("n10")
        for left in temporary(cluster).glob("tfdist-1-*"):  # it had no time to do so
            shutil.rmtree(left)
    assert (error.exception_type, error.rank, error.host) == ("NodeFailed", 1, "n10")


def show_first_job(cluster: Slurm, what: str) -> str:
    """Return Slurm's description of worker 0's job, which may not be the first submitted one."""
    shown = cluster.run("squeue", "--noheader", f"--format={what} %j").splitlines()
    return next(line.split()[0] for line in shown if line.endswith("-0"))


@pytest.mark.full
def test_a_training_goes_on_while_a_node_fails_and_another_comes(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, failed = test_elastic.StopWhenJoined(tmp_path, number=2), []

    def fail() -> None:
        wait_for(Path(stop.begun).exists, PATIENCE)
        failed.append(show_first_job(cluster, "%N"))
        cluster.kill(failed[0])

    failing = threading.Thread(target=fail)
    failing.start()
    place = pybackend.slurm(folder=jobs(cluster), cpus=2)  # all of a node
    settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 500}
    try:
        result = test_elastic.train(stop, target=place, **settings)
    finally:
        failing.join()
        cluster.start(failed[0])
        for left in temporary(cluster).glob("tfdist-*"):  # it had no time to do so
            shutil.rmtree(left)
    assert [generation.workers for generation in result.generations] == [[0, 1], [1], [1, 2]]
    assert "its node no longer responds to Slurm" in result.generations[1].left["0"]
    left = {cluster.hosts[node].address for node in NODES if node not in failed}
    assert {worker.host for worker in result.workers} == left
    assert f"worker 0 on {failed[0]} was lost" in capsys.readouterr().out
    test_elastic.check_exact(result)


@pytest.mark.full
@pytest.mark.parametrize("end", ["the time limit", "was cancelled"])
def test_a_worker_whose_job_is_ended_is_replaced(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(watch, "_START_SECONDS", 5.0)  # the training workers have joined
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)

    def displace() -> None:
        wait_for(Path(stop.begun).exists, PATIENCE)
        number = show_first_job(cluster, "%A")
        if end == "was cancelled":
            cluster.run("scancel", number)
        else:
            cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=1")

    displacing = threading.Thread(target=displace)
    displacing.start()
    place = pybackend.slurm(folder=jobs(cluster), time=60)
    settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 1000, "verbose": 0}
    result = test_elastic.train(stop, target=place, **settings)
    displacing.join()
    assert [generation.workers for generation in result.generations[:1]] == [[0, 1]]
    assert result.generations[-1].workers == [1, 2]
    left = " ".join(text for generation in result.generations for text in generation.left.values())
    assert end.removeprefix("the ") in left
    test_elastic.check_exact(result)


@pytest.fixture
def steps(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this process's srun on the controller's host, on which it may listen."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec {shlex.join(cluster.entry)} {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.full
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("node", ["n2", "n10"])  # the first one runs the batch script
def test_another_node_of_the_job_takes_the_place_of_one_that_fails(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], node: str
) -> None:
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)

    def fail() -> None:
        wait_for(Path(stop.begun).exists, PATIENCE)
        cluster.kill(node)

    failing = threading.Thread(target=fail)
    failing.start()
    place = pybackend.slurm(folder=jobs(cluster), nodes=3, cpus=2)
    settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 500}
    try:
        result = test_elastic.train(stop, target=place, **settings)
    finally:
        failing.join()
        cluster.start(node)
        for left in temporary(cluster).glob("tfdist-*"):  # it had no time to do so
            shutil.rmtree(left)
    ((lost, reason),) = result.generations[1].left.items()
    left = 1 - int(lost)
    assert [generation.workers for generation in result.generations] == [[0, 1], [left], [left, 2]]
    assert "its node no longer responds to Slurm" in reason
    assert f"worker {lost} on {node} was lost" in capsys.readouterr().out
    test_elastic.check_exact(result)


@pytest.mark.full
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("victim", ["worker", "task"])
def test_a_step_that_is_killed_is_replaced_in_the_same_job(
    cluster: Slurm, tmp_path: Path, victim: str
) -> None:
    killer = KillAt(0, 1, 2, tmp_path / "killed")
    if victim == "task":
        Path(f"{killer.mark}.victim").write_text("parent")
    stop = test_elastic.StopWhenJoined(tmp_path, number=2)
    place = pybackend.slurm(folder=jobs(cluster), nodes=2)
    settings = {"workers": pybackend.Elastic(max=2), "epochs": 500, "verbose": 0}
    result = test_elastic.train(killer, stop, target=place, **settings)
    assert [generation.workers for generation in result.generations] == [[0, 1], [1], [1, 2]]
    assert "was killed" in result.generations[1].left["0"] or victim == "task"
    test_elastic.check_exact(result)


@pytest.mark.full
@pytest.mark.usefixtures("steps")
def test_a_step_without_a_free_node_waits_and_the_others_train(
    cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(watch, "_QUIET_SECONDS", 1.0)
    stop, said = test_elastic.StopWhenJoined(tmp_path, number=2), []

    def look(epoch: int, logs: Any) -> bool:
        said.append(capsys.readouterr().out)
        return "has no free node for another worker (srun: " in "".join(said)

    def fail() -> None:
        wait_for(Path(stop.begun).exists, PATIENCE)
        cluster.kill("n10")

    failing = threading.Thread(target=fail)
    failing.start()
    place = pybackend.slurm(folder=jobs(cluster), nodes=2, cpus=2)
    settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 1000}
    observer = pybackend.Observer(on_epoch_end=look)
    try:
        result = test_elastic.train(stop, observer, target=place, **settings)
    finally:
        failing.join()
        cluster.start("n10")
        for left in temporary(cluster).glob("tfdist-*"):  # it had no time to do so
            shutil.rmtree(left)
    assert [len(generation.workers) for generation in result.generations] == [2, 1]
    assert result.epochs < 1000
    test_elastic.check_result(result)


def test_a_step_that_waits_for_a_node_reports_so_and_fails_if_training_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, notes = SimpleNamespace(now=0.0), list[Any]()
    running = SlurmJob("7", "RUNNING", nodes=("n2",))
    monkeypatch.setattr(watch.commands, "show_job", lambda number: running)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    files = watch.JobFiles(tmp_path, 1)
    waits = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"

    def look(step: watch.SlurmWatch, until: float) -> None:
        while clock.now < until:
            assert step.look() == []
            clock.now += 1

    with MeetingServer("127.0.0.1", "token", 1) as meeting:
        given = "7", files, meeting, notes.append, 1e9, 60
        files.batch_log.write_text(waits)
        first = watch.SlurmWatch(*given, busy_seconds=60.0)
        look(first, 60)
        with pytest.raises(ClusterError, match=r"no free node for another .*nodes are busy\): a n"):
            look(first, 70)
        later = watch.SlurmWatch(*given)
        look(later, 3600)
        files.batch_log.write_text(f"{waits}srun: Step created for StepId=7.3\n")
        look(later, 4150)
        with pytest.raises(ClusterError, match="no worker of Slurm job 7 connected within 600 s"):
            look(later, 4300)
    texts = [note.text for note in notes if "no free node" in note.text]
    assert len(texts) == 2
    assert texts[0].endswith("(srun: Requested nodes are busy): the worker waits for one")


def test_workers_that_go_and_come_have_a_job_each_or_a_step() -> None:
    def plan(workers: pybackend.Elastic, **settings: Any) -> tuple[list[str], str]:
        place, data = pybackend.slurm(**settings), (test_elastic.X, test_elastic.Y)
        planned = pybackend.plan(place, build_dense, data, workers=workers)
        return [worker.place for worker in planned.workers], planned.documents["job.sh"]

    places, script = plan(pybackend.Elastic(2))
    assert places == ["its own job"] * 2
    assert "#SBATCH --ntasks=1\n" in script
    places, script = plan(pybackend.Elastic(2, max=2), nodes=3)
    assert places == ["a step of the job"] * 2
    assert {"#SBATCH --nodes=3", "#SBATCH --ntasks=3", "#SBATCH --no-kill"} <= {*script.split("\n")}
    with pytest.raises(InputError, match="have 2 workers, but the number of workers is 3"):
        plan(pybackend.Elastic(2, max=3), nodes=2, options={"ntasks-per-node": 1})


@pytest.mark.full
def test_a_job_that_waits(cluster: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(cluster.folder / "other.log")
    cluster.run("sbatch", "-N3", "--exclusive", "-o", output, "--wrap", "sleep 300")
    wait_for(lambda: "RUNNING" in cluster.run("squeue", "--noheader", "-o", "%T"), PATIENCE)
    with pytest.raises(ClusterError, match="did not start within 6 s"):
        barrier_run(pybackend.slurm(folder=jobs(cluster), patience=6), print, workers=2)
    assert "is pending: Resources" in capsys.readouterr().out


def test_a_folder_that_nodes_do_not_share(cluster: Slurm) -> None:
    with pytest.raises(WorkerFailedError, match="must be on a file system that nodes share"):
        barrier_run(pybackend.slurm(folder=cluster.private), print, workers=2)


@pytest.mark.full
def test_a_setup_that_fails(cluster: Slurm) -> None:
    target = pybackend.slurm(folder=jobs(cluster), setup="false\ntrue")
    with pytest.raises(WorkerFailedError, match="`setup` seems to have failed"):
        barrier_run(target, print, workers=2)


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(InputError, match="`folder` of slurm"):
        barrier_run(pybackend.slurm(folder="/proc/none", address="127.0.0.1"), print, workers=2)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("TIMEOUT", "TimeLimit"),
        ("OUT_OF_MEMORY", "OutOfMemory"),
        ("NODE_FAIL", "NodeFailed"),
        ("FAILED", "ProcessDied"),
    ],
)
def test_ends_of_jobs(state: str, expected: str) -> None:
    job = read_job(
        f"JobId=7 JobName=JobState=x UserId=ann(1) JobState={state} Reason=None StartTime=Unknown "
        "PreemptTime=None ReqNodeList=(null) NodeList=n[2,10-11] BatchHost=n2"
    )
    assert job.nodes == ("n2", "n10", "n11")
    assert job.is_over
    assert describe_end(job, "n2", None)[0] == expected


@pytest.mark.parametrize(
    ("state", "ran", "limit", "expected"),
    [
        ("RUNNING", "00:59:10", "01:00:00", "TimeLimit"),
        ("COMPLETING", "00:59:10", "01:00:00", "TimeLimit"),
        ("FAILED", "01:00:00", "1-01:00:00", None),
        ("RUNNING", "1-02:46:39", "UNLIMITED", None),
        ("CANCELLED", "00:01:00", "01:00:00", "Cancelled"),
    ],
)
def test_why_workers_were_told_to_end(
    state: str, ran: str, limit: str, expected: str | None
) -> None:
    words = f"JobId=7 JobState={state} RunTime={ran} TimeLimit={limit} PreemptTime="
    found = describe_notice(read_job(f"{words}None"), notice_seconds("TERM@60"))
    assert (found and found[0]) == expected
    given_way = describe_notice(read_job(f"{words}2026-03-05T14:02:00"), 0.0)
    assert given_way is not None
    assert given_way[0] == "Preempted"


def test_slurm_is_asked_less_often_the_longer_a_job_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[float] = []
    now = 0.0

    def answer(number: str) -> SlurmJob:
        asked.append(now)
        return SlurmJob(number, "PENDING", "Resources")

    monkeypatch.setattr(watch.commands, "show_job", answer)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    notes: list[Any] = []
    with MeetingServer("127.0.0.1", "token", 1) as meeting:
        waiting = watch.SlurmWatch("7", watch.JobFiles(tmp_path, 1), meeting, notes.append, 1e9, 60)
        while now < 3600:
            assert waiting.look() == []
            now += 0.25
    assert 25 <= sum(second < 60 for second in asked) <= 31
    assert 55 <= sum(second >= 1800 for second in asked) <= 61
    assert len(notes) == 1  # nothing has changed


def test_jobs_are_told_before_their_time_is_over() -> None:
    for time in ("10", "10:00", "1:30:00", "1-0", "UNLIMITED", None):
        assert signal_option(time, 29.5, "B:") == "B:TERM@30"
    for time in ("9", "9:59", "0:05:00", "0-0:9"):
        assert signal_option(time, 30) is None
    assert notice_seconds("B:TERM@300") == 360
    assert notice_seconds(None) == 0


def test_a_job_that_slurm_does_not_take(cluster: Slurm) -> None:
    with pytest.raises(ClusterError, match="no partition 'absent'"):
        barrier_run(pybackend.slurm("absent", folder=jobs(cluster)), print, workers=2)
    target = pybackend.slurm(folder=jobs(cluster), options={"begin": "never"})
    with pytest.raises(ClusterError, match=r"(?s)sbatch failed: Invalid time .* in `options`"):
        barrier_run(target, print, workers=2)
    with pytest.raises(ClusterError, match=r"\(gres\) specification. Change `gpus` of slurm"):
        barrier_run(pybackend.slurm(gpus=1, folder=jobs(cluster)), print, workers=2)
    with pytest.raises(ClusterError, match=r"would never start, .* Request less with `nodes`"):
        barrier_run(pybackend.slurm(nodes=9, folder=jobs(cluster)), print)


@pytest.mark.full
def test_nodes_without_a_number_of_workers(cluster: Slurm) -> None:
    target = pybackend.slurm(nodes=3, folder=jobs(cluster))
    found = barrier_run(target, lambda context: os.uname().nodename, verbose=0)
    assert found == ["n2", "n10", "n11"]
    assert pybackend.slurm().count_workers(None) is None
    many = pybackend.slurm(nodes=3, options={"ntasks-per-node": 2})
    assert many.count_workers(None) == 6
    with pytest.raises(InputError, match="3 nodes need at least 3 workers"):
        barrier_run(target, print, workers=2)
    with pytest.raises(InputError, match="ntasks-per-node=2 have 6 workers"):
        barrier_run(many, print, workers=4)


@pytest.mark.full
def test_a_python_that_nodes_do_not_have(cluster: Slurm) -> None:
    with pytest.raises(WorkerFailedError, match="`python` of slurm") as caught:
        barrier_run(pybackend.slurm(folder=jobs(cluster), python="/no/python"), print, workers=2)
    assert "/no/python" in "".join(caught.value.log)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time": "soon"}, "`time` must be a whole number of minutes"),
        ({"nodes": 0}, "`nodes` must be at least 1"),
        ({"options": {"-n": 4}}, "expected a long option"),
        ({"options": {"output": "x"}}, "`options` cannot have 'output'"),
        ({"options": {"job_name": "x"}}, "`options` cannot have 'job-name': tfdist finds its job"),
        ({"options": {"job-n": "x"}}, "`options` cannot have 'job-n', which means 'job-name'"),
        ({"options": {"--part": "x"}}, "`options` cannot have 'part', which means 'partition'"),
        ({"options": {"J": "x"}}, "expected a long option"),
        ({"options": {"qos": "a\nb"}}, "`options` has qos="),
        ({"partition": "a\nb"}, "`partition` must be printable"),
        ({"patience": 0}, "`patience` must be a positive number"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pybackend.slurm(**arguments)
