"""Find the part of an object that cannot be pickled, and name it."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

# Time limit for pickling parts to find those that fail.
_SECONDS = 10
# Names of Keras's base classes in messages.
_KINDS = {
    "Callback": "callback",
    "Model": "model",
    "Layer": "layer",
    "Loss": "loss",
    "Metric": "metric",
    "Optimizer": "optimizer",
    "LearningRateSchedule": "schedule",
}
_OTHER = "other"


def explain_failure(
    value: Any,
    what: str,
    dump: Callable[[Any], object],
    error: Exception,
    is_user_code: Callable[[Any], bool],
) -> str:
    """Describe which attribute of which object cannot be sent to the workers, and what to do.

    Parameters
    ----------
    what
        Name of the value, if the attribute does not belong to a Keras object.
    dump
        Pickles a value, and raises an error if that fails.
    error
        The error that it raised for the value.
    is_user_code
        Whether a class or a function is user-defined, so that its parts are examined.
    """
    part, path, owner = _find_failing_part(value, dump, is_user_code)
    kind = _KINDS[_find_base(owner)] if owner is not None else ""
    if kind == "callback":
        advice = ". Create it in the callback's `on_train_begin`, which each worker calls"
    elif kind:
        advice = ". Pass a function that builds and compiles the model: each worker calls it"
    else:
        advice = ". Create it inside the function that uses it" if path else ""
    what = f"the {kind} {_name_class(owner)}" if kind else what
    because = f" because of `{path}` (class {type(part).__qualname__})" if path else ""
    return f"{what} cannot be sent to the workers{because}: {str(error).rstrip('.')}{advice}"


def _find_failing_part(
    value: Any, dump: Callable[[Any], object], is_user_code: Callable[[Any], bool]
) -> tuple[Any, str, Any]:
    """Find a part that fails, though none of its own parts does.

    A public attribute of an instance of a user-defined class is preferred, then the nearest part.
    Returns the part, its path, and the Keras object with which the path begins, if there is one.
    """
    found: list[tuple[Any, str, Any]] = []
    tried: dict[int, tuple[Any, bool]] = {}

    def fails(part: Any) -> bool:
        if id(part) not in tried:
            try:
                dump(part)
                tried[id(part)] = part, False
            except Exception:  # pickling raises whatever the part's own methods do
                tried[id(part)] = part, True
        return tried[id(part)][1]

    end = time.monotonic() + _SECONDS
    waiting = deque([(value, "", None)])
    while waiting:
        part, path, owner = waiting.popleft()
        if _find_base(part) in _KINDS:
            path, owner = "", part
        known = set(tried)
        failing = [
            (child, path + step, owner)
            for step, child in _list_parts(part, is_user_code)
            if time.monotonic() < end and fails(child)
        ]
        # Containers and internal objects of Keras fail because of their parts.
        is_inner = isinstance(part, (Mapping, list, tuple, set)) or _find_base(part) == _OTHER
        if not failing and not is_inner:
            found.append((part, path.lstrip(".").removeprefix("`, which uses `"), owner))
        waiting.extend(each for each in failing if id(each[0]) not in known)
    found.append((value, "", None))
    return min(found, key=lambda one: _rank(one[1], one[2], is_user_code))


def _rank(path: str, owner: Any, is_user_code: Callable[[Any], bool]) -> tuple[bool, ...]:
    is_library = owner is not None and not is_user_code(type(owner))
    is_named = bool(path) or owner is not None
    return not is_named, is_library, path.startswith("_") or "._" in path


def _list_parts(part: Any, is_user_code: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container, or of a user-defined or Keras object or function."""
    if isinstance(part, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in part.items())
    elif isinstance(part, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", item) for place, item in enumerate(part))
    elif inspect.ismethod(part):
        yield "", part.__self__
        yield "", part.__func__
    elif isinstance(part, FunctionType):
        if is_user_code(part):
            yield from ((f"`, which uses `{name}", item) for name, item in _list_used(part))
    elif isinstance(part, type):
        if is_user_code(part):
            yield from _list_attributes(part)
    elif _find_base(part) or is_user_code(type(part)):
        yield from _list_attributes(part)
        yield from _list_parts(type(part), is_user_code)


def _list_attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's own attributes, public ones first, without methods that Keras wrapped."""
    own = sorted(getattr(part, "__dict__", {}).items(), key=lambda item: item[0].startswith("_"))
    for name, value in own:
        if not name.startswith("__") and not _is_of_keras(getattr(value, "__globals__", {})):
            yield f".{name}", value


def _list_used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values sent with a function: defaults, closure, and globals that it uses."""
    parameters = inspect.signature(function).parameters.values()
    yield from ((p.name, p.default) for p in parameters if p.default is not p.empty)
    used = inspect.getclosurevars(function)
    yield from used.nonlocals.items()
    yield from used.globals.items()


def _find_base(part: Any) -> str:
    """Return the Keras class from which an object or a class is derived; empty if there is none."""
    kind = part if isinstance(part, type) else type(part)
    names = [base.__name__ for base in kind.__mro__ if _is_of_keras(vars(base))]
    return next((name for name in names if name in _KINDS), _OTHER if names else "")


def _is_of_keras(names: Mapping[str, Any]) -> bool:
    module = names.get("__module__") or names.get("__name__")
    return str(module).startswith("keras.")


def _name_class(part: Any) -> str:
    return part.__name__ if isinstance(part, type) else type(part).__name__
