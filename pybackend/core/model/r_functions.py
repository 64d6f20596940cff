"""R functions in models and callbacks: they exist only in the R session, and cannot be pickled."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from pybackend.core.errors import InputError
from pybackend.core.model.view import flatten, read_closure

_PARTS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.initializers.Initializer,
    keras.constraints.Constraint,
)
# Names that reticulate and keras3 give to functions without a name.
_UNNAMED = {"python_function", "anonymous_R_function"}

_ADVICE = {
    "train": (
        "Pass the function that builds and compiles the model as `model_fn`: each worker calls it"
    ),
    "evaluate": "Evaluate it in this session, or pass a fit that was trained with `model_fn`",
    "predict": "Predict in this session, or pass a fit that was trained with `model_fn`",
}
_ABOUT_CALLBACKS = (
    "Callbacks that run on the workers must be Keras's own, without R functions; the functions of "
    "`observer()` run in this session"
)
_ABOUT_SCHEDULES = (
    "Pass a schedule to the optimizer instead, such as "
    "`keras3::learning_rate_schedule_exponential_decay()`"
)


def check_r_functions(
    model: Any, callbacks: Sequence[Any], custom_objects: Mapping[str, Any], kind: str
) -> None:
    """Reject R functions and classes, which cannot be pickled.

    Parameters
    ----------
    model
        The model; None: it is built on the workers.
    kind
        The job's kind: ``"train"``, ``"evaluate"`` or ``"predict"``.

    Raises
    ------
    InputError
        Names each function, and the layer or callback that it belongs to.
    """
    if found := [] if model is None else _find_r_functions(model, "the model"):
        raise InputError(f"{_state(found)}. {_ADVICE[kind]}")
    for callback in callbacks:
        if found := _find_r_functions(callback, f"the callback `{type(callback).__name__}`"):
            is_schedule = isinstance(callback, keras.callbacks.LearningRateScheduler)
            advice = _ABOUT_SCHEDULES if is_schedule else _ABOUT_CALLBACKS
            raise InputError(f"{_state(found)}. {advice}")
    if found := [f"`custom_objects${n}`" for n, one in custom_objects.items() if _is_r(one)]:
        raise InputError(f"{_state(found)}. {_ADVICE[kind]}")


def _state(found: Sequence[str]) -> str:
    *others, last = found
    if not others:
        return f"{last} is written in R and exists only in this session"
    return f"{', '.join(others)} and {last} are written in R and exist only in this session"


def _find_r_functions(whole: Any, what: str) -> list[str]:
    """Return descriptions of the R functions and classes in a model or a callback."""
    found: dict[int, str] = {}
    seen = set()
    waiting = deque([(whole, what)])
    while waiting:
        part, what = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind = type(part)
        is_r_class = any(map(_is_r, vars(kind).values()))
        if is_r_class:
            found.setdefault(id(kind), _describe_class(kind.__name__, what))
        for name, leaf in _list_leaves(part):
            if isinstance(leaf, _PARTS):
                waiting.append((leaf, _describe_part(name, leaf, what)))
            elif _is_r(leaf) and not is_r_class:  # Keras wraps methods in attributes
                found.setdefault(id(leaf), _describe_function(name, leaf, part, what))
    return list(found.values())


def _list_leaves(part: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(part, "__dict__", {}).items():
        yield from ((name.lstrip("_"), leaf) for leaf in flatten(value))


def _describe_class(name: str, what: str) -> str:
    return what if f"`{name}`" in what else f"the class `{name}` of {what}"


def _describe_part(name: str, part: Any, owner: str) -> str:
    bases = {keras.layers.Layer: "layer", keras.metrics.Metric: "metric", keras.losses.Loss: "loss"}
    kind = next((kind for base, kind in bases.items() if isinstance(part, base)), None)
    if kind:
        return f"the {kind} `{part.name}`"
    return "the optimizer" if name == "optimizer" else f"`{name}` of {owner}"


def _describe_function(name: str, function: Any, owner: Any, what: str) -> str:
    if isinstance(owner, keras.metrics.Metric):
        return f"the metric{_sign(function)}"
    if isinstance(owner, keras.losses.Loss) or (isinstance(owner, keras.Model) and name == "loss"):
        return f"the loss{_sign(function)}"
    return f"`{name}` of {what}"


def _sign(function: Any) -> str:
    """Return " `name(arguments)`"; empty without a name."""
    name = function.__name__
    return "" if name in _UNNAMED else f" `{name}{inspect.signature(function)}`"


def _is_r(value: Any) -> bool:
    """Return whether a function calls R: reticulate keeps a pointer in its closure."""
    seen = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        part = part.__func__ if inspect.ismethod(part) else part
        if type(part).__name__ == "PyCapsule":
            return True
        if inspect.isfunction(part) and id(part) not in seen:
            seen.add(id(part))
            waiting += read_closure(part)
    return False
