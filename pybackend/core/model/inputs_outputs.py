"""A model's inputs and outputs: names, shapes, classes, and rows that fit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import count as count_up
from typing import Any

import keras
import numpy as np

from pybackend.core.data.predictions import Output
from pybackend.core.data.rows import Renamed, Rows, reshape_columns
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.model.view import build_model, flatten, has_own
from pybackend.core.words import REST, call_of, setting, show

_LISTED = 20


def name_inputs(model: Any) -> dict[str, Any]:
    """Return a model's inputs by name, in the order of ``model.inputs``; empty if not known.

    Inputs that are not in a mapping have the names of their layers, which the model's file keeps.
    The tensor of an `Input` without a name has another name, until the model is read from a file.
    """
    tensors: Sequence[Any] = getattr(model, "inputs", None) or []
    if not tensors:  # a subclassed model
        return {}
    structure = getattr(model, "input", None)  # a Sequential model has none before it is called
    if isinstance(structure, Mapping):
        names = {id(tensor): name for name, tensor in structure.items()}
    else:
        layers = [one for one in model.layers if isinstance(one, keras.layers.InputLayer)]
        names = {id(layer.output): layer.name for layer in layers}
    return {names.get(id(tensor), tensor.name): tensor for tensor in tensors}


def check_features(model: Any, features: Any, names: Mapping[str, Any]) -> None:
    """Reject features that cannot fit the model's inputs.

    The argument ``features`` must be a mapping if there are several inputs. ``names`` are those of
    the numbers in a row, by input name (empty if there is only one); None if not known.
    """
    wanted = sorted(name_inputs(model))
    if len(wanted) > 1 and (not isinstance(features, Mapping) or sorted(features) != wanted):
        raise InputError(
            f"the model has the inputs {', '.join(wanted)}: specify the columns for each input, as "
            f"in {setting(features={name: [REST] for name in wanted})}"
        )
    check_feature_names(model, names)


def check_feature_names(model: Any, names: Mapping[str, Any]) -> None:
    """Reject more or fewer numbers per row than an input takes; names as in `check_features`."""
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in name_inputs(model).items()}
    for key, found in names.items():
        shape = shapes.get(key) or (next(iter(shapes.values())) if len(shapes) == 1 else None)
        if found is None or shape is None or None in shape:
            continue
        if (expected := int(np.prod(shape))) != len(found):
            what = f"input {show(key)}" if len(shapes) > 1 else "input"
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            raise InputError(
                f"the model's {what} takes {counted(expected, 'number')} per row (shape "
                f"{show(shape)}), but there {'is' if len(found) == 1 else 'are'} "
                f"{counted(len(found), 'feature')}: {', '.join(found[:_LISTED])}{more}"
            )


def check_input_names(model: Any, columns: Collection[str]) -> None:
    """Reject arrays, named as `data.arrays.flatten` names them, for inputs that a model lacks."""
    inputs = list(name_inputs(model))
    if not inputs:
        return
    given = [column.partition("/")[2] for column in columns if column.partition("/")[0] == "x"]
    is_one, is_list = given == [""], given[:1] == ["#0"]
    may_be_inputs = is_one and len(columns) == len(inputs) > 1
    if may_be_inputs and has_own(model, "train_step"):
        return  # it gets them unchanged, such as (anchor, positive, negative)
    fits = len(inputs) == len(given) if is_one or is_list else set(inputs) <= set(given)
    if fits:
        return
    found = f"arrays named {', '.join(sorted(given))}"
    if is_one or is_list:
        found = "one array" if is_one else f"{len(given)} arrays"
    hint = ""
    if may_be_inputs:
        listed = ", ".join(inputs)
        targets = ", ".join(("x", "y", "sample_weight")[: len(inputs)])
        hint = f". ({listed}) is read as ({targets}); if all are inputs, pass (({listed}),)"
    if len(inputs) == 1:
        raise InputError(f"the model has one input, {inputs[0]}, but x has {found}: pass one array")
    example = dict.fromkeys(inputs, REST)
    raise InputError(
        f"the model has the inputs {', '.join(inputs)}, but x has {found}: pass {show(example)}, "
        f"or for a table {setting(features=example)}{hint}"
    )


def check_output_names(model: Any, columns: Collection[str]) -> None:
    """Reject labels for outputs that a model lacks; names are as in `check_input_names`."""
    outputs: Any = getattr(model, "output", None)
    given = {column[2:] for column in columns if column.startswith("y/")}
    _check_output_count(model, len(given) + ("y" in columns))
    weighted = [column for column in columns if column.startswith("sample_weight/")]
    if weighted and given and len(weighted) != len(given):
        raise InputError(
            f"there are labels for {counted(len(given), 'output')}, but sample weights for "
            f"{len(weighted)}: pass weights for each of them, or one array for all"
        )
    if not given or any(name.startswith("#") for name in given):
        return
    own = set(getattr(model, "output_names", None) or [])
    named = f"y has arrays named {', '.join(sorted(given))}"
    if isinstance(outputs, Mapping):
        if given != set(outputs):
            raise InputError(
                f"the model has the outputs {', '.join(outputs)}, but {named}: pass "
                f"{show(dict.fromkeys(outputs, REST))}"
            )
    elif not (outputs is None or isinstance(outputs, list | tuple) or given == own):
        raise InputError(f"the model has one output, but {named}: pass the labels themselves")


def _check_output_count(model: Any, count: int) -> None:
    """Reject data with fewer labels than outputs, if each output has a loss."""
    if has_own(model, "train_step", "compute_loss"):
        return
    loss, outputs = getattr(model, "loss", None), getattr(model, "output", None)
    if not isinstance(outputs, Mapping | list | tuple):
        return
    losses = list(loss.values()) if isinstance(loss, Mapping) else loss
    if isinstance(losses, list | tuple):
        has_all = len(losses) == len(outputs) and None not in losses
    else:
        has_all = isinstance(loss, str) or callable(loss)
    if has_all and 0 < count < len(outputs):
        names = list(outputs if isinstance(outputs, Mapping) else model.output_names)
        raise InputError(
            f"the model has the outputs {', '.join(names)}, but there are labels for {count}: "
            f"pass {show(dict.fromkeys(names, REST))} as y, or as `label` of a table; or "
            f"compile the model with a list of losses, {show(None)} for an output without labels"
        )


def check_text(model: Any, texts: Mapping[str, Sequence[str]]) -> None:
    """Reject text for inputs that take numbers.

    ``texts`` has the names of the arrays of text; with each, the column that it has in a table, or
    nothing.
    """
    inputs = name_inputs(model)
    for number, (name, tensor) in enumerate(inputs.items()):
        for key, columns in texts.items():
            is_this = key in (f"x/#{number}", f"x/{name}") or len(inputs) == 1
            if is_this and not _takes_text(tensor):
                what, how = key, "as numbers first"
                if columns:
                    encode = call_of("DataOptions", encode={columns[0]: "one_hot"})
                    what, how = f"column {show(columns[0])}", f"({setting(data_options=encode)})"
                raise InputError(
                    f"{what} is text, but the model's input takes {tensor.dtype}: encode it "
                    f"{how}, or begin the model with a TextVectorization layer"
                )


def find_text_inputs(model: Any) -> list[str] | None:
    """Return the names of the inputs that take text; None if the inputs are not known."""
    named = name_inputs(model)
    return [name for name, tensor in named.items() if _takes_text(tensor)] if named else None


def _takes_text(tensor: Any) -> bool:
    return str(keras.backend.standardize_dtype(tensor.dtype)) == "string"


def reshape_rows(rows: Rows, model: Any) -> Rows:
    """Reshape flat rows (e.g. of a DataFrame) to the shapes of the model's inputs.

    ``(rows, 784)`` becomes ``(rows, 28, 28, 1)`` for a model with that input. Rows that already
    fit, and inputs without a fixed shape, are left to Keras. Several inputs are matched by name, or
    else by order. Keras knows inputs without a name only by their order, which then replaces the
    names in the rows. Raises `InputError` if a row has more or fewer numbers than the input.
    """
    try:
        expected = model.input_shape
    except (AttributeError, TypeError):  # not built
        return rows
    inputs = {key: np.dtype(kind) for key, (kind, _) in rows.spec.items() if key[0] == "x"}
    check_text(model, {key: () for key, kind in inputs.items() if kind.kind == "O"})
    rows = reshape_columns(rows, _shapes_by_column(expected, model, rows))
    return _match_names(rows, model)


def _match_names(rows: Rows, model: Any) -> Rows:
    """Return rows without the names of inputs, if Keras does not know these."""
    inputs = name_inputs(model)
    names = [f"x/{name}" for name in inputs]
    is_known = isinstance(getattr(model, "input", None), Mapping) or all(
        name == tensor.name for name, tensor in inputs.items()
    )
    if is_known or {key for key in rows.spec if key.partition("/")[0] == "x"} != set(names):
        return rows
    if len(names) == 1:
        return Renamed(rows, {names[0]: "x"})
    return Renamed(rows, {name: f"x/#{number}" for number, name in enumerate(names)})


def build_by_batch(model: Any, batch: Any) -> Any:
    """Create a model's missing weights; return the inputs that it takes from a batch.

    These are x; or, with its own ``train_step``, the whole batch: (anchor, positive, negative).
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        build_model(model, x)
        return x
    except Exception as error:
        if y is None or not has_own(model, "train_step"):
            raise
        try:
            model(batch)
        except Exception:  # the model's own `call` may raise any error
            raise InputError(
                f"a batch of `data` is a tuple of {len(batch)}, but the model accepts neither its "
                f"first part, the x of (x, y), nor all of it as {len(batch)} inputs: {error}"
            ) from error
    return batch


def make_symbolic_input(model: Any) -> Any:
    """Return the model's inputs as symbolic tensors, in its structure; `ValueError` if unbuilt."""
    try:
        return model.input
    except (AttributeError, ValueError):  # a subclassed model
        pass
    config = model.get_build_config() or {}
    if not (shape := config.get("input_shape")):
        raise ValueError("it was not built")
    return keras.tree.map_shape_structure(
        lambda one: keras.KerasTensor((None, *one[1:]), keras.config.floatx()), shape
    )


def _shapes_by_column(expected: Any, model: Any, rows: Rows) -> dict[str, tuple[int | None, ...]]:
    """Return the row shapes of the model's inputs, by the column that feeds each input."""
    keys = [key for key in rows.spec if key.partition("/")[0] == "x"]
    if keys == ["x"] and isinstance(expected, tuple):
        return {"x": expected[1:]}
    if isinstance(expected, Mapping):
        return {f"x/{n}": s[1:] for n, s in expected.items() if f"x/{n}" in keys}
    if not isinstance(expected, list) or len(expected) != len(keys):
        return {}
    names = [f"x/{name}" for name in name_inputs(model)]
    if set(names) == set(keys):
        return {name: shape[1:] for name, shape in zip(names, expected, strict=True)}
    return {k: s[1:] for k, s in zip(keys, expected, strict=True) if k.startswith("x/#")}


def list_outputs(model: Any) -> tuple[Output, ...]:
    """List the model's outputs, in the order in which Keras flattens them.

    Raises `InputError` if the layers do not determine them without rows, or an output is text.
    """
    tensors = keras.tree.flatten_with_path(_compute_output_spec(model))
    listed = getattr(model, "output_names", None) or []
    if len(listed) != len(tensors):
        listed = [str(number) for number in range(len(tensors))]
    keys = [path[-1] if path else None for path, _ in tensors]
    names = [key if isinstance(key, str) else n for key, n in zip(keys, listed, strict=True)]
    outputs = []
    for name, (_, tensor) in zip(_tell_apart(names), tensors, strict=True):
        if tensor.dtype == "string":
            raise InputError(
                f"the model's output {show(name)} is text; only numeric outputs can become columns"
            )
        shape = tuple(tensor.shape[1:])
        outputs.append(Output(name if len(tensors) > 1 else "", tensor.dtype, shape))
    return tuple(outputs)


def empty_outputs(model: Any) -> Any:
    """Return the model's predictions for zero rows; raise the errors of `list_outputs`."""
    spec = _compute_output_spec(model)
    return keras.tree.pack_sequence_as(spec, [o.make_empty() for o in list_outputs(model)])


def _tell_apart(names: list[str]) -> list[str]:
    """Make names unique by adding numbers: all outputs of a nested model have the model's name."""
    counts = Counter(names)
    for name in [name for name, count in counts.items() if count > 1]:
        numbers = count_up(1)
        for index, other in enumerate(names):
            if other == name:
                free = (f"{name}_{number}" for number in numbers)
                names[index] = next(found for found in free if found not in counts)
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
    if count != 1:
        return count
    name, takes_logits = _read_loss(model)
    return 2 if name.startswith("binary") and not takes_logits else 0


def is_classifier(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the outputs are classes, based on their shape and the loss.

    Several numbers with a binary loss are several labels, not classes.
    """
    if not count_classes(model, outputs):
        return False
    name, _ = _read_loss(model)
    return not name or outputs[0].shape == (1,) or "categorical" in name


def has_logits(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the model's only output consists of class logits.

    The loss is one of Keras's categorical ones, or, for one number, a binary one.
    """
    if len(outputs) != 1 or len(outputs[0].shape) != 1:
        return False
    name, takes_logits = _read_loss(model)
    return takes_logits and ("binary" if outputs[0].shape == (1,) else "categorical") in name


def has_class_loss(model: Any) -> bool:
    """Return whether the loss is one of Keras's categorical ones."""
    return "categorical" in _read_loss(model)[0]


def gives_probabilities(model: Any, outputs: Sequence[Output]) -> bool:
    """Return whether the model's outputs for its classes are probabilities.

    They are if the activation of the last layer returns probabilities. If the activation is
    unknown, they are if one of Keras's losses interprets the outputs as probabilities.
    """
    ends_in = _find_activation(model)
    if ends_in is not None:
        return ends_in == ("sigmoid" if outputs[0].shape == (1,) else "softmax")
    name, takes_logits = _read_loss(model)
    if not name or takes_logits:
        return False
    return outputs[0].shape == (1,) or "categorical" in name


def _find_activation(model: Any) -> str | None:
    layer = model
    while isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or []
        is_sequential = isinstance(layer, keras.Sequential)
        try:
            layer = layer.layers[-1] if is_sequential else layer.get_layer(names[0])
        except (IndexError, ValueError):
            return None
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    # The name of another function, such as TensorFlow's own softmax, has no certain meaning.
    is_keras = str(getattr(activation, "__module__", "")).startswith("keras.")
    return getattr(activation, "__name__", None) if is_keras else None


def _read_loss(model: Any) -> tuple[str, bool]:
    """Return the first loss's name in lower case, and whether it takes logits.

    The name is empty for a loss that is not Keras's own, as its numbers may mean anything.
    """
    losses = flatten(getattr(model, "loss", None))
    loss = keras.losses.get(losses[0]) if losses else None
    if not str(getattr(loss, "__module__", "")).startswith("keras."):
        return "", False
    options = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    name = getattr(loss, "__name__", type(loss).__name__)
    return str(name).lower(), bool(options.get("from_logits", False))


def _compute_output_spec(model: Any) -> Any:
    try:
        return model.compute_output_spec(make_symbolic_input(model))
    except Exception as error:
        raise InputError(
            f"the shapes of the outputs of the model {show(model.name)} are not known ({error}): "
            "call it once on a batch first"
        ) from error
