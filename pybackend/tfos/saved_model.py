"""Outputs of a SavedModel for the rows of a DataFrame, as a lazy Spark plan.

Spark's own Python processes compute them, and cache the model. This file is imported on the
executors, too; the driver sends it there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pybackend.core.data.arrays import to_dense
from pybackend.core.data.arrow import TensorReader
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import ColumnGroup, ColumnSpec, list_columns
from pybackend.core.data.predictions import nest_lists
from pybackend.core.data.spark_rows import column_as_array, describe_type
from pybackend.core.errors import InputError
from pybackend.core.launchers import (
    ask,
    call_in_task,
    driver_python,
    read_schema,
    set_up_tensorflow,
    ship_package,
)
from pybackend.core.words import show, term

# Types of a column, in NumPy and in Spark, by the kind of the output's type.
_KINDS = {"f": ("float64", "double"), "i": ("int64", "bigint"), "b": ("bool", "boolean")}
_KINDS |= {"u": _KINDS["i"], "O": ("O", "binary")}
_lock = threading.Lock()
# The last model that was loaded: its key, and the model with its function.
_loaded: dict[Any, Any] = {}


@dataclass(frozen=True)
class SavedModel:
    """A signature of a SavedModel: its folder, the tags of its graph (None: any), its name."""

    folder: str
    tags: tuple[str, ...] | None
    signature: str


@dataclass(frozen=True)
class SavedModelTask:
    """Function that Spark runs on each partition, whose columns are those of the groups."""

    model: SavedModel
    column_groups: tuple[ColumnGroup, ...]
    outputs: tuple[str, ...]
    batch_size: int

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the outputs of each batch."""
        import pyarrow as pa

        reader = TensorReader(self.column_groups)
        loaded = _load(self.model)
        for batch in batches:
            for first in range(0, batch.num_rows, self.batch_size):
                rows = reader.read(batch.slice(first, self.batch_size))
                found = self._compute(loaded[1], {key.partition("/")[2]: rows[key] for key in rows})
                yield pa.RecordBatch.from_arrays(
                    [_to_arrow(found[name], name) for name in self.outputs],
                    list(self.outputs),
                )

    def _compute(self, function: Any, rows: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        specs = function.structured_input_signature[1]
        inputs = {}
        for name, values in rows.items():
            dense, spec = to_dense(values, 0), specs[name]
            # A column contains flat arrays.
            shape = [len(dense), *(-1 if size is None else size for size in spec.shape[1:])]
            if spec.shape.rank is not None and shape.count(-1) < 2:
                dense = np.reshape(dense, shape)
            inputs[name] = tf.cast(tf.convert_to_tensor(dense), spec.dtype)
        rows_in = len(next(iter(inputs.values())))
        found = {name: tensor.numpy() for name, tensor in function(**inputs).items()}
        for name in self.outputs:
            if len(found[name]) != rows_in:
                raise InputError(
                    f"the model's output {show(name)} has {len(found[name])} rows for {rows_in} "
                    f"rows of the {term('DataFrame')}: it must have one for each"
                )
        return found


def describe_signature(model: SavedModel) -> dict[str, Any]:
    """Return the inputs of a signature, and the type and depth of each output.

    `InputError` if the model or signature does not exist, or an output's rank is unknown.
    """
    _, function = _load(model)
    outputs = {}
    for name, spec in function.structured_outputs.items():
        if spec.shape.rank is None or spec.shape.rank < 1:
            raise InputError(
                f"the model's output {show(name)} has the shape {spec.shape}: its first dimension "
                "must be the rows"
            )
        kind = np.dtype(spec.dtype.as_numpy_dtype).kind
        outputs[name] = [_KINDS.get(kind, _KINDS["O"])[1], spec.shape.rank - 1]
    return {"inputs": list(function.structured_input_signature[1]), "outputs": outputs}


def _to_arrow(values: Any, name: str) -> Any:
    if values.dtype.kind not in _KINDS:
        raise InputError(
            f"the model's output {show(name)} has the type {values.dtype}, which a column cannot "
            "store"
        )
    return nest_lists(values.astype(_KINDS[values.dtype.kind][0]), values.ndim - 1)


def _load(model: SavedModel) -> tuple[Any, Any]:
    """Return the model and its signature's function, from memory if the files have not changed.

    The caller must hold a reference to the model, because the function does not.
    """
    set_up_tensorflow()
    with _lock:
        key = model, _describe_files(model.folder)
        if key not in _loaded:
            _loaded.clear()
            _loaded[key] = _read(model)
        found: tuple[Any, Any] = _loaded[key]
        return found


def _describe_files(folder: str) -> tuple[Any, ...]:
    """Return a key that changes when a new model is exported to the folder; empty: no files."""
    import tensorflow as tf

    # New files may have the same sizes and times as the old ones, but then TensorFlow's fingerprint
    # differs, if TensorFlow wrote one.
    files = tf.io.gfile
    found: list[Any] = []
    for place, _, names in files.walk(folder):
        for name in sorted(names):
            path = files.join(place, name)
            status = files.stat(path)
            content = files.GFile(path, "rb").read() if name == "fingerprint.pb" else b""
            found.append((path, status.length, status.mtime_nsec, content))
    return tuple(found)


def _read(model: SavedModel) -> tuple[Any, Any]:
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(model.folder, tags=model.tags and list(model.tags))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load a SavedModel from {show(model.folder)}: {error}") from error
    if model.signature not in loaded.signatures:
        raise InputError(
            f"the SavedModel at {show(model.folder)} has no signature {show(model.signature)}: it "
            f"has {', '.join(loaded.signatures) or 'none'}"
        )
    return loaded, loaded.signatures[model.signature]


def apply_saved_model(
    frame: Any,
    model: SavedModel,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    batch_size: int,
) -> Any:
    """Return a DataFrame of a SavedModel's outputs only, in the order of the rows.

    ``inputs`` maps the signature's inputs to columns, and ``outputs`` its outputs to the names of
    their columns, in their order. ``batch_size`` is the number of rows per call of the model.
    `InputError` names an input, output or column that is missing or does not fit; `ClusterError` if
    Spark could not read the model.
    """
    session = frame.sparkSession
    types = {field.name: field.dataType for field in read_schema(frame).fields}
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    spec = ColumnSpec(features={name: [column] for name, column in inputs.items()}, label=None)
    ship_package(session)
    # Read in a task, because this process may not see the model's folder.
    signature = call_in_task(session, describe_signature, model)
    _check_names("input", inputs, signature["inputs"])
    groups = group_columns(spec, kinds, "float64", "dataset")
    _check_names("output", outputs, signature["outputs"])
    fields: list[str] = []
    for name in outputs:
        kind, depth = signature["outputs"][name]
        fields.append(f"o{len(fields)} {'array<' * depth}{kind}{'>' * depth}")
    columns = [
        column_as_array(frame, name, types[name]).alias(f"c{place}")
        for place, name in enumerate(list_columns(groups))
    ]
    task = SavedModelTask(model, tuple(groups), tuple(outputs), batch_size)

    def plan() -> Any:
        # In a schema's text, Spark would replace ${...} in the user's names.
        computed = frame.select(*columns).mapInArrow(task, ", ".join(fields))
        return computed.toDF(*outputs.values())

    with driver_python(session):
        return ask(session, "a plan", plan)


def _check_names(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Check names of ``inputs``, of which all are needed, or of ``outputs``."""
    listed, argument = ", ".join(known), f"{what}_mapping"
    if not given:
        raise InputError(f"`{argument}` is empty: the model's {what}s are {listed}")
    for name in given:
        if name not in known:
            raise InputError(
                f"`{argument}` has the {what} {show(name)}, but the model's {what}s are {listed}"
            )
    missing = [name for name in known if name not in given]
    if missing and what == "input":
        raise InputError(f"`{argument}` has no column for the model's {what} {show(missing[0])}")
