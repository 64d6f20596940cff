"""Options for what a run reads and writes: data, checkpoints, the model, files for TensorBoard."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

from pybackend.core.errors import ClusterError, InputError, SerializationError, WorkerFailedError
from pybackend.core.job.arguments import (
    Whole,
    as_number,
    check_fields,
    check_flag,
    check_group,
    check_seconds,
    check_whole_number,
    name_arguments,
    wrong,
)
from pybackend.core.words import call_of, either, listed, one_of, setting, show

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")
# Type and shape of a column's row.
Promise = tuple[str, tuple[int | None, ...]]
_RECORD_TYPES = ("int64", "float32", "bytes", "string")
_LIST = "[]"
ColumnEncoding = Literal["one_hot", "integer"]
ENCODINGS: tuple[str, ...] = get_args(ColumnEncoding)


@dataclass(frozen=True)
class Checkpoint:
    """Part of a `Recovery` in a job: the folder, which always exists, and the times of saving."""

    uri: str
    every: int | str = "epoch"
    keep: int = 2
    resume: bool = False

    @property
    def steps(self) -> int | None:
        """Number of steps between checkpoints, if ``every`` is a number of steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def seconds(self) -> float | None:
        """Number of seconds between checkpoints, if ``every`` is a time."""
        span = _SPAN.fullmatch(self.every) if isinstance(self.every, str) else None
        return float(span[1]) * _UNITS[span[2]] if span else None


def _explain_folder(name: str) -> str | None:
    return "did you mean `uri`?" if name in ("checkpoint", "folder", "path") else None


@name_arguments
@dataclass(frozen=True)
class Recovery:
    """Save the state of a training run, resume it, and restart its workers.

    With ``uri``, the state of training is saved in checkpoints. A checkpoint holds the weights and
    all other variables of the model, its loss, metrics and optimizers, the random generators of
    each worker, callback attributes that are plain data or arrays, and the history. It is written
    in the background, and is either complete or absent. A training run that resumes from it ends
    with weights and history that are bit-for-bit identical to those of an uninterrupted run.
    Callbacks must have the same settings, except for paths. The following is not saved:

    - TensorFlow's own stateful random operations (``tf.random.uniform``; ``keras.random`` with a
      ``SeedGenerator`` is saved);
    - Python attributes that callbacks change on layers or optimizers (``trainable``, ``clipnorm``,
      a dropout's ``rate``; a learning rate is a variable, so it is saved);
    - the output of callbacks: files contain the repeated epochs twice, except for a `CSVLogger`
      file on a disk.

    If a worker receives SIGTERM, as happens before a preemption, all workers save one more
    checkpoint, at the same step, and exit.

    With ``jit_compile=True``, the results are identical only if the uninterrupted run uses a
    checkpoint, too, because XLA rounds differently without one.

    Parameters
    ----------
    uri
        A folder for this training run only: a path that the machines of all workers share, or a URI
        for fsspec. On one machine it may be any path. None (default): nothing is saved.
    every
        Time between checkpoints: ``"epoch"`` (default), a number of steps, or a time such as
        ``"600s"``, ``"10min"`` or ``"1h"``. The final state is always saved.
    keep
        Maximum number of checkpoints. Training stops with an error if this many in a row, but at
        least two, could not be written.
    resume
        True: resume from the newest intact checkpoint, or start from the beginning if there is
        none. False (default): the folder must not contain checkpoints.
    restarts
        Number of times that the workers are restarted after one was lost, killed or stopped, or ran
        out of memory: from the newest checkpoint, or without ``uri`` from the beginning. With
        ``uri``, they are also restarted after a preemption (SIGTERM, an eviction) and after the
        time limit of a job. Errors that the model, the data or a callback raises are not retried.
    timeout
        Seconds that workers wait for each other to start. After the same time, a worker counts as
        lost if it was stopped or its machine does not answer. For a worker that is merely slow, the
        others wait up to six hours, and a note names it once a minute.
    pause
        Seconds before a restart if the workers could not be started, as when a host boots. The
        pause grows by this much with each restart.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    uri: str | os.PathLike[str] | None = None
    every: int | str = "epoch"
    keep: int = 2
    resume: bool = False
    restarts: int = 0
    timeout: float = 300.0
    pause: float = 5.0

    explain_missing = staticmethod(_explain_folder)

    def __post_init__(self) -> None:
        check_fields(
            self,
            uri=lambda _, value: check_uri(value),
            every=_check_every,
            keep=Whole(1),
            resume=check_flag,
            restarts=Whole(0),
            timeout=check_seconds,
            pause=check_seconds,
        )
        for one in fields(self)[1:4]:
            given = {one.name: getattr(self, one.name)}
            if self.uri is None and given[one.name] != one.default:
                raise InputError(
                    f"{setting(**given)} needs `uri`, the folder of the checkpoints, e.g. "
                    f"{call_of('Recovery', '/shared/run1', **given)}"
                )

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The part for jobs; None: nothing is saved."""
        if self.uri is None:
            return None
        return Checkpoint(os.fspath(self.uri), self.every, self.keep, self.resume)


def check_recovery(value: Any) -> Recovery:
    """Check the argument ``recovery``; a path or URI is the folder, and None the default."""
    if value is None or isinstance(value, Recovery):
        return value or Recovery()
    if isinstance(value, (str, os.PathLike)):
        return Recovery(value)
    example = call_of("pybackend.Recovery", "/shared/run1", every="10min")
    raise wrong("recovery", f"{one_of('Recovery')}, a path or a URI, e.g. {example}", value)


def without_folder(value: Any) -> Recovery:
    """Return the argument ``recovery`` without checkpoints."""
    given = check_recovery(value)
    return replace(given, uri=None, every="epoch", keep=2, resume=False)


def check_uri(value: Any, owner: str = "checkpoint") -> str:
    """Check the folder of checkpoints, or another owner's URI; a path becomes absolute."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`uri` of a {owner} must be a path or URI, not {show(value)}")
    uri = os.fspath(value)
    # Workers have another working directory.
    return uri if "://" in uri else os.path.abspath(uri)


def _check_every(name: str, value: Any) -> int | str:
    span = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if value == "epoch" or (span and float(span[1]) > 0):
        return str(value)
    if as_number(value) is None:
        times = listed(map(show, ("600s", "10min", "1h")))
        expected = f"{show('epoch')}, a number of steps, or a time such as {times}"
        raise InputError(f"`every` of a checkpoint must be {expected}, not {show(value)}")
    return check_whole_number(name, value, least=1)


@contextmanager
def pointing_to(
    checkpoint: Checkpoint | None, has_checkpoint: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Add to errors in the block how to load the saved checkpoint, if this process can see one.

    An `OSError` or `MemoryError` becomes a `SerializationError`.
    """
    try:
        yield
    except WorkerFailedError as error:
        if checkpoint is None or error.exception_type == "InputError":  # it would fail again
            raise
        raise error.advise(_describe(checkpoint, has_checkpoint())) from None
    except (ClusterError, SerializationError, OSError, MemoryError) as error:
        if checkpoint is None or "load_checkpoint(" in str(error):
            raise
        kind = ClusterError if isinstance(error, ClusterError) else SerializationError
        message = str(error) or "out of memory"
        raise kind(f"{message}. {_describe(checkpoint, has_checkpoint())}") from error


def _describe(checkpoint: Checkpoint, is_seen: bool) -> str:
    uri, which = repr(checkpoint.uri), "the newest one" if is_seen else "it"
    seen = f"Checkpoints are at {uri}:"
    if not is_seen:
        seen = f"This session sees no checkpoint at {uri}. If the workers have written one there,"
    return (
        f"{seen} the same call with {call_of('Recovery', ..., resume=True)} resumes from {which}, "
        f"and load_checkpoint({uri}) returns its model"
    )


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
        check_fields(
            self,
            tensors=partial(_check_columns, check=_check_promise),
            categories=partial(_check_columns, check=_check_categories),
            tfrecord_spec=lambda _, spec: check_tfrecord_spec(spec),
            encode=_check_encode,
            repartition=check_flag,
            in_memory=check_flag,
        )


def check_data_options(value: Any) -> DataOptions:
    """Check the argument ``data_options``; None is the default `DataOptions`."""
    return check_group("data_options", value, DataOptions, in_memory=True)


def check_tfrecord_spec(spec: Any) -> Mapping[str, str]:
    """Check that a `tfrecord_spec` maps features to types, before anything is read; return it."""
    if not isinstance(spec, Mapping) or not spec:
        example = f"e.g. {show({'image': 'bytes', 'label': 'int64'})}, not {show(spec)}"
        raise InputError(f"`tfrecord_spec` must map feature names to their types, {example}")
    for name, kind in spec.items():
        if not isinstance(name, str):
            raise InputError(f"`tfrecord_spec` has the name {show(name)}; expected a string")
        if not isinstance(kind, str) or kind.removesuffix(_LIST) not in _RECORD_TYPES:
            types = f"{', '.join(map(show, _RECORD_TYPES))}, or one of these followed by '[]'"
            unfit = f"`tfrecord_spec` has the type {show(kind)} for {show(name)}"
            raise InputError(f"{unfit}; expected {types} for arrays")
    return spec


def _check_columns(
    name: str, value: Any, check: Callable[[str, Any], Any] = lambda _, given: given
) -> dict[str, Any] | None:
    """Check what an option has for each column; None if it has no columns."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"`{name}` must map column names, not {show(value)}")
    return {column: check(column, given) for column, given in value.items()} or None


def _check_categories(column: str, values: Any) -> Any:
    np = sys.modules.get("numpy")  # if it is not loaded, no value is an array
    is_list = isinstance(values, Sequence) or (np is not None and isinstance(values, np.ndarray))
    if isinstance(values, (str, bytes)) or not is_list:
        expected = "must be a list of values"
        raise InputError(f"`categories` of {show(column)} {expected}, not {show(values)}")
    try:
        different = len(set(values))
    except TypeError:  # lists, or rows of an array
        different = 0
    if not len(values) or different < len(values):
        raise InputError(f"`categories` of {show(column)} must be distinct values, at least one")
    return values


def _check_encode(name: str, value: Any) -> Any:
    for encoding in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(encoding, str) or encoding not in ENCODINGS:
            known = ", ".join(map(show, ENCODINGS))
            raise wrong(name, f"{known}, or map columns to one of these", value)
    if isinstance(value, Mapping):
        _check_columns(name, value)
    return value


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
        rule = f"the sizes in {show(shape)} must be positive whole numbers; only the first may be"
        raise InputError(f"{expected}; {rule} {either('None', 'NA')}, for any length")
    return dtype, (*first, *(int(size) for size in sizes[len(first) :]))


@name_arguments
@dataclass(frozen=True)
class ModelOptions:
    """Options for custom classes of a model, and for the file of the trained model.

    Parameters
    ----------
    uri
        Only in training: where rank 0 writes the trained model, instead of sending it through the
        driver: a path that all hosts share, or a URI for fsspec, that ends in .h5 or .keras. Needed
        for models of a gigabyte or more. None (default): the model returns to this session.
    custom_objects
        Maps names to classes or functions, for custom layers, losses and metrics. The custom
        classes and loss functions of a model that you pass are found without it.
    safe_mode
        False: a model built by a function may be returned as a complete file, even if it contains
        Python code (a ``Lambda`` layer). True (default): only its weights are returned, and the
        function rebuilds the model here. A model that you pass needs no such permission.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    uri: str | os.PathLike[str] | None = None
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True

    def __post_init__(self) -> None:
        check_fields(
            self, uri=_check_model_uri, custom_objects=_check_custom_objects, safe_mode=check_flag
        )

    @property
    def file(self) -> str | None:
        return None if self.uri is None else os.fspath(self.uri)


def check_model_options(value: Any) -> ModelOptions:
    """Check the argument ``model_options``; None is the default `ModelOptions`."""
    return check_group("model_options", value, ModelOptions, uri="s3://bucket/model.h5")


def _check_model_uri(name: str, value: Any) -> str:
    uri = check_uri(value, "model")
    if not (text := os.fspath(value)).endswith((".h5", ".keras")):
        raise InputError(f"`uri` of a model must end in .h5 or .keras, not {show(text)}")
    return uri


def _check_custom_objects(name: str, value: Any) -> Mapping[str, Any]:
    expected = f"`{name}` must map names to classes or functions"
    if not isinstance(value, Mapping):
        raise InputError(f"{expected}, not {type(value).__name__}")
    for key, one in value.items():
        if not (isinstance(key, str) and callable(one)):
            raise InputError(f"{expected}, not {show(key)} to {show(one)}")
    return value
