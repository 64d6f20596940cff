"""The chief in training with parameter servers, from the files of its job to the trained model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Alone
from pybackend.core.data.rows import Rows, StoredRows
from pybackend.core.engine.checkpoint.training_state import change_rate
from pybackend.core.engine.evaluation import build_metrics
from pybackend.core.engine.lifecycle import describe_model, describe_training, open_checkpoints
from pybackend.core.engine.replica import build_variables
from pybackend.core.engine.save import SavingPlan, encode_trained, plan_saving, write_model
from pybackend.core.engine.statistics.metrics import to_plain
from pybackend.core.engine.statistics.probes import choose_rows, probe_metrics
from pybackend.core.engine.train import Training
from pybackend.core.errors import InputError, PeerLostError
from pybackend.core.job.job import TrainingJob, argument_of
from pybackend.core.job.messages import Answers, Begun, Emit, EpochEnded, Note, Phase
from pybackend.core.job.report import Audit
from pybackend.core.job.storage_options import pointing_to
from pybackend.core.job.value_codec import encode_state
from pybackend.core.model.checks import check_model
from pybackend.core.model.compare import hash_weights
from pybackend.core.model.inputs_outputs import reshape_rows
from pybackend.core.model.transfer import LoadedModel, load_job_model
from pybackend.core.model.view import ModelView, has_own, list_other_variables
from pybackend.core.net.rendezvous import split_address
from pybackend.core.parameter_server import blocks
from pybackend.core.parameter_server.scheduled_steps import ScheduledSteps
from pybackend.core.tf_config import ranks_of
from pybackend.core.words import call_of, setting, show

Counts = Mapping[str, Sequence[int]]
History = dict[str, list[Any]]


def train_as_chief(
    job: TrainingJob, folder: Path, counts: Counts, emit: Emit, answers: Answers
) -> Training:
    """Train the model of a job on the parameter servers, to the last epoch, and write it.

    All servers are already running. The current folder is this process's own, ``folder``, with its
    shard of the rows. ``counts`` has the rows of every rank's shard, by data set, and ``answers``
    messages from observers of the training. Raises `InputError` if parameter servers cannot train
    the model.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    emit(Phase("loading the model"))
    # In this process, to check the model on rows, to evaluate and to save it.
    loaded = load_job_model(job, folder)
    model = loaded.model
    written = StoredRows(folder / "train")
    rows = reshape_rows(written, model)
    inputs = build_variables(model, rows)
    view = ModelView(model)
    check_without_common_steps(view, job)
    _check_metrics(model, rows, job)
    steps_per_epoch = _count_steps(job, counts)
    plan = plan_saving(loaded, view.renewed(), inputs, job, emit)
    checkpoints = EpochCheckpoints(job, loaded, plan, inputs, counts, emit)
    # Loaded again, because variables live where a model was built: here on parameter servers.
    with strategy.scope():
        shared = load_job_model(job, folder).model
        build_variables(shared, rows)
    _copy_state(model, shared)
    blocks.move_shares(job, counts)
    steps = ScheduledSteps(strategy, shared, model, rows, written.spec, job)
    validation = _validation(model, folder, job, counts)
    emit(Begun())
    emit(Phase("taking steps"))
    began = time.monotonic()
    with steps.exact_iterations():
        for epoch in range(checkpoints.epoch, job.epochs):
            epoch_began = time.monotonic()
            logs = steps.run(steps_per_epoch)
            _copy_state(shared, model)
            if validation is not None and job.validates(epoch):
                logs |= _validate(model, validation)
            for name, value in logs.items():
                checkpoints.history.setdefault(name, []).append(value)
            emit(EpochEnded(epoch + 1, job.epochs, time.monotonic() - epoch_began, logs))
            checkpoints.write(epoch + 1)
            if job.is_observed and answers.wait_for_epoch(epoch + 1):
                break
    seconds = time.monotonic() - began
    by_worker = steps.by_worker
    emit(Note(_describe_steps(job, by_worker)))
    checkpoints.finish()
    with pointing_to(job.checkpoint):
        digest = write_model(loaded, plan, folder, job.model_uri, emit)
    return Training(
        history=checkpoints.history,
        rows=counts["train"][0],
        steps=sum(by_worker),
        by_worker=tuple(by_worker),
        seconds=seconds,
        weights_sha256=hash_weights(model),
        model_sha256=digest,
        inputs=inputs,
        waited=None,
        audit=Audit(skipped=["asynchronous workers have no common steps"]),
    )


def _copy_state(source: Any, target: Any) -> None:
    for one, other in zip(variables_of(source), variables_of(target), strict=True):
        other.assign(one.numpy())


def _check_metrics(model: Any, rows: Rows, job: TrainingJob) -> None:
    kind = probe_metrics(model, choose_rows(model, rows, job), job, Alone())
    build_metrics(model, rows)
    if kind == "not sums":
        raise InputError(
            f"{setting(exchange=call_of('ParameterServer', ...))} adds up the metrics of "
            "individual steps, but some metrics of this model are not sums over rows: remove them "
            "from compile(), or omit `exchange`"
        )


def _count_steps(job: TrainingJob, counts: Counts) -> int:
    """Return the total number of batches over all workers that have rows."""
    shares = blocks.count_shares(job, counts["train"])
    if 0 in shares:
        rank = ranks_of(job.roles, "worker")[shares.index(0)]
        raise InputError(f"worker {rank} gets no rows of `data`: use fewer workers")
    return sum(-(-share // job.batch_size) for share in shares)


def _validation(model: Any, folder: Path, job: TrainingJob, counts: Counts) -> Any:
    if "validation" not in counts:
        return None
    written = StoredRows(folder / "validation")
    rows = blocks.iterate_blocks(blocks.VALIDATION, written.spec, reshape_rows(written, model).spec)
    count = sum(counts["validation"])
    return blocks.batch(rows.apply(tf.data.experimental.assert_cardinality(count)), job)


def _validate(model: Any, validation: Any) -> dict[str, Any]:
    found = model.evaluate(validation, verbose=0, return_dict=True)
    metrics = {"loss": found.pop("loss"), **found}
    return {f"val_{name}": to_plain(value) for name, value in metrics.items()}


def _describe_steps(job: TrainingJob, by_worker: Sequence[int]) -> str:
    ranked = zip(ranks_of(job.roles, "worker"), by_worker, strict=True)
    parts = ", ".join(f"worker {n} took {steps}" for n, steps in ranked)
    return f"{sum(by_worker)} asynchronous steps: {parts}"


@contextmanager
def naming_lost(job: TrainingJob, peers: Sequence[str]) -> Iterator[None]:
    """Raise `PeerLostError` for the server if TensorFlow reports that one was lost."""
    try:
        yield
    except tf.errors.UnavailableError as error:
        found = re.search(r"/job:(\w+)/replica:\d+/task:(\d+)", str(error))
        role, index = (found[1], int(found[2])) if found else ("ps", 0)
        rank = ranks_of(job.roles, role)[index]
        host = split_address(peers[rank])[0]
        raise PeerLostError(rank, host, f"({role} {index}) does not answer") from error


def check_without_common_steps(view: ModelView, job: TrainingJob) -> None:
    """Raise `InputError` if a model needs synchronized steps on all workers, before the first step.

    The error names the part of the model, and what to use instead.
    """
    check_model(view, replace(job, workers=1))
    if found := _find_obstacle(view):
        raise InputError(
            f"{setting(exchange=call_of('ParameterServer', ...))} cannot train {found}; or "
            "omit `exchange`: synchronous training supports it"
        )


def _find_obstacle(view: ModelView) -> str | None:
    model, optimizer = view.model, view.model.optimizer
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    own, scale = "a model with a custom", "with a LossScaleOptimizer, whose scale all steps share"
    accumulates = "with gradient_accumulation_steps, which workers would change simultaneously"
    averages = f"with {setting(use_ema=True)}, whose averages need a single sequence of steps"
    found = {
        f"{own} train_step: override compute_loss instead": has_own(model, "train_step"),
        f"{own} compute_metrics: pass metrics to compile()": has_own(model, "compute_metrics"),
        f"{scale}: use bfloat16 or float32": is_scaled,
        f"{accumulates}: remove it": optimizer.gradient_accumulation_steps,
        f"{averages}: remove it": optimizer.use_ema,
        f"with {setting(run_eagerly=True)}: its workers run graphs": model.run_eagerly,
    }
    stateful = [(one, "stateful") for one in view.layers if getattr(one, "stateful", False)]
    for layer, name in [*stateful, *((one, "synchronized") for one in view.synchronized)]:
        instead = setting(**{name: False})
        text = f"layer {show(layer.name)} with {setting(**{name: True})}: use {instead}"
        found[text] = True
    return next((text for text, is_so in found.items() if is_so), None)


def variables_of(model: Any) -> list[Any]:
    """Return the variables in the order used in checkpoints: weights, others, the optimizer's."""
    return [*model.weights, *list_other_variables(model), *model.optimizer.variables]


class EpochCheckpoints:
    """Checkpoints, if requested, after each epoch of a training run, when all steps have ended.

    `epoch` and `history` are where training begins: the completed epochs, and their metrics.
    """

    def __init__(
        self,
        job: TrainingJob,
        loaded: LoadedModel,
        plan: SavingPlan,
        inputs: Any,
        counts: Mapping[str, Sequence[int]],
        emit: Emit,
    ) -> None:
        self._model, self._timeout = loaded.model, job.timeout
        self.epoch, self.history = job.initial_epoch, History()
        self._checkpoints = None
        if job.checkpoint is None:
            return
        described = describe_training(job, self._model, [], {}, Alone())
        # Which process has which rows makes no difference.
        described |= {argument_of(name): [[sum(rows), ""]] for name, rows in counts.items()}
        manifest = describe_model(job, self._model, plan, inputs, described)
        found = open_checkpoints(job, Alone(), manifest, lambda: encode_trained(loaded, plan), emit)
        self._checkpoints, state = found, found.start.state
        if state is not None:
            self.epoch, self.history = found.start.epoch, state["history"]
            for variable, value in zip(variables_of(self._model), state["variables"], strict=True):
                variable.assign(value)
            change_rate(self._model.optimizer, state)

    def write(self, epoch: int) -> None:
        """Write a checkpoint of the current model, after this number of epochs."""
        found = self._checkpoints
        if found is None or found.writer is None or found.manifest is None:
            return
        found.writer.check()  # a thread writes: failures of earlier checkpoints are raised here
        arrays = [np.array(variable.numpy()) for variable in variables_of(self._model)]
        state = encode_state({"variables": arrays, "history": self.history})
        found.writer.submit(replace(found.manifest, epoch=epoch), state)

    def finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait(self._timeout)
