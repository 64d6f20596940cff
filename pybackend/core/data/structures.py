"""Compare descriptions of models, which `pybackend.core.model.compile_settings` makes."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

from pybackend.core.words import show

# Sections of a configuration, which are not arguments.
_SECTIONS = ("config", "inner_optimizer")
# Characters of the digest that older releases stored instead of a description.
_DIGEST = 64


def shorten(text: str) -> str:
    """Return a description for a file: compressed, as text; empty if there is none."""
    return text and base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def find_difference(there: str, here: str) -> str | None:
    """Describe the first argument in which two descriptions of models differ; None: they are equal.

    Parameters
    ----------
    there, here
        Results of `shorten`; ``there`` may be the digest that older releases wrote.
    """
    if there == here:
        return None
    if not there or not here or len(there) == _DIGEST:
        return "it has different compile settings or layer arguments"
    own, other = (json.loads(zlib.decompress(base64.b64decode(one))) for one in (there, here))
    return next(_compare(own, other, "the model", "layers"), None)


def _compare(there: Any, here: Any, owner: str, argument: str) -> Iterator[str]:
    """Yield a description of each difference; ``owner`` has the argument."""
    if isinstance(there, dict) and isinstance(here, dict):
        kind, config = there.get("class_name"), there.get("config")
        if kind != here.get("class_name"):
            yield _describe(there, here, owner, argument)
            return
        if isinstance(config, dict):
            kind, name = (_drop_number(one) for one in (kind, config.get("name", "")))
            owner = kind if name in ("", kind) else f"{kind} {show(name)}"
        for key in dict.fromkeys([*there, *here]):
            inner = argument if key in _SECTIONS else str(key)
            yield from _compare(there.get(key), here.get(key), owner, inner)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for one, other in zip(there, here, strict=True):
            yield from _compare(one, other, owner, argument)
    elif there != here:
        yield _describe(there, here, owner, argument)


def _describe(there: Any, here: Any, owner: str, argument: str) -> str:
    was, now = show_argument(there), show_argument(here)
    return f"`{argument}` of {owner} was {was}, but is now {now}"


def _drop_number(name: Any) -> str:
    return str(name).partition("#")[0]


def show_argument(value: Any) -> str:
    """Show an argument in a few words."""
    if isinstance(value, dict):
        return _drop_number(value.get("class_name", "a dict"))
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return f"a list of {len(value)}"
    if isinstance(value, float):  # of float32
        value = float(f"{value:.7g}")
    return show(_drop_number(value) if isinstance(value, str) else value)


def digest_text(text: str) -> str:
    """Return a digest of a description."""
    return hashlib.sha256(text.encode()).hexdigest()
