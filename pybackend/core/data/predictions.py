"""Prediction columns: convert a model's outputs to columns next to the input rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pybackend.core.data.arrays import Array
from pybackend.core.errors import InputError
from pybackend.core.words import show

TEXT = "str"


@dataclass(frozen=True)
class Output:
    """One output of a model: its name, type and the shape of a row, where None stands for any size.

    If a model has only one output, the output needs no name.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    @property
    def depth(self) -> int:
        """Number of nested arrays around the numbers in a row; 0 for a single number."""
        return 0 if self.shape == (1,) else len(self.shape)

    @property
    def held(self) -> str:
        """Type of the numbers when stored in a table."""
        if self.dtype in ("bool", "float64"):
            return self.dtype
        whole = "int64" if self.dtype in ("int64", "uint32", "uint64") else "int32"
        return whole if "int" in self.dtype else "float32"

    def make_empty(self) -> Array:
        return np.empty((0, *(size or 1 for size in self.shape)), self.held)


@dataclass(frozen=True)
class Field:
    """A column: its name, the type of its values, and the number of nested arrays around them."""

    name: str
    dtype: str
    depth: int = 0


@dataclass(frozen=True)
class Predictions:
    """Conversion of a model's outputs to columns.

    Without the class and the numbers, each output is a column: ``.pred``, or ``.pred_<output>`` if
    there are several.
    """

    outputs: tuple[Output, ...]  # in the order in which Keras flattens them
    has_class: bool = False  # ``.pred_class``: the class with the largest number
    # A column for each class, ``.pred_<level>``. One number per row is the probability of the
    # second of two classes.
    has_numbers: bool = False
    levels: tuple[str, ...] | None = None  # names of the classes; None: 0, 1, 2, ...
    # They become probabilities by softmax or, if there is one per row, by the sigmoid.
    are_logits: bool = False

    @property
    def fields(self) -> list[Field]:
        if not (self.has_class or self.has_numbers):
            return [
                Field(f".pred_{output.name}" if output.name else ".pred", output.held, output.depth)
                for output in self.outputs
            ]
        found = []
        if self.has_class:
            found.append(Field(".pred_class", TEXT if self.levels else "int32"))
        if self.has_numbers:
            (output,) = self.outputs
            classes = self.levels or range(max(2, output.shape[0] or 0))
            found += [Field(f".pred_{name}", output.held) for name in classes]
        return found

    def arrow(self, outputs: Sequence[Array], complete: Array | None = None) -> list[Any]:
        """Return the columns as Arrow arrays, from the model's outputs of shape (rows, ...).

        ``complete`` is a mask of the rows for which the model computed outputs, if not all; the
        other rows become null.
        """
        import pyarrow as pa

        pairs = list(zip(self.outputs, outputs, strict=True))
        for output, numbers in pairs:
            _check_shape(output, numbers)
        columns = self.columns(outputs)
        if self.has_class or self.has_numbers:
            found = list(map(pa.array, columns))
        else:
            found = [nest_lists(numbers.astype(one.held), one.depth) for one, numbers in pairs]
        if self.has_class:
            codes = pa.array(columns[0], mask=columns[0] < 0)
            named = self.levels is not None
            found[0] = pa.array(self.levels, pa.string()).take(codes) if named else codes
        if complete is None or complete.all():
            return found
        indices = pa.array(np.cumsum(complete) - 1, mask=~complete)
        return [column.take(indices) for column in found]

    def columns(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the columns as arrays of one number per row; outputs are returned unchanged.

        Classes are returned as codes, or -1 if any of the row's numbers is NaN.
        """
        if not (self.has_class or self.has_numbers):
            return list(outputs)
        numbers = self._tell_classes(outputs[0])
        chosen = np.where(np.isnan(numbers).any(axis=1), -1, numbers.argmax(axis=1))
        found = [chosen.astype(np.int32)] if self.has_class else []
        if self.has_numbers:
            found += list(np.ascontiguousarray(numbers.T, self.outputs[0].held))
        return found

    def _tell_classes(self, numbers: Array) -> Array:
        """Return a number for each class: a probability, unless the model computes scores."""
        numbers = numbers.astype(self.outputs[0].held)  # half precision would round the sums
        if self.are_logits and numbers.shape[1] == 1:
            numbers = np.concatenate([np.zeros_like(numbers), numbers], axis=1)
        if self.are_logits:
            powers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
            numbers = powers / powers.sum(axis=1, keepdims=True)
        elif numbers.shape[1] == 1:
            numbers = np.concatenate([1 - numbers, numbers], axis=1)
        return numbers


def _check_shape(output: Output, numbers: Array) -> None:
    shape = numbers.shape[1:]
    fits = len(shape) == len(output.shape) and all(
        expected in (None, found) for expected, found in zip(output.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"the model returned rows of shape {show(shape)}, but its layers produce "
            f"{show(output.shape)}: does a custom `predict_step` change them?"
        )


def spread_rows(outputs: Array, complete: Array) -> Array:
    """Expand the outputs of the complete rows to all rows; the other rows are NaN."""
    dtype = np.result_type(outputs.dtype, np.float16)  # one that has NaN
    spread = np.full((len(complete), *outputs.shape[1:]), np.nan, dtype)
    spread[complete] = outputs
    return spread


def nest_lists(numbers: Array, depth: int) -> Any:
    import pyarrow as pa

    found = pa.array(np.ascontiguousarray(numbers).reshape(-1))
    for axis in range(depth, 0, -1):
        lists = int(np.prod(numbers.shape[:axis]))
        offsets = np.arange(lists + 1, dtype=np.int32) * numbers.shape[axis]
        found = pa.ListArray.from_arrays(pa.array(offsets), found)
    return found
