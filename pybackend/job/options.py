"""Options of a training that few need, in groups that cannot hold a wrong combination."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pybackend.errors import InputError
from pybackend.job.arguments import (
    as_number,
    check_choice,
    check_flag,
    check_fraction,
    check_positive,
    check_whole_number,
)

Compression = Literal["fp16", "bf16"] | None
Promise = tuple[str, tuple[int | None, ...]]
_COMPRESSIONS = [None, "fp16", "bf16"]
_RECORD_TYPES = ("int64", "float32", "bytes", "string")
_LIST = "[]"
ColumnEncoding = Literal["one_hot", "integer"]
ENCODINGS: tuple[str, ...] = get_args(ColumnEncoding)


@dataclass(frozen=True)
class Exchange:
    """Workers exchange gradients in every step: the result is that of one process.

    With one worker there is nothing to exchange, and these options do nothing.

    Parameters
    ----------
    transport
        What carries the gradients: ``"tcp"``, or ``"tf"`` for TensorFlow's collectives (NCCL
        between GPUs), whose servers serve whoever connects: for networks that you trust.
    compression
        ``"fp16"`` or ``"bf16"`` halves the bytes that are sent. Rounding errors are kept and sent
        later (error feedback), but the result is no longer that of one process. None: exact. Only
        with ``transport="tcp"``.
    bucket_mb
        Megabytes of gradients that are sent together, while the backward pass is still running.
        ``float("inf")``: all at once, after it.
    loss_over
        What the loss is computed over. ``"rows"``: each worker computes the loss of its own rows,
        which must be a mean over rows. ``"global batch"``: the workers send each other their
        outputs, labels and weights in each step, and compute the loss of all rows. Then it may
        compare or sum the rows of a batch (contrastive, ranking, correlation, soft F1, sums), and
        masks may reach several losses.
    encrypt
        Whether what the workers send each other is encrypted and authenticated (TLS 1.3). None:
        what leaves a machine is. False: nothing is, which is for fast networks that you trust.
    audit
        Whether some steps are repeated as one process takes them, on the rows of all workers, and
        what comes of them is compared: the first and the last of the first epoch, the first of the
        second one, and of later ones as many as take 2 % of the time. A difference that rounding
        does not explain is an error; with ``"warn"`` a note. It alone finds losses that are no mean
        over rows. With ``compression`` the repeated step is exchanged without it.

    Raises
    ------
    InputError
        Names the option and what is expected.
    """

    transport: Literal["tcp", "tf"] = "tcp"
    compression: Compression = None
    bucket_mb: float = 25.0
    loss_over: Literal["rows", "global batch"] = "rows"
    encrypt: bool | None = None
    audit: bool | Literal["warn"] = True

    def __post_init__(self) -> None:
        check_choice("audit", self.audit, choices=[True, False, "warn"])
        check_choice("loss_over", self.loss_over, choices=["rows", "global batch"])
        check_choice("transport", self.transport, choices=["tcp", "tf"])
        check_choice("compression", self.compression, choices=_COMPRESSIONS)
        if self.compression is not None and self.transport != "tcp":
            raise InputError("`compression` needs transport='tcp'")
        check_choice("encrypt", self.encrypt, choices=[None, True, False])
        if self.encrypt and self.transport != "tcp":
            raise InputError(
                "`encrypt=True` needs transport='tcp': TensorFlow's own servers cannot encrypt"
            )
        _set(self, bucket_mb=check_positive("bucket_mb", self.bucket_mb))


@dataclass(frozen=True)
class LocalSteps:
    """Each worker takes several steps on its own before the weights are averaged (local SGD).

    This suits slow networks, and changes the result: the loss, too, is that of each worker's own
    rows, whether or not it is a mean over them. With one worker these options do nothing.

    Parameters
    ----------
    steps
        Steps between two averages, at least 2.
    learning_rate, momentum
        How the average change of the weights is applied. 0.7 and 0.9 give DiLoCo.
    compression, encrypt
        As in `Exchange`.

    Raises
    ------
    InputError
        Names the option and what is expected.
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
            learning_rate=check_positive("learning_rate", self.learning_rate),
            momentum=check_fraction("momentum", self.momentum),
        )
        check_choice("compression", self.compression, choices=_COMPRESSIONS)
        check_choice("encrypt", self.encrypt, choices=[None, True, False])


@dataclass(frozen=True)
class DataOptions:
    """How columns and files are read, and where workers keep their rows.

    Parameters
    ----------
    tensors
        Column to ``(dtype, shape)`` of its rows: how bytes are read (little-endian), and the shape
        that arrays must have. ``(dtype, (None,))`` lets arrays have any length: they are padded
        with zeros to the longest of all workers' rows.
    categories
        Column to the list of its values, which become 0, 1, 2, ...; any other value is an error.
    tfrecord_spec
        Feature to ``"int64"``, ``"float32"``, ``"bytes"`` or ``"string"``, with ``[]`` for lists.
        None: as the files' manifest says, or their first records show.
    encode
        How feature columns of text, and those with ``categories``, become numbers: ``"one_hot"``, a
        number for each value, 1 where a row has it, else 0; or ``"integer"``, the value's code, for
        an ``Embedding`` layer. Or column to one of these, also for columns of whole numbers.
        None: text beside other columns of an input is one-hot, text that is an input by itself
        remains text, and columns with ``categories`` become codes. Without ``categories`` the
        values are those of the training data, sorted (`TrainResult.categories`).
    repartition
        False keeps a DataFrame's own partitions, of which there must be ``workers``, and gives each
        worker one stretch of the rows of files: faster to read, but if rows are sorted, workers
        then differ in their classes.
    in_memory
        Workers keep their rows in memory, if they fit into half of what is free there; others stay
        on disk, and a note says so. By default all rows are on the worker's disk, and memory does
        not grow with them. The order is the same.

    Raises
    ------
    InputError
        Names the option and what is expected.
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


def check_exchange(value: Any) -> Exchange | LocalSteps:
    """Check the argument ``exchange``; None is the default `Exchange`."""
    if value is None:
        return Exchange()
    if not isinstance(value, (Exchange, LocalSteps)):
        raise InputError(
            "`exchange` must be an Exchange or a LocalSteps, e.g. "
            f"pybackend.Exchange(loss_over='global batch'), not {value!r}"
        )
    return value


def check_data_options(value: Any) -> DataOptions:
    """Check the argument ``data_options``; None is the default `DataOptions`."""
    if value is None:
        return DataOptions()
    if not isinstance(value, DataOptions):
        raise InputError(
            "`data_options` must be a DataOptions, e.g. "
            f"pybackend.DataOptions(in_memory=True), not {value!r}"
        )
    return value


def check_tfrecord_spec(spec: Any) -> None:
    """Check that a `tfrecord_spec` maps features to types, before anything is read."""
    if not isinstance(spec, Mapping) or not spec:
        raise InputError(
            "`tfrecord_spec` must map the names of features to their types, e.g. "
            f'{{"image": "bytes", "label": "int64"}}, not {spec!r}'
        )
    for name, kind in spec.items():
        if not isinstance(name, str):
            raise InputError(f"`tfrecord_spec` has the name {name!r}; expected a string")
        if not isinstance(kind, str) or kind.removesuffix(_LIST) not in _RECORD_TYPES:
            raise InputError(
                f"`tfrecord_spec` has the type {kind!r} for {name!r}; expected "
                f"{', '.join(map(repr, _RECORD_TYPES))}, or one of these followed by '[]' for "
                "arrays"
            )


def _set(options: Any, **values: Any) -> None:
    """Give a frozen object the values in Python's own types, while it is being made."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"`{name}` must map names of columns, not {value!r}")
    return value


def _check_categories(column: str, values: Any) -> None:
    np = sys.modules.get("numpy")  # without it no value can be its array
    is_list = isinstance(values, Sequence) or (np is not None and isinstance(values, np.ndarray))
    if isinstance(values, (str, bytes)) or not is_list:
        raise InputError(f"`categories` of {column!r} must be a list of values, not {values!r}")
    try:
        different = len(set(values))
    except TypeError:  # lists, or rows of an array
        different = 0
    if not len(values) or different < len(values):
        raise InputError(f"`categories` of {column!r} must be different values, at least one")


def _check_encode(value: Any) -> None:
    given = value.values() if isinstance(value, Mapping) else [value] * (value is not None)
    for encoding in given:
        if not isinstance(encoding, str) or encoding not in ENCODINGS:
            raise InputError(
                "`encode` must be 'one_hot', 'integer', or map columns to one of these, not "
                f"{value!r}"
            )
    if isinstance(value, Mapping):
        _check_mapping("encode", value)


def _check_promise(column: str, promise: Any) -> Promise:
    import numpy as np  # here: a worker that only runs a function starts without it

    expected = f"`tensors` of {column!r} must be (dtype, shape), e.g. ('uint8', (28, 28))"
    try:
        dtype, shape = promise
        known = np.dtype(dtype)
        sizes = [shape] if as_number(shape) is not None else list(shape)
    except (TypeError, ValueError):
        raise InputError(f"{expected}, not {promise!r}") from None
    if known.kind not in "fiub":
        raise InputError(f"{expected}: {dtype!r} is not a type of numbers")
    if sizes == [None]:
        return dtype, (None,)
    numbers = [as_number(size) for size in sizes]
    if not all(number and number > 0 and number.is_integer() for number in numbers):
        raise InputError(f"{expected}; the shape {shape!r} has other than positive whole numbers")
    return dtype, tuple(int(size) for size in sizes)
