"""Reject callbacks that may change what a data set reads, if it is read before training starts."""

from __future__ import annotations

import dis
import gc
import logging
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pybackend.core.data.batches import describe_function, is_dataset
from pybackend.core.errors import InputError
from pybackend.core.job.pickling import is_sent, list_parts


def check_shared_state(data: Any, name: str, callbacks: Sequence[Any]) -> None:
    """Check that callbacks hold no variable or changing object that a data set uses.

    Raises
    ------
    InputError
        Names the callback, its attribute and the argument.
    """
    # Workers read what a `data` function returns in each epoch, but store validation rows.
    if not callbacks or not (is_dataset(data) or (name != "data" and callable(data))):
        return
    used = _find_used(data)
    for callback in callbacks:
        if found := _find_shared(callback, used):
            path, part = found
            what = "is" if part is data else "is used by"
            function = f"pass a function, {describe_function()}, or " if name == "data" else ""
            raise InputError(
                f"the callback {type(callback).__name__} may change `{path}` (class "
                f"{type(part).__name__}), which {what} `{name}`, but `{name}` is read before "
                f"training starts, so its rows would not change as in Keras: {function}give the "
                "callback an object of its own"
            )


def _find_used(data: Any) -> dict[int, Any]:
    """Return all objects that a data set refers to, by id, and those that its functions use."""
    tensorflow = sys.modules["tensorflow"]
    found: dict[int, Any] = {}
    waiting = [data]
    while waiting:
        part = waiting.pop()
        is_library = isinstance(part, ModuleType) or (isinstance(part, type) and not is_sent(part))
        # TensorFlow's default graph refers to the functions of other data sets.
        if is_library or type(part) is tensorflow.Graph or id(part) in found:
            continue
        found[id(part)] = part
        if isinstance(part, type):
            waiting += [*vars(part).values(), *part.__bases__]
        elif isinstance(part, FunctionType):
            waiting += [used for _, used in list_parts(part, is_sent)]
            waiting += [one for one in gc.get_referents(part) if one is not part.__globals__]
        else:
            waiting += gc.get_referents(part)
    return found


def _find_shared(callback: Any, used: Mapping[int, Any]) -> tuple[str, Any] | None:
    """Return the path and the value of a variable, or of an object that is changed, in ``used``."""
    tensorflow = sys.modules["tensorflow"]
    parts: dict[int, tuple[str, Any]] = {}
    waiting: deque[tuple[str, Any]] = deque([("", callback)])
    while waiting:
        path, part = waiting.popleft()
        if id(part) not in parts:
            parts[id(part)] = path, part
            waiting += [(path + step, one) for step, one in list_parts(part, is_sent)]
    methods = {
        id(method.__code__)
        for kind in type(callback).__mro__
        for method in vars(kind).values()
        if isinstance(method, FunctionType)
    }
    changed = {
        name
        for _, part in parts.values()
        if isinstance(part, FunctionType) and part.__name__ != "__init__"
        for name in _list_stored(part.__code__, id(part.__code__) in methods)
    }
    for path, part in parts.values():
        if isinstance(part, tensorflow.Variable):
            # A function of tf.data may hold only the variable's handle.
            is_shared = id(part) in used or id(part.handle) in used
        else:
            is_constant = isinstance(part, (type, FunctionType, ModuleType, logging.Logger))
            own = getattr(part, "__dict__", {re.split(r"\W", path)[-1] + "[]"})
            is_shared = id(part) in used and not is_constant and not changed.isdisjoint(own)
        if is_shared:
            return path.lstrip(".").removeprefix("`, which uses `") or "self", part
    return None


def _list_stored(code: CodeType, is_own: bool) -> Iterator[str]:
    """Yield the attributes that a function assigns, and ``name[]`` if it assigns an item.

    Parameters
    ----------
    is_own
        True for a method of the callback: what it assigns to itself is its own.
    """
    steps = list(dis.get_instructions(code))
    names = [step.opname for step in steps]
    for place, step in enumerate(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            holder = steps[place - 1]
            is_self = holder.opname == "LOAD_FAST" and holder.argval in code.co_varnames[:1]
            if not (is_own and is_self):
                yield step.argval
        elif step.opname == "STORE_SUBSCR" or names[place : place + 3] == [
            "COPY",
            "COPY",
            "BINARY_SUBSCR",
        ]:  # a[b] = c; a[b] += c
            yield f"{steps[place - 2].argval}[]"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_stored(constant, is_own)
        elif isinstance(constant, str) and "setattr" in code.co_names:
            yield constant
