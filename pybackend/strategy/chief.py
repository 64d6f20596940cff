"""The chief of an asynchronous training, from the files of its job to the trained model."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.collective import Alone
from pybackend.data.rows import Rows, SpooledRows
from pybackend.engine.held_out import build_metrics
from pybackend.engine.metrics import to_plain
from pybackend.engine.save import plan_saving, write_model
from pybackend.engine.train import Training, build_variables
from pybackend.engine.trials import choose_rows, try_metrics
from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, EpochEnded, Note
from pybackend.model.compare import hash_weights
from pybackend.model.inputs import reshape_rows
from pybackend.model.load import load_job_model
from pybackend.strategy.blocks import batch, iterate_blocks
from pybackend.strategy.checks import check_asynchronous
from pybackend.strategy.server import count_threads
from pybackend.strategy.shares import VALIDATION, count_shares, move_shares
from pybackend.strategy.steps import Steps


def train_as_chief(
    job: Job, folder: Path, counts: Mapping[str, Sequence[int]], emit: Emit
) -> Training:
    """Train the model of a job on the parameter servers, to the last epoch, and write it.

    Parameters
    ----------
    folder
        This process's own, with its share of the rows; all servers run.
    counts
        Rows of every rank, by data set, as they were dealt.

    Raises
    ------
    InputError
        The model cannot be trained asynchronously.
    """
    os.chdir(folder)
    tf.config.threading.set_inter_op_parallelism_threads(count_threads())
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    # In this process, to try the model on rows, to evaluate and to save it.
    loaded = load_job_model(job, folder)
    model = loaded.model
    written = SpooledRows(folder / "train")
    rows = reshape_rows(written, model)
    inputs = build_variables(model, rows)
    check_asynchronous(model, job)
    _check_metrics(model, rows, job)
    plan = plan_saving(loaded, inputs, job, emit)
    with strategy.scope():
        shared = load_job_model(job, folder).model
        build_variables(shared, rows)
    copy_state(model, shared)
    move_shares(job, counts)
    steps = Steps(strategy, shared, model, rows, written.spec, job)
    began = time.monotonic()
    history = _fit(steps, shared, model, _held_out(model, folder, job, counts), job, counts, emit)
    seconds = time.monotonic() - began
    emit(Note(_describe_steps(steps.by_worker)))
    return Training(
        history=history,
        rows=counts["train"][0],
        steps=sum(steps.by_worker),
        seconds=seconds,
        weights_sha256=hash_weights(model),
        model_sha256=write_model(loaded, plan, folder, job.model_uri),
        inputs=inputs,
        waited=None,
    )


def copy_state(source: Any, target: Any) -> None:
    """Give a model the weights and the optimizer's state of another."""
    for one, other in zip(_variables(source), _variables(target), strict=True):
        other.assign(one.numpy())


def _variables(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _check_metrics(model: Any, rows: Rows, job: Job) -> None:
    kind = try_metrics(model, choose_rows(model, rows, job), job, Alone())
    build_metrics(model, rows)
    if kind == "not sums":
        raise InputError(
            f"strategy={job.strategy!r} adds up the metrics of single steps, and some of this "
            "model's are no sums over rows: leave them out of compile(), or leave out `strategy`"
        )


def _held_out(model: Any, folder: Path, job: Job, counts: Mapping[str, Sequence[int]]) -> Any:
    """The batches to validate on, None if there are none."""
    if "validation" not in counts:
        return None
    written = SpooledRows(folder / "validation")
    found = iterate_blocks(VALIDATION, written.spec, reshape_rows(written, model).spec)
    count = sum(counts["validation"])
    return batch(found.apply(tf.data.experimental.assert_cardinality(count)), job)


def _fit(
    steps: Steps,
    shared: Any,
    model: Any,
    held_out: Any,
    job: Job,
    counts: Mapping[str, Sequence[int]],
    emit: Emit,
) -> dict[str, list[Any]]:
    """Train all epochs; afterwards the model of this process has the weights."""
    number = sum(-(-count // job.batch_size) for count in count_shares(job, counts["train"]))
    history: dict[str, list[Any]] = {}
    with steps.exact_iterations():
        for epoch in range(job.initial_epoch, job.epochs):
            began = time.monotonic()
            logs = steps.run(number)
            copy_state(shared, model)
            if held_out is not None and job.validates(epoch):
                found = model.evaluate(held_out, verbose=0, return_dict=True)
                figures = {"loss": found.pop("loss"), **found}
                logs |= {f"val_{name}": to_plain(value) for name, value in figures.items()}
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
            emit(EpochEnded(epoch + 1, job.epochs, time.monotonic() - began, logs))
    return history


def _describe_steps(by_worker: Sequence[int]) -> str:
    """How the steps have fallen to the workers."""
    parts = ", ".join(f"worker {n} took {steps}" for n, steps in enumerate(by_worker, 1))
    return f"of {np.sum(by_worker)} asynchronous steps {parts}"
