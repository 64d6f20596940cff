"""Seconds from a call to its result: a job that does nothing, and 200 steps of a small network.

On this machine and on a standalone Spark cluster, compared with bare processes, a bare barrier job
and spark-tensorflow-distributor 1.0.0, which runs unchanged under Spark 4 and TensorFlow 2.21. It
trains in the tasks' own Python, which Spark reuses, so once warm it does not import TensorFlow
again; tfdist starts a new process per worker each time.

With a fork server on each executor, which the round that warms up starts, it does not either.

On this machine also the seconds to the end of the first step: of calls in a row, the last ones with
another number of workers and of cores, beside one process that imports TensorFlow and takes this
step. And the memory of the process that waits between the calls.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checks
import numpy as np
from rounds import interleaved, median_seconds, seconds
from standalone_session import standalone_session
from step import network

import pybackend
from pybackend.core.machine.processes import list_children

WORKERS, BATCH, STEPS, EPOCHS = 2, 64, 20, 10
_ONE_STEP = f"""
import keras
import numpy as np
from step import network

x = np.zeros(({BATCH}, 28, 28, 1), "float32")
network(keras).train_on_batch(x, np.zeros({BATCH}, "int32"))
"""
_WAITING = "waiting"
Figures = dict[str, dict[str, float]]


def measure(rounds: int) -> dict[str, Figures]:
    """Medians over interleaved rounds, after one that warms up, by table."""
    # In this session's environment it is off.
    with standalone_session(spark__executorEnv__TFDIST_FORK_SERVER="1") as session:
        nothing = {
            "two bare Python processes": _bare_processes,
            "tfdist no-op, this machine": lambda: _no_op("local"),
            "bare Spark barrier job": lambda: _bare_barrier(session),
            "spark-tensorflow-distributor no-op": lambda: _distributor(_nothing, custom=True),
            "tfdist no-op, Spark": lambda: _no_op(session),
        }
        training = {
            "spark-tensorflow-distributor (Keras 2)": lambda: _distributor(_mirrored),
            "tfdist, Spark": lambda: _train(session),
            "tfdist, Spark, without audits": lambda: _train(session, audit=False),
            "tfdist, Spark, later call, fork server": lambda: _train_forked(session),
            "tfdist, this machine": lambda: _train("local"),
        }
        steps = STEPS * EPOCHS
        found = {
            f"no-op, {WORKERS} workers, standalone cluster, warm": (nothing, 3 * rounds),
            f"call to model, {steps} steps, {WORKERS} workers": (training, rounds),
        }
        timed = {
            title: {name: {"seconds": s} for name, s in median_seconds(*asked).items()}
            for title, asked in found.items()
        }
    timed |= _first_steps(rounds)
    return timed | {"checks before a training, small network": checks.measure(rounds)}


def _first_steps(rounds: int) -> dict[str, Figures]:
    # In this order, in every round.
    found = interleaved(
        {
            "one process: import, build, one step": seconds(_one_process),
            "first call, without a fork server": partial(_first_step, fork_server="0"),
            "first call": _first_step,
            "second call": _first_step,
            "third call": _first_step,
            "a call with 1 worker": partial(_first_step, workers=1),
            "a call with 1 worker, 1 core": partial(_first_step, workers=1, cores=1),
            _WAITING: _weigh_server,
        },
        rounds,
    )
    waiting = {"fork server": {"GB": float(np.median(found.pop(_WAITING)))}}
    steps = {name: {"seconds": float(np.median(values))} for name, values in found.items()}
    return {
        f"call to first step, {WORKERS} workers, this machine": steps,
        "between calls, proportional set size": waiting,
    }


def _weigh_server() -> float:
    """Return the proportional set size of the process that waits between calls, in GB."""
    # Spark's JVM is another child.
    (server,) = (
        child
        for child in list_children()
        if b"serve(" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    entries = Path(f"/proc/{server}/smaps_rollup").read_text().splitlines()
    return next(float(entry.split()[1]) for entry in entries if entry.startswith("Pss:")) / 1e6


def _first_step(workers: int = WORKERS, cores: int | None = None, fork_server: str = "1") -> float:
    began = time.perf_counter()
    ends: list[float] = []

    def on_step_end(step: int, logs: Any) -> bool:
        ends.append(time.perf_counter() - began)
        return True

    # A call without the fork server stops it.
    with patch.dict(os.environ, TFDIST_FORK_SERVER=fork_server):
        pybackend.barrier_train(
            "local",
            _network,
            _images(),
            workers=workers,
            batch_size=BATCH,
            verbose=0,
            callbacks=pybackend.Observer(on_step_end=on_step_end),
            resources=pybackend.Resources(cpus=cores),
        )
    return ends[0]


def _one_process() -> None:
    subprocess.run([sys.executable, "-c", _ONE_STEP], check=True, cwd=os.path.dirname(__file__))


def _no_op(spark: Any) -> None:
    pybackend.barrier_run(spark, lambda context: context.rank, workers=WORKERS, verbose=0)


def _bare_processes() -> None:
    for process in [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(WORKERS)]:
        process.wait()


def _bare_barrier(session: Any) -> None:
    session.range(0, WORKERS, 1, WORKERS).mapInArrow(
        lambda batches: batches, "id long", barrier=True
    ).collect()


def _distributor(train: Callable[[], Any], custom: bool = False) -> Any:
    from spark_tensorflow_distributor import MirroredStrategyRunner

    # It sets its logger's level itself, and logs every run.
    logging.getLogger("MirroredStrategyRunner").addFilter(_no_record)
    runner = MirroredStrategyRunner(num_slots=WORKERS, use_gpu=False, use_custom_strategy=custom)
    return runner.run(train)


def _no_record(record: Any) -> bool:
    return False


def _nothing() -> int:
    return 1


def _images() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    rows = BATCH * WORKERS * STEPS
    return rng.random((rows, 28, 28, 1), dtype="float32"), rng.integers(0, 10, rows)


def _network() -> Any:
    import keras

    return network(keras)


def _train_forked(spark: Any) -> Any:
    with patch.dict(os.environ, TFDIST_FORK_SERVER="1"):
        return _train(spark, forks=True)


def _train(spark: Any, audit: bool = True, forks: bool | None = None) -> Any:
    result = pybackend.barrier_train(
        spark,
        _network,
        _images(),
        workers=WORKERS,
        epochs=EPOCHS,
        batch_size=BATCH,
        exchange=pybackend.Exchange(audit=audit),
        resources=pybackend.Resources(fork_server=forks),
        verbose=0,
    )
    return result.model_base64


def _mirrored() -> Any:
    """Train the same steps with TensorFlow's own strategy, in a task of the distributor."""
    # The strategy does not support models of Keras 3.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tf_keras

    x, y = _images()
    model = network(tf_keras)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH * WORKERS)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model.fit(rows.with_options(options), epochs=EPOCHS, verbose=0)
    return model.get_weights()
