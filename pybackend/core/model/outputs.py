"""A model's outputs and classes, as far as its layers determine them without any rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count as count_up
from typing import Any

import keras

from pybackend.core.data.predictions import Output
from pybackend.core.errors import InputError
from pybackend.core.model.inputs import make_symbolic_input
from pybackend.core.model.view import flatten
from pybackend.core.words import show


def list_outputs(model: Any) -> tuple[Output, ...]:
    """List the model's outputs, in the order in which Keras flattens them.

    Raises
    ------
    InputError
        The layers do not determine them, or an output is text.
    """
    tensors = keras.tree.flatten_with_path(_compute_output_spec(model))
    listed = getattr(model, "output_names", None) or []
    numbers = [str(number) for number in range(len(tensors))]
    listed = listed if len(listed) == len(tensors) else numbers
    own = [path[-1] if path and isinstance(path[-1], str) else None for path, _ in tensors]
    names = _tell_apart([str(name or given) for name, given in zip(own, listed, strict=True)])
    outputs = []
    for name, (_, tensor) in zip(names, tensors, strict=True):
        if tensor.dtype == "string":
            raise InputError(
                f"the model's output {show(name)} is text; only numeric outputs can become columns"
            )
        shape = tuple(tensor.shape[1:])
        outputs.append(Output(name if len(tensors) > 1 else "", tensor.dtype, shape))
    return tuple(outputs)


def empty_outputs(model: Any) -> Any:
    """Return the model's predictions for zero rows, in the structure of its outputs.

    Raises
    ------
    InputError
        The layers do not determine them.
    """
    spec = _compute_output_spec(model)
    return keras.tree.pack_sequence_as(spec, [o.make_empty() for o in list_outputs(model)])


def _tell_apart(names: list[str]) -> list[str]:
    """Make names unique by adding numbers: all outputs of a nested model have the model's name."""
    counts = Counter(names)
    for name in [name for name, count in counts.items() if count > 1]:
        numbers = count_up(1)
        for place, other in enumerate(names):
            if other == name:
                free = (f"{name}_{number}" for number in numbers)
                names[place] = next(found for found in free if found not in counts)
    return names


def count_classes(model: Any, outputs: Sequence[Output]) -> int:
    """Return the number of classes that the model's only output distinguishes.

    This is the output's number of values. For a single value it is two, because Keras's binary
    losses interpret the value as the probability of the second class. It is 0 if the output cannot
    represent classes.
    """
    if len(outputs) != 1 or len(outputs[0].shape) != 1:
        return 0
    count = outputs[0].shape[0] or 0
    if count == 1:
        return 2 if _is_probability(model) else 0
    return count


def is_classifier(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the outputs are classes, based on their shape and the loss.

    Several numbers with a binary loss are several labels, not classes.
    """
    classes = count_classes(model, outputs)
    loss = _first_loss(model)
    if not classes or loss is None or not _is_keras_loss(loss):
        return classes > 0
    return outputs[0].shape == (1,) or "categorical" in _name_of(loss)


def has_logits(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the model's only output consists of class logits.

    The loss is one of Keras's categorical ones, or, for one number, a binary one.
    """
    loss = _first_loss(model)
    if len(outputs) != 1 or len(outputs[0].shape) != 1 or not _is_keras_loss(loss):
        return False
    kind = "binary" if outputs[0].shape == (1,) else "categorical"
    return kind in _name_of(loss) and _takes_logits(loss)


def has_class_loss(model: Any) -> bool:
    """Return whether the loss is one of Keras's categorical ones."""
    loss = _first_loss(model)
    return _is_keras_loss(loss) and "categorical" in _name_of(loss)


def gives_probabilities(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the model's outputs for its classes are probabilities.

    They are if the activation of the last layer returns probabilities. If the activation is
    unknown, they are if one of Keras's losses interprets the outputs as probabilities.
    """
    ends_in = _find_activation(model)
    if ends_in is not None:
        return ends_in == ("sigmoid" if outputs[0].shape == (1,) else "softmax")
    loss = _first_loss(model)
    if not _is_keras_loss(loss) or _takes_logits(loss):
        return False
    return outputs[0].shape == (1,) or "categorical" in _name_of(loss)


def _find_activation(model: Any) -> str | None:
    """Return the name of the activation of the model's last layer, if it has one."""
    layer = model
    while isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or []
        try:
            if isinstance(layer, keras.Sequential):
                layer = layer.layers[-1]
            else:
                layer = layer.get_layer(names[0])
        except (IndexError, ValueError):
            return None
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    # The name of another function, such as TensorFlow's own softmax, has no certain meaning.
    is_keras = str(getattr(activation, "__module__", "")).startswith("keras.")
    return getattr(activation, "__name__", None) if is_keras else None


def _is_probability(model: Any) -> bool:
    """Return whether the loss interprets a single number as a probability."""
    loss = _first_loss(model)
    is_binary = _is_keras_loss(loss) and _name_of(loss).startswith("binary")
    return is_binary and not _takes_logits(loss)


def _takes_logits(loss: Any) -> bool:
    options = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return bool(options.get("from_logits", False))


def _first_loss(model: Any) -> Any:
    losses = flatten(getattr(model, "loss", None))
    return keras.losses.get(losses[0]) if losses else None


def _is_keras_loss(loss: Any) -> bool:
    return str(getattr(loss, "__module__", "")).startswith("keras.")


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__)).lower()


def _compute_output_spec(model: Any) -> Any:
    """Return the outputs as symbolic tensors, in the model's structure."""
    try:
        return model.compute_output_spec(make_symbolic_input(model))
    except Exception as error:
        raise InputError(
            f"the shapes of the outputs of the model {show(model.name)} are not known ({error}): "
            "call it once on a batch first"
        ) from error
