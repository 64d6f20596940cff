"""Temporary changes to one instance of a model or an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
def disable_jit(model: Any) -> Iterator[None]:
    """Turn off a model's ``jit_compile`` within this context."""
    compiled = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = compiled
