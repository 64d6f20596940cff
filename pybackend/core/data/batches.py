"""A ``tf.data.Dataset`` or ``keras.utils.PyDataset`` as training data: read on the driver.

Its batches are the global batches. They are read once, and stored as rows and batch sizes. The rows
of every batch are distributed to the workers, which together train on the same batches as one
process.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np

from pybackend.core.data import arrays
from pybackend.core.data.arrays import Columns
from pybackend.core.errors import InputError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.pickling import Pickler
from pybackend.core.words import Code, either, setting

# This process holds the rows twice for a moment, and sends them to the workers.
MOST_BYTES = 2 << 30
# Keras reads so many batches for their types, before it calls any hook of a PyDataset.
_SIGNATURE_BATCHES = 2


def describe_function() -> str:
    function = either(
        "lambda context: make_dataset(context.rank, context.world_size)",
        "function(context) make_dataset(context$rank, context$world_size)",
    )
    return setting(data=Code(function))


def _instead() -> str:
    return f"Pass a function that makes each worker's own batches instead: {describe_function()}"


@dataclass(frozen=True)
class Batches:
    """Rows of a finite data set in order, and their number in each batch that has any."""

    columns: Columns
    sizes: tuple[int, ...]

    def adapt(self, job: TrainingJob) -> TrainingJob:
        """Return the job with these batches as its steps.

        Raises `InputError` if the job has more steps per epoch than there are batches, or uses
        ``shuffle="global"`` or ``scale_lr``.
        """
        if job.shuffle == "global":
            raise InputError(f"{setting(shuffle='global')} cannot reorder batches of a data set")
        if job.scale_lr is not None:
            raise InputError(
                "`scale_lr` cannot be combined with a data set of batches: workers share each "
                "batch, so the number of rows in a step does not depend on the number of workers. "
                "Leave `scale_lr` out, or pass rows"
            )
        if job.steps_per_epoch is not None and job.steps_per_epoch > len(self.sizes):
            raise InputError(
                f"`steps_per_epoch` is {job.steps_per_epoch}, but `data` is a data set of "
                f"{len(self.sizes)} batches: omit `steps_per_epoch`, or repeat the batches "
                "(.repeat() of a tf.data.Dataset)"
            )
        share = -(-max(self.sizes) // job.workers)
        return replace(job, batch_size=share, batches=self.sizes, shuffle=False)


def is_dataset(data: Any) -> bool:
    """True for a ``tf.data.Dataset`` or ``PyDataset``; neither package is imported."""
    tensorflow = sys.modules.get("tensorflow")
    is_tensorflows = tensorflow is not None and isinstance(data, tensorflow.data.Dataset)
    return is_tensorflows or _is_keras(data)


def count_batch(leaves: Mapping[str, Any], name: str, advice: str) -> int:
    """Return the number of rows of a batch; if its arrays differ, the error ends with advice."""
    counts = {key: len(leaf) for key, leaf in leaves.items()}
    if len(set(counts.values())) > 1:
        raise InputError(
            f"a batch of `{name}` has arrays of different lengths ({arrays.list_counts(counts)})"
            f"{advice}"
        )
    return max(counts.values(), default=0)


def read_batches(
    data: Any, floatx: str, name: str, *, passes: int, steps: int | None = None
) -> Batches:
    """Read all batches, whose elements are ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.

    ``passes`` is the number of epochs or evaluations that use its rows. They must be the same in
    each, so the data set is read twice. A `PyDataset` is read as often as Keras reads it, with its
    ``on_epoch_begin`` and ``on_epoch_end``, until a pass leaves its attributes unchanged.

    ``steps`` is the number of batches of each pass, if each continues where the one before ended,
    as with Keras's ``steps_per_epoch``. No more are read from an infinite ``tf.data.Dataset``.

    Raises `InputError` if the data set is endless, is larger than `MOST_BYTES`, yields different
    rows when it is read again, or has elements with a different structure.
    """
    needed = None if steps is None or _is_keras(data) else passes * steps
    # A finite data set is read whole, so that what is stored does not depend on the epochs.
    most = needed if needed is not None and int(data.cardinality()) < 0 else None
    if needed is None:
        _check_ends(data, name)
    if not _is_keras(data):  # a PyDataset does not describe its elements
        check_structure(data.element_spec, f"the data set `{name}`")
    parts: list[Mapping[str, Any]] = []
    digests, held = [], 0
    if _is_keras(data):
        for index in range(min(_SIGNATURE_BATCHES, _length(data) or 0)):
            data[index]
        data.on_epoch_end()
    for leaves in _elements(data, name, may_be_empty=steps is None):
        held += sum(array.nbytes for array in leaves.values())
        if held > MOST_BYTES:
            what = "is an infinite data set, or one of"
            if most is not None:
                what = f"has {most} batches for all epochs (`steps_per_epoch`), of"
            raise InputError(
                f"`{name}` {what} more than {MOST_BYTES >> 30} GiB, and this process would have to "
                f"hold all of it in memory. {_instead()}"
            )
        parts.append(leaves)
        digests.append(_digest(leaves))
        if len(parts) == most:
            break
    if not parts:
        raise InputError(f"`{name}` has no rows")
    state = _digest_state(data)
    for _ in range(1, passes if needed is None else -(-needed // len(parts))):
        _check_repeats(data, digests, name)
        before, state = state, _digest_state(data)
        if state is not None and state == before:
            break
    columns = {}
    for key in parts[0]:
        column = [part[key] for part in parts]
        arrays.check_row_shapes(column, f"`{key}` of the data set `{name}`")
        columns[key] = arrays.to_array(key, np.concatenate(column), floatx, name)
    return Batches(columns, tuple(arrays.count_rows(dict(part)) for part in parts))


def _is_keras(data: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(data, keras.utils.PyDataset)


def _check_ends(data: Any, name: str) -> None:
    if _is_keras(data):
        is_endless = _length(data) is None
    else:
        is_endless = int(data.cardinality()) == sys.modules["tensorflow"].data.INFINITE_CARDINALITY
    if is_endless:
        or_steps = "" if _is_keras(data) or name != "data" else ", or pass `steps_per_epoch`"
        raise InputError(
            f"`{name}` is an infinite data set: limit it (.take(), or a PyDataset's __len__)"
            f"{or_steps}. {_instead()}"
        )


def _length(data: Any) -> int | None:
    """Number of batches of a PyDataset; None if it has none."""
    with suppress(NotImplementedError, TypeError):  # TypeError: also of None
        return int(data.num_batches)
    return None


def check_structure(spec: Any, what: str, wrong_ranks: tuple[int | None, ...] = (0,)) -> None:
    """Reject elements that are not batches of dense tensors, before reading any."""
    _check_parts(spec, what)
    tensorflow = sys.modules["tensorflow"]
    for key, leaf in arrays.flatten(spec).items():
        if not isinstance(leaf, tensorflow.TensorSpec) or leaf.shape.rank in wrong_ranks:
            raise InputError(
                f"`{key}` of {what} is {leaf}; expected batches of dense tensors: use .batch(), "
                "and pad ragged tensors"
            )


def _check_parts(element: Any, what: str) -> None:
    if isinstance(element, tuple) and not 1 <= len(element) <= 3:
        raise InputError(
            f"the elements of {what} have {len(element)} parts; expected x, (x, y) or (x, y, "
            "sample_weight)"
        )


def _elements(data: Any, name: str, may_be_empty: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the arrays of each batch that has rows."""
    for element in _batches(data):
        _check_parts(element, f"the data set `{name}`")
        leaves = {key: np.asarray(leaf) for key, leaf in arrays.flatten(element).items()}
        if flat := [key for key, array in leaves.items() if array.ndim == 0]:
            raise InputError(f"`{flat[0]}` of the data set `{name}` is one number, not a batch")
        cure = (
            ", so it cannot be divided among the workers. Give each graph or set of labels one "
            f"row, padded with zeros. {_instead()}"
        )
        if count_batch(leaves, name, cure):
            yield leaves
        elif not may_be_empty:
            raise InputError(
                f"`{name}` has a batch without rows, which Keras counts as one of the "
                "`steps_per_epoch`: leave such batches out, e.g. with .filter()"
            )


def _batches(data: Any) -> Iterator[Any]:
    if _is_keras(data):
        data.on_epoch_begin()
        for index in range(_length(data) or 0):
            element = data[index]
            # In the structure that Keras uses.
            if isinstance(element, (list, tuple)):
                yield tuple(element[:-1] if element[-1:] == [None] else element)
            else:
                yield element if isinstance(element, Mapping) else (element,)
        data.on_epoch_end()
    else:
        yield from data.as_numpy_iterator()


def _digest(leaves: Mapping[str, Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for key, array in leaves.items():
        digest.update(f"{key} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode())
    return digest.digest()


def _digest_state(data: Any) -> bytes | None:
    """Return a digest of a PyDataset's attributes; None: they cannot be pickled."""
    digest = hashlib.blake2b(digest_size=16)
    with suppress(Exception):  # pickling raises whatever the attributes' own methods do
        if _is_keras(data):
            file = cast("IO[bytes]", SimpleNamespace(write=digest.update))
            Pickler(file).dump(vars(data))
        return digest.digest()
    return None


def _check_repeats(data: Any, digests: list[bytes], name: str) -> None:
    trains = name == "data"
    if _is_keras(data) and not trains:
        data.on_epoch_end()  # Keras resets the data set before each evaluation
    if [_digest(leaves) for leaves in _elements(data, name)] != digests:
        hooks = ", changes in its `on_epoch_begin` or `on_epoch_end`" if _is_keras(data) else ""
        instead = f" {_instead()}" if trains else ""
        raise InputError(
            f"`{name}` is a data set that yields different rows each time it is read (it shuffles, "
            f"draws at random{hooks}, or can be read only once), but the workers would use the "
            f"rows of the first {'epoch' if trains else 'evaluation'} in all. Leave out .shuffle() "
            f"and other changes, or use {setting(epochs=1)}.{instead}"
        )
