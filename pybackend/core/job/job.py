"""Frozen description of a job, used by every launcher and by the workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_flag
from pybackend.core.job.call_options import Check, Shuffle, checks, class_number
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.storage_options import Checkpoint, check_model_options, check_recovery
from pybackend.core.job.worker_options import (
    AnyExchange,
    Elastic,
    Exchange,
    LocalSteps,
    ParameterServer,
    Resources,
    ScaleLearningRate,
    check_scale_lr,
)
from pybackend.core.tf_config import Roles, check_roles, ranks_of
from pybackend.core.words import Language, call_of, setting, show, spoken

LOGGER = logging.getLogger("tfdist")


def _print_log() -> None:
    """Print the log with times to standard error, from the level in the environment on."""
    level = logging.getLevelNamesMapping().get(os.environ.get("TFDIST_LOG", "").upper())
    if level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s tfdist %(levelname)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(level)


_print_log()
# Largest size that the driver, Spark's messages and R's strings support.
MODEL_LIMIT = 1 << 30
# Files that the driver sends to every worker.
FUNCTION = "function.pkl"
# The folder of the rows that the function gets.
ROWS = "train"
MODEL_FILE = "model.keras"
MODEL_OBJECTS = "objects.pkl"
MODEL_DIGESTS = "digests.json"
EXTRAS = "extras.pkl"
# Endings of the names of a trained model's file; the last one, Keras's own, has only weights.
WEIGHTS: Final = "weights.h5"
TRAINED = ("h5", "keras", WEIGHTS)
# Follows the name of a data set that workers read themselves.
SOURCE = ".source.pkl"


def argument_of(dataset: str) -> str:
    """Return the argument that holds ``"train"`` or ``"validation"`` rows."""
    return "data" if dataset == "train" else "validation_data"


@dataclass(frozen=True)
class Job:
    """The work that every worker does, independent of the launcher: base class of all jobs.

    Attributes
    ----------
    workers
        World size.
    exchange
        Options of the exchange; the default `Exchange` if workers do not exchange anything.
    resources
        Resources of each worker.
    seed
        Rank r uses ``seed + r`` for its own randomness (dropout, shuffling).
    roles
        Roles and their numbers of processes, in rank order.
    timeout
        As in `barrier_train`.
    shares_memory
        Whether workers of one host may sum in memory that they share.
    verbose
        0: silent. 1: a line per epoch. 2: also the workers' output.
    reports_lines
        Whether workers report each line that they print.
    reports_steps
        Whether rank 0 reports some of its steps, because a display or an observer shows them.
    is_observed
        Whether rank 0 asks at the end of each epoch whether to continue, because an `Observer`
        is used.
    language
        Language of the messages, because the driver shows them.
    """

    kind: ClassVar[Literal["train", "evaluate", "predict", "run"]]

    workers: int
    exchange: AnyExchange = field(default_factory=Exchange)
    resources: Resources = field(default_factory=Resources)
    seed: int = 0
    roles: Roles = ()
    timeout: float = 300.0
    shares_memory: bool = True
    verbose: int = 1
    reports_lines: bool = False
    reports_steps: bool = False
    is_observed: bool = False
    language: Language = field(default_factory=spoken)

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change between epochs."""
        return False

    @property
    def is_asynchronous(self) -> bool:
        """True if the workers take steps independently, on parameter servers."""
        return isinstance(self.exchange, ParameterServer)

    @property
    def encrypt(self) -> bool | None:
        """True if the workers encrypt what they exchange; None: only between machines."""
        return None if isinstance(self.exchange, ParameterServer) else self.exchange.encrypt

    @property
    def shards_optimizer(self) -> bool:
        """True if each worker has the optimizer's state for a part of the weights only."""
        exchange = self.exchange
        return self.workers > 1 and isinstance(exchange, Exchange) and exchange.shard_optimizer

    @property
    def most_workers(self) -> int:
        """Maximum number of workers at once."""
        return self.workers

    @property
    def keeps_checkpoints(self) -> bool:
        """True if another run can resume where this one ends."""
        return False

    @property
    def can_go_on(self) -> bool:
        """True if training continues, immediately or later, after a preemption."""
        return self.keeps_checkpoints or self.is_elastic

    @property
    def repeats_rows(self) -> bool:
        """True if another run must have the same rows in the same order."""
        return False

    @property
    def shuffles_globally(self) -> bool:
        """True if each worker may use any row of the training data."""
        return False

    @property
    def needs_tensorflow_server(self) -> bool:
        """True if the workers run, or may run, a TensorFlow server."""
        return False

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Return whether training continues without these ranks."""
        return False

    def to_json(self) -> str:
        return encode(self)

    @staticmethod
    def from_json(text: str) -> Job:
        job: AnyJob = decode(text, *get_args(AnyJob))
        return job


@dataclass(frozen=True)
class FunctionJob(Job):
    """Job that calls the user's function or script."""

    kind = "run"

    @property
    def needs_tensorflow_server(self) -> bool:
        return True  # the function may start one


@dataclass(frozen=True)
class ModelJob(Job):
    """Job with a Keras model: base class of training, evaluation and prediction jobs.

    Attributes
    ----------
    batch_size
        Rows per worker and step.
    in_memory
        As in `DataOptions`.
    model_source
        ``"file"`` (a ``.keras`` file) or ``"function"`` (a pickled function).
    epsilon, floatx, dtype_policy, image_data_format
        Keras's defaults on the driver.
    safe_mode
        Whether loading a model must not execute code that it contains.
    feature_names
        Names of the numbers in a row of a table, by input ("" for a single one), for a model that
        only the workers build; None for an input if not known.
    """

    batch_size: int = 32
    in_memory: bool = False
    model_source: Literal["file", "function"] = "file"
    epsilon: float = 1e-7
    floatx: str = "float32"
    dtype_policy: str = "float32"
    image_data_format: str = "channels_last"
    safe_mode: bool = True
    feature_names: tuple[tuple[str, tuple[str, ...] | None], ...] = ()


@dataclass(frozen=True)
class EvaluationJob(ModelJob):
    """Job that evaluates a model."""

    kind = "evaluate"


@dataclass(frozen=True)
class PredictionJob(ModelJob):
    """Job that predicts with a model."""

    kind = "predict"


@dataclass(frozen=True)
class TrainingJob(ModelJob):
    """Job that trains a model. Other attributes are as in `barrier_train`.

    Attributes
    ----------
    batches
        Number of rows over all workers in each step, if the data consists of batches. None:
        ``batch_size`` applies.
    initial_epoch
        Number of epochs trained before, which is the index of the first epoch in this run.
    validation_freq
        Number of epochs between validations, or the numbers of the epochs to validate after, from
        1.
    is_seeded
        Whether the user set the seed, so that the order of rows must be reproducible.
    model_limit
        Size in bytes of the largest model that the driver can receive.
    discards_checkpoints
        Whether the checkpoints are removed at the end of training.
    elastic
        None: all workers are needed, and no others join.
    tensorboard
        An absolute path on the driver's machine, or a URI. None: nothing is written for
        TensorBoard.
    """

    kind = "train"

    epochs: int = 1
    initial_epoch: int = 0
    validation_freq: int | tuple[int, ...] = 1
    batches: tuple[int, ...] | None = None
    steps_per_epoch: int | None = None
    shuffle: Shuffle = True
    class_weight: tuple[tuple[int | str, float], ...] | None = None
    is_seeded: bool = False
    model_uri: str | None = None
    model_limit: int = MODEL_LIMIT
    checkpoint: Checkpoint | None = None
    discards_checkpoints: bool = False
    elastic: Elastic | None = None
    tensorboard: str | None = None

    @property
    def scale_lr(self) -> ScaleLearningRate | None:
        """Rule that scales the learning rate; None: it is not scaled."""
        exchange = self.exchange
        return check_scale_lr(exchange.scale_lr) if isinstance(exchange, Exchange) else None

    @property
    def is_elastic(self) -> bool:
        return self.elastic is not None

    @property
    def most_workers(self) -> int:
        return max(self.workers, (self.elastic and self.elastic.max) or 0)

    @property
    def keeps_checkpoints(self) -> bool:
        return self.checkpoint is not None

    @property
    def repeats_rows(self) -> bool:
        return self.is_seeded or self.keeps_checkpoints

    @property
    def shuffles_globally(self) -> bool:
        return self.shuffle == "global"

    @property
    def needs_tensorflow_server(self) -> bool:
        exchange = self.exchange
        by_tensorflow = isinstance(exchange, Exchange) and exchange.transport == "tf"
        return self.is_asynchronous or (by_tensorflow and self.workers > 1)

    @property
    def has_global_loss(self) -> bool:
        """True if the workers compute the loss of the global batch together."""
        return isinstance(self.exchange, Exchange) and self.exchange.loss_over == "global batch"

    @property
    def is_audited(self) -> bool:
        """True if steps are compared with the same steps in one process."""
        return isinstance(self.exchange, Exchange) and bool(self.exchange.audit)

    def can_lose(self, ranks: Collection[int]) -> bool:
        # With parameter servers, workers take steps independently: one that is left is enough.
        return self.is_asynchronous and set(ranks_of(self.roles, "worker")) > set(ranks)

    def validates(self, epoch: int) -> bool:
        """Return whether to validate after an epoch, following Keras; ``epoch`` counts from 0."""
        chosen = self.validation_freq
        return (epoch + 1) % chosen == 0 if isinstance(chosen, int) else epoch + 1 in chosen


AnyJob = FunctionJob | EvaluationJob | PredictionJob | TrainingJob
Kind = TypeVar("Kind", bound=Job)


def make_job(kind: type[Kind], arguments: Mapping[str, Any]) -> Kind:
    """Check the arguments of a call and build a job from them; missing ones get their defaults.

    If the seed is None, a random one is drawn.
    """
    wanted = {entry.name for entry in fields(kind)} & arguments.keys()
    every = {**checks(), **_DERIVED}
    known = {name: check(name, arguments[name]) for name, check in every.items() if name in wanted}
    known |= _read_groups(kind, arguments)
    known["reports_lines"] = known.get("verbose", 1) > 1 or LOGGER.isEnabledFor(logging.DEBUG)
    job = kind(**known)
    if not isinstance(job, TrainingJob):
        return job
    if job.initial_epoch >= job.epochs:
        last = f"`epochs` ({job.epochs}, the number of the last epoch)"
        raise InputError(f"`initial_epoch` must be below {last}, not {job.initial_epoch}")
    check_elastic(job)
    return replace(job, is_seeded=arguments.get("seed") is not None)


def _read_groups(kind: type[Job], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job from the options that are objects."""
    found: dict[str, Any] = {}
    if "recovery" in arguments:
        recovery = check_recovery(arguments["recovery"])
        found |= {"checkpoint": recovery.checkpoint, "timeout": recovery.timeout}
    if "model_options" in arguments:
        options = check_model_options(arguments["model_options"])
        found["safe_mode"] = options.safe_mode
        if issubclass(kind, TrainingJob):
            found["model_uri"] = options.file
        elif options.file is not None:
            raise InputError("`uri` of `model_options` is only for training, which writes a model")
    return found


def check_elastic(job: TrainingJob) -> None:
    """Reject options not allowed in elastic training."""
    if job.elastic is None:
        return
    exchange = job.exchange
    if isinstance(exchange, LocalSteps):
        named = setting(exchange=call_of("LocalSteps", ...))
        reason = "the weights of a lost worker would be lost"
    elif isinstance(exchange, ParameterServer):
        named = setting(exchange=call_of("ParameterServer", ...))
        reason = "its workers take steps independently, so training continues anyway if one is lost"
    elif exchange.compression is not None:
        named = setting(compression=exchange.compression)
        reason = "the rounding errors that a lost worker still had to send would be lost"
    elif exchange.shard_optimizer:
        named = setting(shard_optimizer=True)
        reason = "the optimizer's state of a lost worker would be lost. Use a fixed number of "
        reason += "workers, with `recovery`"
    elif exchange.transport != "tcp":
        named = setting(transport=exchange.transport)
        reason = "workers can neither leave nor join TensorFlow's collectives"
    elif job.steps_per_epoch is not None:
        named = "`steps_per_epoch`"
        reason = "the first rows of an epoch depend on the workers of earlier epochs"
    else:
        return
    raise InputError(
        f"{named} cannot be combined with {setting(workers=call_of('Elastic', ...))}: {reason}"
    )


def code_classes(job: TrainingJob, levels: Sequence[Any] | None) -> TrainingJob:
    """Return the job with ``class_weight`` by class code instead of by level of the label.

    The levels are in the order of their codes; None: the label is numeric. Raises `InputError` if a
    class is neither a level nor a code, or is named twice.
    """
    if job.class_weight is None:
        return job
    known = [str(level) for level in levels or ()]
    are_levels = all(key in known for key, _ in job.class_weight)
    codes: dict[int, float] = {}
    # Keys that are not levels come first, so that an error names one of them.
    for key, weight in sorted(job.class_weight, key=lambda pair: pair[0] in known):
        code = known.index(str(key)) if are_levels else class_number(key, known)
        if code in codes:
            raise InputError(f"`class_weight` has the class {show(key)} twice")
        codes[code] = weight
    return replace(job, class_weight=tuple(sorted(codes.items())))


# Fields of jobs that are derived from options of the calls; those have checks of their own.
_DERIVED: dict[str, Check] = {
    **dict.fromkeys(("in_memory", "discards_checkpoints", "shares_memory"), check_flag),
    **dict.fromkeys(("elastic", "tensorboard"), lambda _, value: value),
    "roles": lambda _, value: check_roles(value),
}
