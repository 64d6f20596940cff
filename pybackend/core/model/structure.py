"""Description of a model's structure and settings, by which two processes compare their models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SHARED = "shared_object_id"


def describe_structure(model: Any) -> str:
    """Return a model's layers and compile settings as JSON, but not its weights.

    Empty for a model that cannot be described, e.g. of a class without ``get_config``. The learning
    rate of its optimizer is left out; see `describe_rate`.
    """
    import keras

    try:
        described = dict(keras.saving.serialize_keras_object(model))
        described.pop("compile_config", None)  # the same settings
        settings = model.get_compile_config() if model.compiled else None
        optimizer = _find_optimizer(settings)
        if optimizer is not None:
            del optimizer["learning_rate"]
        return describe_config([described, settings])
    except Exception:  # a custom class may raise any error
        return ""


def describe_rate(model: Any) -> Any:
    """Return the learning rate of a compiled model's optimizer: a number, or a schedule as JSON.

    None if there is none, or if the model cannot be described.
    """
    try:
        optimizer = _find_optimizer(model.get_compile_config())
    except Exception:  # a custom class may raise any error
        return None
    rate = None if optimizer is None else optimizer["learning_rate"]
    return rate if isinstance(rate, float) else json.loads(describe_config(rate))


def _find_optimizer(settings: Any) -> dict[str, Any] | None:
    """Return the arguments of the optimizer that has the learning rate, perhaps a wrapped one."""
    part = settings.get("optimizer") if isinstance(settings, dict) else None
    while isinstance(part, dict):
        config = part.get("config")
        if not isinstance(config, dict):
            return None
        if "learning_rate" in config:
            return config
        part = config.get("inner_optimizer")
    return None


def describe_config(config: Any) -> str:
    """Return Keras's configuration of a model as JSON that is the same for equal models.

    It ignores differences that occur between equal models: numbers in names, which Keras increments
    in every process; memory addresses; seeds that layers have drawn; and the code of lambdas, which
    contains the name of its file.
    """
    marks = {mark: _number(mark, n) for n, mark in enumerate(dict.fromkeys(_find_marks(config)))}
    return json.dumps(_renumber(config, marks))


def _find_marks(value: Any) -> Iterator[str | int]:
    """Yield the names of layers, in order, and the numbers of shared objects."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _find_marks(item)
    elif isinstance(value, dict):
        own = [value.get("name"), value.get(_SHARED)]
        yield from (mark for mark in own if isinstance(mark, str | int))
        for item in value.values():
            yield from _find_marks(item)


def _number(mark: str | int, place: int) -> str:
    name = re.sub(r"_\d+$", "", mark) if isinstance(mark, str) else "object"
    return f"{name}#{place}"


def _renumber(value: Any, marks: Mapping[str | int, str]) -> Any:
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        items = {key: item for key, item in value.items() if key not in ("seed", "seed_generator")}
        return {
            marks.get(key, key): marks[item] if key == _SHARED else _renumber(item, marks)
            for key, item in items.items()
        }
    if isinstance(value, list | tuple):
        return [_renumber(item, marks) for item in value]
    return marks.get(value, value) if isinstance(value, str) else value
