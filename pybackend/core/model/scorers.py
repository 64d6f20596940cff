"""Loaded models in Spark's Python processes: they compute the outputs of batches of rows.

This file is imported on the executors. ONNX Runtime needs neither TensorFlow nor Keras there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.data.arrays import Ragged, nest, to_dense
from pybackend.core.data.rows import Rows, reshape_columns, to_rows
from pybackend.core.errors import InputError

Array = npt.NDArray[Any]
Shape = tuple[int | None, ...]
# A model's outputs may be much larger than its inputs; Arrow's lists hold 2**31 numbers.
_BLOCK_BYTES = 64 << 20


class KerasScorer:
    def __init__(self, model: Any) -> None:
        self._model = model

    def find_shapes(self, columns: Sequence[str]) -> Mapping[str, Shape]:
        """Return the shape of a row of each input, by its column, if it is known."""
        from pybackend.core.model.inputs_outputs import name_inputs

        inputs = name_inputs(self._model)
        shapes = {f"x/{name}": tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
        is_one = len(shapes) == 1 and "x" in columns
        return {"x": next(iter(shapes.values()))} if is_one else shapes

    def reshape(self, rows: Rows) -> Rows:
        """Return the rows in the shapes of the inputs."""
        from pybackend.core.model.inputs_outputs import reshape_rows

        return reshape_rows(rows, self._model)

    def compute(self, batch: Mapping[str, Array]) -> list[Array]:
        """Return the outputs for a batch, flattened."""
        import keras
        import tensorflow as tf

        given = nest({key: tf.convert_to_tensor(array) for key, array in batch.items()})
        x = keras.utils.unpack_x_y_sample_weight(given)[0]
        return list(keras.tree.flatten(self._model.predict_on_batch(x)))


@dataclass(frozen=True)
class OnnxInput:
    """An input of an ONNX model: the tensor that feeds it, and shape and type of a row."""

    column: str
    shape: Shape
    dtype: str
    """Unlike Keras, ONNX Runtime converts no numbers."""


class OnnxScorer:
    """A model that ONNX Runtime computes on the CPU; ``inputs`` are in the order of the file's.

    Raises `InputError` if ONNX Runtime is not installed.
    """

    def __init__(self, content: bytes, inputs: Sequence[OnnxInput], threads: int) -> None:
        self._session, names = open_onnx(content, threads)
        self._inputs = list(zip(names, inputs, strict=True))
        self._shapes = {one.column: one.shape for one in inputs}

    def find_shapes(self, columns: Sequence[str]) -> Mapping[str, Shape]:
        return self._shapes

    def reshape(self, rows: Rows) -> Rows:
        return reshape_columns(rows, self._shapes)

    def compute(self, batch: Mapping[str, Array]) -> list[Array]:
        given = {n: np.ascontiguousarray(batch[one.column], one.dtype) for n, one in self._inputs}
        return list(self._session.run(None, given))


def open_onnx(file: bytes | str, threads: int = 0) -> tuple[Any, list[str]]:
    """Return a session of ONNX Runtime for a file or its content, and the names of its inputs."""
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            f"onnxruntime is not installed for {sys.executable} on this executor "
            f"({error}): install it there, or predict with the runtime of Keras"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads  # 0: all cores
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return session, [one.name for one in session.get_inputs()]


Scorer = KerasScorer | OnnxScorer


def predict_rows(
    scorer: Scorer, tensors: Mapping[str, Array | Ragged], batch_size: int
) -> Iterator[list[Array]]:
    """Yield a model's outputs for all rows in order, flattened, in blocks that fit into memory."""
    shapes = scorer.find_shapes(list(tensors))
    dense = {k: to_dense(t, _find_length(t, shapes.get(k))) for k, t in tensors.items()}
    rows = scorer.reshape(to_rows(dense))
    parts, size = [], 0
    for first in range(0, len(rows), batch_size):
        last = min(first + batch_size, len(rows))
        parts.append(scorer.compute(rows.take(np.arange(first, last))))
        size += sum(output.nbytes for output in parts[-1])
        if size >= _BLOCK_BYTES or last == len(rows):
            yield [np.concatenate(part) for part in zip(*parts, strict=True)]
            parts, size = [], 0


def _find_length(tensor: Array | Ragged, shape: Shape | None) -> int:
    """Return the length to which an input pads rows of any length; 0: that of the longest row."""
    if not isinstance(tensor, Ragged) or shape is None or len(shape) != tensor.values.ndim:
        return 0
    return shape[0] or 0
