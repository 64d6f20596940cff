"""Keras models as ONNX files, which are compared with Keras before they are written."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.errors import InputError, SerializationError
from pybackend.core.model.scorers import OnnxInput, open_onnx
from pybackend.core.words import install, show

Array = npt.NDArray[Any]
_PACKAGES = ("onnx", "onnxruntime", "tf2onnx")
# Tables and hashes, for which the exporter writes operations that no runtime has.
_UNSUPPORTED = ("StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "HashedCrossing")
# Numbers of rows of the compared batches: a fixed batch size would fail.
_BATCHES = (1, 5)
_UNKNOWN_SIZE = 4
# Of the output's largest number. Sums in another order differ by about 1e-6.
_RELATIVE = 1e-4


def check_onnx_installed() -> None:
    """Check the packages that export and run ONNX models, without importing them."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise InputError(
            f"{missing[0]} is not installed for {sys.executable}, which ONNX files need: "
            f"{install('onnx')}"
        )


def write_onnx(model: Any, path: Path) -> float:
    """Write a model as an ONNX file, if ONNX Runtime computes the same as Keras.

    Both predict random rows, in two batches of different sizes. Returns the largest difference,
    relative to the largest number of the output. Raises `InputError` for text inputs and layers
    without a counterpart, and `SerializationError` if the model cannot be exported, or computes
    different numbers.
    """
    check_onnx_installed()
    if path.is_dir():
        raise InputError(f"{show(str(path))} is a folder: name a file, such as {show('m.onnx')}")
    _check_layers(model)
    rng = np.random.default_rng(0)
    batches = [[_draw(rng, tensor, rows) for tensor in _list_inputs(model)] for rows in _BATCHES]
    expected = [_predict(model, batch) for batch in batches]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            with _silence(), _constant_statistics(model):
                model.export(str(made), format="onnx", verbose=False)
            found = _run(made, batches)
        except Exception as error:  # tracing runs the code of custom layers
            raise SerializationError(
                f"the model {show(model.name)} cannot be exported to ONNX: "
                f"{type(error).__name__}: {error}"
            ) from error
        difference = _compare(model, expected, found)
        made.replace(path)
    return difference


def encode_onnx(model: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(model, path)
        return path.read_bytes()


def match_inputs(model: Any, columns: Sequence[str]) -> tuple[OnnxInput, ...]:
    """Return the inputs of a model's ONNX file, each with the tensor that feeds it.

    The columns name the tensors; `check_features` has compared them with the model's inputs.
    """
    import keras

    from pybackend.core.model.inputs_outputs import name_inputs

    tensors = _list_inputs(model)
    fed = [column for column in columns if column.partition("/")[0] == "x"]
    if len(tensors) > 1:
        names = {id(tensor): name for name, tensor in name_inputs(model).items()}
        fed = [f"x/{names[id(tensor)]}" for tensor in tensors]
    return tuple(
        OnnxInput(column, tuple(tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype))
        for column, tensor in zip(fed, tensors, strict=True)
    )


def _check_layers(model: Any) -> None:
    from pybackend.core.model.inputs_outputs import find_text_inputs
    from pybackend.core.model.view import ModelView

    layers = [layer for layer in ModelView(model).layers if type(layer).__name__ in _UNSUPPORTED]
    if layers:
        named = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
        raise InputError(
            f"ONNX files cannot have the layers {named}: look up the values before the model, e.g. "
            "with the option `encode` of training, which needs no such layer"
        )
    if texts := find_text_inputs(model):
        raise InputError(f"ONNX files cannot have text inputs: {', '.join(texts)}")


def _list_inputs(model: Any) -> list[Any]:
    inputs = list(getattr(model, "inputs", None) or ())
    if not inputs:
        raise InputError(
            f"the inputs of the model {show(model.name)} are not known: only functional and "
            "Sequential models can be exported to ONNX"
        )
    return inputs


def _draw(rng: np.random.Generator, tensor: Any, rows: int) -> Array:
    """Return random rows for an input; whole numbers are 0 or 1, which any embedding has."""
    shape = (rows, *(size or _UNKNOWN_SIZE for size in tensor.shape[1:]))
    if tensor.dtype == "bool" or "int" in tensor.dtype:
        return rng.integers(0, 2, shape).astype(tensor.dtype)
    return rng.normal(size=shape).astype(tensor.dtype)


def _predict(model: Any, batch: Sequence[Array]) -> list[Array]:
    import keras

    from pybackend.core.quiet import quiet_about_traces

    given = batch[0] if len(batch) == 1 else keras.tree.pack_sequence_as(model.input, list(batch))
    with quiet_about_traces():
        outputs = model.predict_on_batch(given)
    return [np.asarray(output) for output in keras.tree.flatten(outputs)]


def _run(path: Path, batches: Sequence[Sequence[Array]]) -> list[list[Array]]:
    session, names = open_onnx(str(path))
    if len(names) > len(batches[0]):
        raise ValueError(f"the exporter lost constants: {', '.join(names[len(batches[0]) :])}")
    return [session.run(None, dict(zip(names, batch, strict=True))) for batch in batches]


def _compare(model: Any, expected: list[list[Array]], found: list[list[Array]]) -> float:
    """Return the largest relative difference; raise an error that names the output."""
    names = list(getattr(model, "output_names", ())) or ["output"]
    largest = 0.0
    for wanted, got in zip(expected, found, strict=True):
        if [one.shape for one in wanted] != [one.shape for one in got]:
            shapes = [show([one.shape for one in outputs]) for outputs in (got, wanted)]
            raise SerializationError(
                f"the ONNX file has outputs of shape {shapes[0]}, but the model has {shapes[1]}"
            )
        for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
            # An output may have no numbers. Below 1, the difference itself counts: a probability of
            # 1e-9 may be wrong by its own size.
            scale = max(1.0, float(np.max(np.abs(one), initial=0.0)))
            difference = float(np.max(np.abs(one - other), initial=0.0)) / scale
            if not difference <= _RELATIVE:  # also if it is NaN
                name = names[number] if number < len(names) else str(number)
                raise SerializationError(
                    f"the ONNX file computes other numbers than Keras for the output "
                    f"{show(name)}: the largest difference is {difference:.2g} of the largest "
                    f"value, but rounding explains at most {_RELATIVE:g}. No file was written"
                )
            largest = max(largest, difference)
    return largest


@contextlib.contextmanager
def _constant_statistics(model: Any) -> Iterator[None]:
    """Turn the statistics of `Normalization` layers into arrays, which become constants.

    As tensors, they would become inputs of the file.
    """
    import keras

    from pybackend.core.model.view import ModelView

    layers = [one for one in ModelView(model).layers if isinstance(one, keras.layers.Normalization)]
    before = [(layer, layer.mean, layer.variance) for layer in layers]
    try:
        for layer, mean, variance in before:
            layer.mean, layer.variance = np.asarray(mean), np.asarray(variance)
        yield
    finally:
        for layer, mean, variance in before:
            layer.mean, layer.variance = mean, variance


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    from pybackend.core.model.serialization import silence_keras

    before = logging.root.manager.disable
    with silence_keras(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
