"""Compare descriptions of models, which `pybackend.model.structure` makes."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pybackend.words import show

# Sections of a configuration, which are not arguments.
_SECTIONS = ("config", "inner_optimizer")
# Characters of the digest that older releases stored instead of a description.
_DIGEST = 64


@dataclass(frozen=True)
class Difference:
    """An argument that two models do not share.

    Attributes
    ----------
    owner
        What has the argument, in words.
    path
        Names of arguments, each within the one before.
    """

    owner: str
    path: tuple[str, ...]
    there: Any
    here: Any

    def __str__(self) -> str:
        if not self.owner:
            return f"it has different {self.path[-1]}"
        there, here = show_argument(self.there), show_argument(self.here)
        return f"`{self.path[-1]}` of {self.owner} was {there}, but is now {here}"


def shorten(text: str) -> str:
    """Return a description for a file: compressed, as text; empty if there is none."""
    return text and base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def list_differences(there: str, here: str) -> list[Difference]:
    """Return the arguments in which two descriptions of models differ.

    Parameters
    ----------
    there, here
        Results of `shorten`; ``there`` may be the digest that older releases wrote.
    """
    if there == here:
        return []
    if not there or not here or len(there) == _DIGEST:
        return [Difference("", ("compile settings or layer arguments",), None, None)]
    own, other = (json.loads(zlib.decompress(base64.b64decode(one))) for one in (there, here))
    return list(_compare(own, other, "the model", ("layers",)))


def _compare(there: Any, here: Any, owner: str, path: tuple[str, ...]) -> Iterator[Difference]:
    if isinstance(there, dict) and isinstance(here, dict):
        kind, config = there.get("class_name"), there.get("config")
        if kind != here.get("class_name"):
            yield Difference(owner, path, there, here)
            return
        if isinstance(config, dict):
            kind, name = (_drop_number(one) for one in (kind, config.get("name", "")))
            owner = kind if name in ("", kind) else f"{kind} {show(name)}"
        for key in dict.fromkeys([*there, *here]):
            inner = path if key in _SECTIONS else (*path, str(key))
            yield from _compare(there.get(key), here.get(key), owner, inner)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for one, other in zip(there, here, strict=True):
            yield from _compare(one, other, owner, path)
    elif there != here:
        yield Difference(owner, path, there, here)


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
