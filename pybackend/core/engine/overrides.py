"""Temporary changes to one instance of a model or an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def override(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object within this context."""
    before = vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def override_each(
    holders: Iterable[Any], name: str, wrap: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """Set an attribute of several objects within this context.

    Parameters
    ----------
    wrap
        Returns the value, given the object and the value before.
    """
    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(override(holder, name, wrap(holder, getattr(holder, name))))
        yield


@contextmanager
def disable_jit(model: Any) -> Iterator[None]:
    """Turn off a model's ``jit_compile`` within this context."""
    compiled = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = compiled
