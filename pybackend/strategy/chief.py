"""The chief of an asynchronous training, from the files of its job to the trained model."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from pybackend.collective import Alone
from pybackend.data.rows import Rows, SpooledRows
from pybackend.engine.held_out import build_metrics
from pybackend.engine.metrics import to_plain
from pybackend.engine.save import plan_saving, write_model
from pybackend.engine.train import Training, build_variables
from pybackend.engine.trials import choose_rows, try_metrics
from pybackend.errors import InputError, PeerLostError
from pybackend.job.answers import Answers
from pybackend.job.checkpoint import pointing_to
from pybackend.job.job import Job
from pybackend.job.messages import Begun, Emit, EpochEnded, Note
from pybackend.job.roles import ranks_of
from pybackend.model.compare import hash_weights
from pybackend.model.inputs import reshape_rows
from pybackend.model.load import load_job_model
from pybackend.net.rendezvous import split_address
from pybackend.strategy.blocks import batch, iterate_blocks
from pybackend.strategy.checks import check_asynchronous
from pybackend.strategy.keeping import Keeping, variables_of
from pybackend.strategy.server import count_threads
from pybackend.strategy.shares import VALIDATION, count_shares, move_shares
from pybackend.strategy.steps import Steps

Counts = Mapping[str, Sequence[int]]


def train_as_chief(
    job: Job, folder: Path, counts: Counts, peers: Sequence[str], emit: Emit, answers: Answers
) -> Training:
    """Train the model of a job on the parameter servers, to the last epoch, and write it.

    Parameters
    ----------
    folder
        This process's own, with its share of the rows.
    counts
        Rows of every rank, by data set, as they were dealt.
    peers
        ``host:port`` of every rank; all servers run.
    answers
        What observers of the training say to it.

    Raises
    ------
    InputError
        The model cannot be trained asynchronously.
    PeerLostError
        A parameter server was lost, or all workers.
    """
    os.chdir(folder)
    tf.config.threading.set_inter_op_parallelism_threads(count_threads())
    with _naming_lost(job, peers):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        return _train(strategy, job, folder, counts, emit, answers)


def _train(
    strategy: Any, job: Job, folder: Path, counts: Counts, emit: Emit, answers: Answers
) -> Training:
    # In this process, to try the model on rows, to evaluate and to save it.
    loaded = load_job_model(job, folder)
    model = loaded.model
    written = SpooledRows(folder / "train")
    rows = reshape_rows(written, model)
    inputs = build_variables(model, rows)
    check_asynchronous(model, job)
    _check_metrics(model, rows, job)
    steps_per_epoch = _count_steps(job, counts)
    plan = plan_saving(loaded, inputs, job, emit)
    keeping = Keeping(job, loaded, plan, inputs, counts, emit)
    with strategy.scope():
        shared = load_job_model(job, folder).model
        build_variables(shared, rows)
    _copy_state(model, shared)
    move_shares(job, counts)
    steps = Steps(strategy, shared, model, rows, written.spec, job)
    held_out = _held_out(model, folder, job, counts)
    emit(Begun())
    began = time.monotonic()
    with steps.exact_iterations():
        for epoch in range(keeping.epoch, job.epochs):
            epoch_began = time.monotonic()
            logs = steps.run(steps_per_epoch)
            _copy_state(shared, model)
            if held_out is not None and job.validates(epoch):
                logs |= _validate(model, held_out)
            for name, value in logs.items():
                keeping.history.setdefault(name, []).append(value)
            emit(EpochEnded(epoch + 1, job.epochs, time.monotonic() - epoch_began, logs))
            keeping.keep(epoch + 1)
            if job.is_observed and answers.wait_for_epoch(epoch + 1):
                break
    seconds = time.monotonic() - began
    emit(Note(_describe_steps(job, steps.by_worker)))
    keeping.finish()
    with pointing_to(job.checkpoint):
        digest = write_model(loaded, plan, folder, job.model_uri, emit)
    return Training(
        history=keeping.history,
        rows=counts["train"][0],
        steps=sum(steps.by_worker),
        seconds=seconds,
        weights_sha256=hash_weights(model),
        model_sha256=digest,
        inputs=inputs,
        waited=None,
    )


def _copy_state(source: Any, target: Any) -> None:
    """Give a model the weights and the optimizer's state of another."""
    for one, other in zip(variables_of(source), variables_of(target), strict=True):
        other.assign(one.numpy())


def _check_metrics(model: Any, rows: Rows, job: Job) -> None:
    kind = try_metrics(model, choose_rows(model, rows, job), job, Alone())
    build_metrics(model, rows)
    if kind == "not sums":
        raise InputError(
            f"strategy={job.strategy!r} adds up the metrics of single steps, and some of this "
            "model's are no sums over rows: leave them out of compile(), or leave out `strategy`"
        )


def _count_steps(job: Job, counts: Counts) -> int:
    """Batches that all rows make, on the workers that have them."""
    shares = count_shares(job, counts["train"])
    if 0 in shares:
        rank = ranks_of(job.roles, "worker")[shares.index(0)]
        raise InputError(f"`data` leaves worker {rank} without a row: use fewer workers")
    return sum(-(-share // job.batch_size) for share in shares)


def _held_out(model: Any, folder: Path, job: Job, counts: Counts) -> Any:
    """The batches to validate on, None if there are none."""
    if "validation" not in counts:
        return None
    written = SpooledRows(folder / "validation")
    rows = iterate_blocks(VALIDATION, written.spec, reshape_rows(written, model).spec)
    count = sum(counts["validation"])
    return batch(rows.apply(tf.data.experimental.assert_cardinality(count)), job)


def _validate(model: Any, held_out: Any) -> dict[str, Any]:
    found = model.evaluate(held_out, verbose=0, return_dict=True)
    figures = {"loss": found.pop("loss"), **found}
    return {f"val_{name}": to_plain(value) for name, value in figures.items()}


def _describe_steps(job: Job, by_worker: Sequence[int]) -> str:
    """How the steps have fallen to the workers."""
    ranked = zip(ranks_of(job.roles, "worker"), by_worker, strict=True)
    parts = ", ".join(f"worker {n} took {steps}" for n, steps in ranked)
    return f"of {sum(by_worker)} asynchronous steps {parts}"


@contextmanager
def _naming_lost(job: Job, peers: Sequence[str]) -> Iterator[None]:
    """Say which server was lost, where TensorFlow says that one was."""
    try:
        yield
    except tf.errors.UnavailableError as error:
        found = re.search(r"/job:(\w+)/replica:\d+/task:(\d+)", str(error))
        role, index = (found[1], int(found[2])) if found else ("ps", 0)
        rank = ranks_of(job.roles, role)[index]
        host = split_address(peers[rank])[0]
        raise PeerLostError(rank, host, f"({role} {index}) does not answer") from error
