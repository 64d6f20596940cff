"""Changes to one model or optimizer instance that are undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def override(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give one object an attribute of its own for a while."""
    kept = vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if kept is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, kept)


@contextmanager
def disable_jit(model: Any) -> Iterator[None]:
    """Switch a model's ``jit_compile`` off for a while."""
    compiled = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = compiled
