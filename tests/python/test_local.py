"""The local launcher: what is returned, what a failure looks like, and what is left behind."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import build_dense, wait_for, worker_processes

from pybackend import InputError, WorkerContext, WorkerFailedError, barrier_run, barrier_train

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
