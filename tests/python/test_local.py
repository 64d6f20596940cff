"""The local launcher: what is returned, what a failure looks like, and what is left behind."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cloudpickle import dumps
from conftest import build_dense, stop_at_end, wait_for, worker_processes

from pybackend import (
    InputError,
    WorkerContext,
    WorkerFailedError,
    barrier_run,
    barrier_train,
    make_tf_config,
)
from pybackend.job.job import FUNCTION, make_job
from pybackend.job.values import decode_value
from pybackend.launchers.local import LocalLauncher

pytestmark = pytest.mark.launcher


def folders() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "tfdist-*")))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    before = folders()
    yield
    wait_for(lambda: not worker_processes())
    assert folders() <= before


def test_barrier_run_returns_one_value_per_rank() -> None:
    def work(context: WorkerContext, factor: int) -> Any:
        import os

        return {
            "rank": context.rank,
            "size": context.world_size,
            "config": os.environ["TF_CONFIG"] == context.tf_config,
            "array": np.arange(3) * factor * context.rank,
        }

    values = barrier_run(None, work, 10, workers=2, verbose=0)
    assert [v["rank"] for v in values] == [0, 1]
    assert all(v["size"] == 2 and v["config"] for v in values)
    assert values[1]["array"].tolist() == [0, 10, 20]


def test_a_process_of_a_cluster_trains_alone_only_if_it_says_so(monkeypatch: Any) -> None:
    monkeypatch.setenv("TF_CONFIG", make_tf_config(["10.0.0.1:2222", "10.0.0.2:2222"], 0))
    rows = np.zeros((4, 8), "float32"), np.zeros(4)
    for call in (
        lambda: barrier_train(None, build_dense, rows),
        lambda: barrier_run(None, lambda context: context.rank),
    ):
        with pytest.raises(InputError, match="each process would train a copy of everything"):
            call()
    result = barrier_train("local", build_dense, rows, workers=2, verbose=0)
    assert [worker.rows for worker in result.workers] == [2, 2]
    assert barrier_run("local", _refused, workers=2, verbose=0) == [True, True]


def _refused(context: WorkerContext) -> bool:
    """Whether a worker, whose TF_CONFIG is tfdist's own, must say that it means its machine."""
    try:
        barrier_run(None, lambda context: context.rank)
    except InputError:
        return True
    return False


def test_tensorflow_can_use_the_reserved_addresses() -> None:
    def work(context: WorkerContext) -> Any:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        summed = strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        )
        return strategy.num_replicas_in_sync, float(summed)

    assert barrier_run("local", work, workers=2, verbose=0) == [(2, 2.0), (2, 2.0)]


def test_failure_names_rank_host_reason_and_last_lines() -> None:
    def work(context: WorkerContext) -> None:
        import signal

        print("about to work")
        if context.rank == 1:
            raise KeyError("no such digit")
        signal.pause()  # the others would wait for ever

    with pytest.raises(WorkerFailedError) as caught:
        barrier_run(None, work, workers=3, verbose=0)
    error = caught.value
    assert (error.rank, error.host, error.exception_type) == (1, "127.0.0.1", "KeyError")
    assert "no such digit" in str(error)
    assert "raise KeyError" in error.worker_traceback
    assert "about to work" in error.log
    assert {f.exception_type for f in error.others} == {"Stopped"}


def test_a_killed_worker_is_the_cause_and_its_peers_the_consequence(rows: Any) -> None:
    import keras

    class KillRankOne(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            import os
            import signal

            if os.environ["TFDIST_RANK"] == "1" and batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerFailedError, match="SIGKILL") as caught:
        barrier_train(
            None, build_dense, rows, workers=3, batch_size=10, callbacks=[KillRankOne()], verbose=0
        )
    assert caught.value.rank == 1
    assert "PeerLostError" in {f.exception_type for f in caught.value.others}


def test_a_worker_may_fork() -> None:
    def work(context: WorkerContext) -> Any:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2])

    assert barrier_run(None, work, workers=1, verbose=0) == [[1, 2]]


def test_an_end_by_any_signal_is_told() -> None:
    def work(context: WorkerContext) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGRTMIN + 6)

    with pytest.raises(WorkerFailedError, match="ended by signal"):
        barrier_run(None, work, workers=1, verbose=0)


def test_files_of_the_current_directory_do_not_stand_in_for_modules(
    tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is not the real queue')")
    monkeypatch.chdir(tmp_path)
    assert barrier_run(None, lambda context: context.rank, workers=1, verbose=0) == [0]


def test_what_a_worker_has_started_ends_with_it() -> None:
    def work(context: WorkerContext) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid

    (pid,) = barrier_run(None, work, workers=1, verbose=0)
    wait_for_end(pid)


DRIVER = """
import pybackend, signal
# A shell starts its background jobs with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
def work(context):
    import os, signal
    print("pid", os.getpid(), flush=True)
    signal.pause()
pybackend.barrier_run(None, work, workers=2, verbose=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_workers_end_with_their_driver(number: signal.Signals) -> None:
    before = folders()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline().split()[-1]) for _ in range(2)]
    driver.send_signal(number)
    driver.communicate(timeout=30)
    for pid in pids:
        wait_for_end(pid)
    for folder in folders() - before:
        # Removed by the worker itself where the driver could not.
        wait_for(lambda folder=folder: not os.path.exists(folder))


def test_a_zip_of_a_spark_session_that_has_ended_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "pybackend-0123456789abcdef.zip"
    with zipfile.ZipFile(old, "w") as packed:
        packed.writestr("pybackend/__init__.py", "raise ImportError('of another session')")
    monkeypatch.setattr(sys, "path", [str(old), *sys.path])
    assert barrier_run(None, lambda context: context.rank, workers=1, verbose=0) == [0]


def wait_for_end(pid: int) -> None:
    def is_gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().split()[2] == "Z"
        except OSError:
            return True

    wait_for(is_gone)


def test_epoch_lines_are_printed_as_they_happen(rows: Any, capsys: Any) -> None:
    barrier_train(None, build_dense, rows, workers=2, epochs=2, batch_size=64)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1/2  loss ")
    assert "accuracy" in lines[1]
    assert len(lines) == 2


def test_a_label_out_of_range_is_the_first_line_and_said_once(rows: Any) -> None:
    x, y = rows[0][:40], np.full(40, 3)
    with pytest.raises(WorkerFailedError) as caught:
        barrier_train(None, build_dense, (x, y), workers=2, verbose=0)
    first, *others = str(caught.value).splitlines()
    assert "Received a label value of 3" in first
    assert "encode the classes of the label as 0, 1, 2" in others[-1]


@pytest.mark.parametrize("args", [(), (1, 2)])
def test_a_function_that_takes_other_arguments_is_refused_here(args: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"called as fn\(context, \*args\)"):
        barrier_run(None, (lambda: 1) if not args else (lambda context, a: a), *args, workers=2)


def test_a_worker_that_is_stopped_after_the_last_step_is_named(rows: Any) -> None:
    with pytest.raises(WorkerFailedError, match="stopped") as caught:
        barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            timeout=3,
            callbacks=[stop_at_end(rank=1)],
            verbose=0,
        )
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.1")
    assert caught.value.exception_type == "WorkerStalled"


def test_a_function_that_is_quiet_for_longer_than_the_timeout_is_left_alone() -> None:
    job = replace(make_job("run", {"workers": 1, "verbose": 0}), timeout=0.5)
    outcome = LocalLauncher().launch(job, {FUNCTION: dumps((sleep, (2.0,)))}, {}, print)
    assert decode_value(outcome.reports[0].value) == 2.0


def sleep(context: WorkerContext, seconds: float) -> float:
    import time

    time.sleep(seconds)
    return seconds


def test_a_stopped_worker_ends_with_a_driver_that_is_killed() -> None:
    before = folders()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline().split()[-1]) for _ in range(2)]
    os.kill(pids[0], signal.SIGSTOP)
    driver.kill()
    driver.communicate(timeout=30)
    for pid in pids:
        wait_for_end(pid)
    for folder in folders() - before:
        wait_for(lambda folder=folder: not os.path.exists(folder))


def test_a_gang_that_has_failed_can_be_launched_again(tmp_path: Path) -> None:
    """As a restart does: the same launcher, the same job, the same files."""

    def work(context: WorkerContext, marker: str) -> int:
        from pathlib import Path

        if context.rank == 1 and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("only the first time")
        return context.rank

    launcher, job = LocalLauncher(), make_job("run", {"workers": 2, "verbose": 0})
    files = {FUNCTION: dumps((work, (str(tmp_path / "failed"),)))}
    with pytest.raises(WorkerFailedError, match="only the first time"):
        launcher.launch(job, files, {}, print)
    for _ in range(2):
        outcome = launcher.launch(job, files, {}, print)
        assert [decode_value(report.value) for report in outcome.reports] == [0, 1]
