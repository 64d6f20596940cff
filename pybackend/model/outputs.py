"""What a model takes and gives, as far as its layers tell before it has seen a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from pybackend.data.predictions import Output
from pybackend.errors import InputError
from pybackend.model.layers import flat


def outputs_of(model: Any) -> tuple[Output, ...]:
    """The model's outputs, in the order in which Keras flattens them.

    Raises
    ------
    InputError
        Where the layers do not tell, or an output is text.
    """
    found = keras.tree.flatten_with_path(_specification(model))
    listed = getattr(model, "output_names", None) or []
    names = listed if len(listed) == len(found) else [str(place) for place in range(len(found))]
    outputs = []
    for (path, tensor), name in zip(found, names, strict=True):
        told = str(path[-1]) if path and isinstance(path[-1], str) else str(name)
        if tensor.dtype == "string":
            raise InputError(f"the model's output {told!r} is text; only numbers become columns")
        shape = tuple(tensor.shape[1:])
        outputs.append(Output(told if len(found) > 1 else "", tensor.dtype, shape))
    return tuple(outputs)


def check_inputs(model: Any, features: Any, columns: int | None) -> None:
    """Refuse features that are seen not to fit the model's inputs.

    Parameters
    ----------
    features
        As users give them: a mapping for several inputs.
    columns
        How many numbers a row of the only input has, where that is known.
    """
    tensors: Sequence[Any] = getattr(model, "inputs", None) or []
    is_mapping = isinstance(features, Mapping)
    if len(tensors) > 1:
        given = model.input if isinstance(model.input, Mapping) else [t.name for t in tensors]
        names = sorted(given)
        if not is_mapping or sorted(features) != names:
            example = ", ".join(f"{name!r}: [...]" for name in names)
            raise InputError(
                f"the model has the inputs {', '.join(names)}: say which columns each is fed "
                f"with, as features={{{example}}}"
            )
    elif len(tensors) == 1 and columns is not None:
        shape = tuple(tensors[0].shape[1:])
        if None not in shape and int(np.prod(shape)) != columns:
            raise InputError(
                f"the model's input has the shape {shape}, but `features` are {columns} columns "
                "of one number each: name those of the training in `features`"
            )


def classes_of(model: Any, outputs: Sequence[Output]) -> int:
    """How many classes a row of the model's only output tells apart, should it tell classes.

    As many as it has numbers; two where that is one number, which Keras's binary losses take for
    the probability of the second class. 0 where there can be no classes.
    """
    if len(outputs) != 1 or len(outputs[0].shape) != 1:
        return 0
    count = outputs[0].shape[0] or 0
    if count == 1:
        return 2 if _gives_probability(model) else 0
    return count


def gives_classes(model: Any, outputs: Sequence[Output]) -> bool:
    """Whether what could tell classes does, unless the loss tells otherwise.

    Several numbers under a binary loss are answers to several questions, not classes.
    """
    classes = classes_of(model, outputs)
    loss = _first_loss(model)
    if not classes or loss is None or not _is_keras_own(loss):
        return classes > 0
    return outputs[0].shape == (1,) or "categorical" in _name_of(loss)


def _gives_probability(model: Any) -> bool:
    """Whether the loss takes single numbers for probabilities; without a loss they may be all."""
    loss = _first_loss(model)
    if loss is None or not _is_keras_own(loss) or not _name_of(loss).startswith("binary"):
        return False
    options = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return not options.get("from_logits", False)


def _first_loss(model: Any) -> Any:
    losses = flat(getattr(model, "loss", None))
    return keras.losses.get(losses[0]) if losses else None


def _is_keras_own(loss: Any) -> bool:
    return str(getattr(loss, "__module__", "")).startswith("keras.")


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__)).lower()


def _specification(model: Any) -> Any:
    """The outputs as symbolic tensors, in the model's structure."""
    try:
        return model.compute_output_spec(_symbolic_input(model))
    except Exception as error:
        raise InputError(
            f"the shape of what the model {model.name!r} gives is not known ({error}): call it "
            "once on a batch before"
        ) from error


def _symbolic_input(model: Any) -> Any:
    try:
        return model.input
    except (AttributeError, ValueError):  # a class of its own
        pass
    config = model.get_build_config() or {}
    shape = config.get("input_shape")
    if isinstance(shape, Mapping):
        return {name: _tensor(one) for name, one in shape.items()}
    if shape and isinstance(shape[0], (list, tuple)):
        return [_tensor(one) for one in shape]
    if not shape:
        raise ValueError("it was not built")
    return _tensor(shape)


def _tensor(shape: Sequence[int | None]) -> Any:
    return keras.KerasTensor((None, *shape[1:]), keras.config.floatx())
