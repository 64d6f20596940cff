"""Less common options of a training run, in groups that reject invalid combinations."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import (
    MAX_WORKERS,
    as_number,
    check_choice,
    check_flag,
    check_fraction,
    check_positive,
    check_whole_number,
    name_arguments,
)
from pybackend.core.job.learning_rate import ScaleLearningRate, Scaling, check_scale_lr
from pybackend.core.words import call_of, either, one_of, setting, show, term


def _explain_scale(name: str) -> str | None:
    """Explain why there is no ``scale_lr`` if each worker takes steps of its own."""
    if name != "scale_lr":
        return None
    return "a step has the rows of one worker, regardless of the number of workers. Omit it"


Compression = Literal["fp16", "bf16"] | None
Promise = tuple[str, tuple[int | None, ...]]
_COMPRESSIONS = [None, "fp16", "bf16"]
_RECORD_TYPES = ("int64", "float32", "bytes", "string")
_LIST = "[]"
ColumnEncoding = Literal["one_hot", "integer"]
ENCODINGS: tuple[str, ...] = get_args(ColumnEncoding)


@name_arguments
@dataclass(frozen=True)
class Elastic:
    """Let workers leave and join: a value for the argument ``workers``.

    A lost worker costs the step that failed: the others share the rest of the epoch's rows. New
    workers join between epochs, or when a worker is lost. `barrier_train` describes the exceptions,
    and what takes the place of a lost worker.

    Parameters
    ----------
    workers
        Number of workers at the start. None (default): the same as without `Elastic`, but at least
        ``min`` and at most ``max``.
    min
        The training continues without workers that fail or are preempted, as long as this many are
        left.
    max
        Workers are started until there are this many, as soon as there are slots for them. If it is
        larger than ``workers``, spare workers join after the first epochs. None (default): lost
        workers are not replaced.

    Raises
    ------
    InputError
        A number is wrong. The message names it and the expected value.
    """

    workers: int | None = None
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "min", "max"):
            value = getattr(self, name)
            if value is not None or name == "min":
                checked = check_whole_number(name, value, least=1, most=MAX_WORKERS)
                object.__setattr__(self, name, checked)
        most = math.inf if self.max is None else self.max
        if not self.min <= (self.min if self.workers is None else self.workers) <= most:
            raise InputError(
                f"`workers` of {term('Elastic')} must be at least `min` and at most `max`, but "
                f"{setting(workers=self.workers)}, {setting(min=self.min)} and "
                f"{setting(max=self.max)}"
            )


@name_arguments
@dataclass(frozen=True)
class ParameterServer:
    """Train asynchronously on parameter servers: a value for the argument ``exchange``.

    There is no ``scale_lr``, because a step uses the rows of one worker.

    Parameters
    ----------
    servers
        Number of parameter servers, which divide the weights.

    Raises
    ------
    InputError
        ``servers`` is not a whole number of at least 1.
    """

    servers: int = 1

    def __post_init__(self) -> None:
        checked = check_whole_number("servers", self.servers, least=1, most=MAX_WORKERS - 2)
        object.__setattr__(self, "servers", checked)

    explain_missing = staticmethod(_explain_scale)


@name_arguments
@dataclass(frozen=True)
class Exchange:
    """Average the gradients in every step, so that the result equals that of one process.

    With one worker these options have no effect.

    Parameters
    ----------
    transport
        ``"tcp"`` (default), or ``"tf"`` for TensorFlow's collectives (NCCL between GPUs).
        TensorFlow's servers accept every connection: use ``"tf"`` only on networks that you trust.
    compression
        ``"fp16"`` or ``"bf16"`` halves the number of bytes sent. Rounding errors are added to later
        steps (error feedback), but the result no longer equals that of one process. None (default):
        exact. Needs ``transport="tcp"``.
    bucket_mb
        Megabytes of gradients per message, sent while the backward pass is still running.
        ``float("inf")``: all gradients at once, after the backward pass.
    loss_over
        Rows over which the loss is computed. ``"rows"`` (default): each worker computes the loss of
        its own rows, which must be a mean over rows. ``"global batch"``: in each step the workers
        exchange their outputs, labels and weights, and compute the loss of all rows. The loss may
        then compare or sum the rows of a batch (contrastive, ranking, correlation, soft F1, sums),
        and masks may reach several losses.
    encrypt
        True encrypts and authenticates the data that the workers exchange (TLS 1.3). None
        (default): only between machines. False: never, for fast networks that you trust.
    audit
        True (default) repeats some steps in one process, on the rows of all workers, and compares
        the results: the first step of the first epoch and its last one, if that has another number
        of rows, the first step of the second epoch, and as many steps as fit into 2 % of the time.
        The numbers of the rows of all steps are checked, too. A difference that rounding does not
        explain raises an error; with ``"warn"``, it produces a note. Only the audit finds
        losses that are not a mean over rows. With ``compression``, the repeated step is exchanged
        uncompressed. False: no audit.
    shard_optimizer
        True: each worker has the optimizer's state for only its part of the weights, updates that
        part, and gets the new values of the others (ZeRO, stage 1). With N workers and P bytes of
        weights, Adam's state takes 2 P / N bytes on each worker instead of 2 P, if no single
        variable is larger than that. The result is the same up to rounding. No more bytes are
        sent, except that tables with sparse gradients are sent whole, and that hosts with several
        workers do not first sum in memory. While rank 0 writes the model or a checkpoint, it holds
        the state of all workers. False (default): each worker has all state. Needs
        ``transport="tcp"`` without ``compression``.
    scale_lr
        ``"linear"`` or ``"sqrt"``: multiplies the learning rate by the number of workers or by its
        square root, because a step uses the rows of all workers. `ScaleLearningRate` adds warm-up
        and decay. The history reports the rate of each epoch's last step as ``learning_rate``. Not
        supported for data sets of global batches. None (default): the optimizer's rate.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    transport: Literal["tcp", "tf"] = "tcp"
    compression: Compression = None
    bucket_mb: float = 25.0
    loss_over: Literal["rows", "global batch"] = "rows"
    encrypt: bool | None = None
    audit: bool | Literal["warn"] = True
    shard_optimizer: bool = False
    scale_lr: ScaleLearningRate | Scaling | None = None

    def __post_init__(self) -> None:
        check_choice("audit", self.audit, choices=[True, False, "warn"])
        check_choice("loss_over", self.loss_over, choices=["rows", "global batch"])
        check_choice("transport", self.transport, choices=["tcp", "tf"])
        check_choice("compression", self.compression, choices=_COMPRESSIONS)
        if self.compression is not None and self.transport != "tcp":
            raise InputError(f"`compression` needs {setting(transport='tcp')}")
        check_flag("shard_optimizer", self.shard_optimizer)
        if self.shard_optimizer and (self.transport != "tcp" or self.compression is not None):
            raise InputError(
                f"`shard_optimizer` needs {setting(transport='tcp')} and no `compression`: each "
                "worker gets the exact mean gradients of its own weights only"
            )
        check_choice("encrypt", self.encrypt, choices=[None, True, False])
        if self.encrypt and self.transport != "tcp":
            raise InputError(
                f"`{setting(encrypt=True)}` needs {setting(transport='tcp')}: TensorFlow's own "
                "servers cannot encrypt"
            )
        _set(
            self,
            bucket_mb=check_positive("bucket_mb", self.bucket_mb),
            scale_lr=check_scale_lr(self.scale_lr),
        )


@name_arguments
@dataclass(frozen=True)
class LocalSteps:
    """Let each worker take several steps before the weights are averaged (local SGD).

    This suits slow networks, and changes the result. The loss is always computed on each worker's
    own rows, even if it is not a mean over rows. With one worker these options have no effect.
    There is no ``scale_lr``, because a step uses the rows of one worker.

    Parameters
    ----------
    steps
        Number of steps between averages, at least 2.
    learning_rate, momentum
        Learning rate and momentum with which the average change of the weights is applied. 0.7 and
        0.9 correspond to DiLoCo.
    compression, encrypt
        As in `Exchange`.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    steps: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    compression: Compression = None
    encrypt: bool | None = None

    def __post_init__(self) -> None:
        _set(
            self,
            steps=check_whole_number("steps", self.steps, least=2),
            learning_rate=check_positive("learning_rate", self.learning_rate, most=1e300),
            momentum=check_fraction("momentum", self.momentum),
        )
        check_choice("compression", self.compression, choices=_COMPRESSIONS)
        check_choice("encrypt", self.encrypt, choices=[None, True, False])

    explain_missing = staticmethod(_explain_scale)


@name_arguments
@dataclass(frozen=True)
class DataOptions:
    """Options for reading columns and files, and for storing rows on the workers.

    Parameters
    ----------
    tensors
        Maps columns to the ``(dtype, shape)`` of a row, which specify how to read bytes
        (little-endian) and what shape arrays must have. ``(dtype, (None,))`` allows arrays of any
        length, which are padded with zeros to the length of the longest row on any worker, and
        ``(dtype, (None, 3))`` arrays of any number of vectors of length 3.
    categories
        Maps columns to the list of their values, which become 0, 1, 2, ... Any other value raises
        an error.
    tfrecord_spec
        Maps features to ``"int64"``, ``"float32"``, ``"bytes"`` or ``"string"``, with ``[]``
        appended for lists. None (default): taken from the manifest of the files, or inferred from
        their first records.
    encode
        Encoding of feature columns that are text or have ``categories``. ``"one_hot"``: one number
        per value, 1 if the row has it, else 0. ``"integer"``: the value's code, for an
        ``Embedding`` layer. Or a mapping from columns to one of these, which can include columns of
        whole numbers. None (default): text is one-hot if it shares an input with other columns,
        text that is an input on its own remains text, and columns with ``categories`` become codes.
        Without ``categories``, the values are those of the training data, sorted
        (`TrainResult.categories`).
    repartition
        False uses a DataFrame's own partitions, whose number must be ``workers``, and gives each
        worker one contiguous range of the rows in files. This reads faster, but sorted rows then
        give the workers different classes.
    in_memory
        True: workers hold their rows in memory if they fit into half of the free memory. Otherwise
        the rows stay on disk, and a note reports that. False (default): all rows are on the
        worker's disk, and memory use does not grow with them. The order of rows is the same either
        way.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    tensors: Mapping[str, Promise] | None = None
    categories: Mapping[str, Sequence[Any]] | None = None
    tfrecord_spec: Mapping[str, str] | None = None
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None = None
    repartition: bool = True
    in_memory: bool = False

    def __post_init__(self) -> None:
        tensors = _check_mapping("tensors", self.tensors)
        categories = _check_mapping("categories", self.categories)
        for column, values in categories.items():
            _check_categories(column, values)
        _check_encode(self.encode)
        if self.tfrecord_spec is not None:
            check_tfrecord_spec(self.tfrecord_spec)
        check_flag("repartition", self.repartition)
        check_flag("in_memory", self.in_memory)
        promises = {column: _check_promise(column, given) for column, given in tensors.items()}
        _set(self, tensors=promises or None, categories=dict(categories) or None)


def check_exchange(value: Any) -> Exchange | LocalSteps | ParameterServer:
    """Check the argument ``exchange``; None is the default `Exchange`."""
    if value is None:
        return Exchange()
    if not isinstance(value, (Exchange, LocalSteps, ParameterServer)):
        raise InputError(
            f"`exchange` must be {one_of('Exchange', 'LocalSteps', 'ParameterServer')}, e.g. "
            f"{call_of('pybackend.Exchange', loss_over='global batch')}, not {show(value)}"
        )
    return value


def check_data_options(value: Any) -> DataOptions:
    """Check the argument ``data_options``; None is the default `DataOptions`."""
    if value is None:
        return DataOptions()
    if not isinstance(value, DataOptions):
        raise InputError(
            f"`data_options` must be {one_of('DataOptions')}, e.g. "
            f"{call_of('pybackend.DataOptions', in_memory=True)}, not {show(value)}"
        )
    return value


def check_tfrecord_spec(spec: Any) -> None:
    """Check that a `tfrecord_spec` maps features to types, before anything is read."""
    if not isinstance(spec, Mapping) or not spec:
        raise InputError(
            "`tfrecord_spec` must map feature names to their types, e.g. "
            f"{show({'image': 'bytes', 'label': 'int64'})}, not {show(spec)}"
        )
    for name, kind in spec.items():
        if not isinstance(name, str):
            raise InputError(f"`tfrecord_spec` has the name {show(name)}; expected a string")
        if not isinstance(kind, str) or kind.removesuffix(_LIST) not in _RECORD_TYPES:
            raise InputError(
                f"`tfrecord_spec` has the type {show(kind)} for {show(name)}; expected "
                f"{', '.join(map(show, _RECORD_TYPES))}, or one of these followed by '[]' for "
                "arrays"
            )


def _set(options: Any, **values: Any) -> None:
    """Set attributes of a frozen object while it is created."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"`{name}` must map column names, not {show(value)}")
    return value


def _check_categories(column: str, values: Any) -> None:
    np = sys.modules.get("numpy")  # if it is not loaded, no value is an array
    is_list = isinstance(values, Sequence) or (np is not None and isinstance(values, np.ndarray))
    if isinstance(values, (str, bytes)) or not is_list:
        raise InputError(
            f"`categories` of {show(column)} must be a list of values, not {show(values)}"
        )
    try:
        different = len(set(values))
    except TypeError:  # lists, or rows of an array
        different = 0
    if not len(values) or different < len(values):
        raise InputError(f"`categories` of {show(column)} must be distinct values, at least one")


def _check_encode(value: Any) -> None:
    given = value.values() if isinstance(value, Mapping) else [value] * (value is not None)
    for encoding in given:
        if not isinstance(encoding, str) or encoding not in ENCODINGS:
            raise InputError(
                f"`encode` must be {show('one_hot')}, {show('integer')}, or map columns to one of "
                f"these, not {show(value)}"
            )
    if isinstance(value, Mapping):
        _check_mapping("encode", value)


def _check_promise(column: str, promise: Any) -> Promise:
    import numpy as np  # here: a worker that only runs a function starts without it

    pair = either("(dtype, shape)", "a list of type and shape")
    expected = f"`tensors` of {show(column)} must be {pair}, e.g. {show(('uint8', (28, 28)))}"
    try:
        dtype, shape = promise
        known = np.dtype(dtype)
        sizes = [shape] if as_number(shape) is not None else list(shape)
    except (TypeError, ValueError):
        raise InputError(f"{expected}, not {show(promise)}") from None
    if known.kind not in "fiub":
        raise InputError(f"{expected}: {show(dtype)} is not a numeric type")
    first: tuple[None, ...] = (None,) if sizes[:1] == [None] else ()
    numbers = [as_number(size) for size in sizes[len(first) :]]
    if not all(number and number > 0 and number.is_integer() for number in numbers):
        any_length = f"only the first may be {either('None', 'NA')}, for any length"
        raise InputError(
            f"{expected}; the sizes in {show(shape)} must be positive whole numbers; {any_length}"
        )
    return dtype, (*first, *(int(size) for size in sizes[len(first) :]))
