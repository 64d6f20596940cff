"""Description of a model's structure and settings, by which two processes compare their models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.words import show

_SHARED = "shared_object_id"
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
        there, here = _show_argument(self.there), _show_argument(self.here)
        return f"`{self.path[-1]}` of {self.owner} was {there}, but is now {here}"

    @property
    def may_change(self) -> bool:
        """True for another learning rate, or another schedule of it: no variable depends on it."""
        is_same_kind = isinstance(self.there, float) == isinstance(self.here, float)
        is_all = self.path[-1] == "learning_rate"
        return {"optimizer", "learning_rate"} <= set(self.path) and (is_same_kind or not is_all)

    @property
    def rate(self) -> float | None:
        """The learning rate, if it is a number."""
        is_rate = self.path[-1] == "learning_rate" and isinstance(self.here, float)
        return self.here if is_rate else None


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
    if there == here or there == digest_text(_expand(here)):
        return []
    if not there or not here or len(there) == _DIGEST:
        return [Difference("", ("compile settings or layer arguments",), None, None)]
    own, other = json.loads(_expand(there)), json.loads(_expand(here))
    found = _compare(own, other, "the model", ("layers",))
    return list({str(one): one for one in found}.values())  # some are described twice


def _expand(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode() if text else ""


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


def _show_argument(value: Any) -> str:
    """Show an argument in a few words."""
    if isinstance(value, dict):
        return _drop_number(value.get("class_name", "a dict"))
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return f"a list of {len(value)}"
    if isinstance(value, float):  # of float32
        value = float(f"{value:.7g}")
    return show(_drop_number(value) if isinstance(value, str) else value)


def describe_structure(model: Any) -> str:
    """Return a model's layers and compile settings as JSON, but not its weights.

    Empty for a model that cannot be described, e.g. of a class without ``get_config``.
    """
    import keras

    try:
        described = keras.saving.serialize_keras_object(model)
        settings = model.get_compile_config() if model.compiled else None
        return describe_config([described, settings])
    except Exception:  # a custom class may raise any error
        return ""


def digest_text(text: str) -> str:
    """Return a digest of a description."""
    return hashlib.sha256(text.encode()).hexdigest()


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
