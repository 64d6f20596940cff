"""Checks of single arguments: each returns the value as a built-in Python type, or raises an error.

Numbers of any type are accepted: 3 in R is a double, and 3.0 counts as a whole number.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from importlib.util import find_spec
from itertools import chain, count
from typing import Any, TypeVar

from pybackend.core.errors import InputError
from pybackend.core.words import call_of, either, install, listed, one_of, show

MAX_WORKERS = 4096
# In R, these are lists such as `list("halving", factor = 2)`.
_RULES = ("MedianPruning", "ScaleLearningRate", "SuccessiveHalving")
_Made = TypeVar("_Made", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")


def name_arguments(made: _Made) -> _Made:
    """Decorate a class or a function so that an unknown argument raises a helpful `InputError`.

    A class may explain in its method ``explain_missing`` why it has no argument of a name.
    """
    is_class = isinstance(made, type)
    explain: Callable[[str], str | None] = getattr(made, "explain_missing", lambda name: None)
    fn: Any = vars(made)["__init__"] if is_class else made
    known = list(inspect.signature(made).parameters)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                advice = f"did you mean `{near[0]}`?" if near else "see its help"
                own = f"{made.__name__}()"
                called = either(own, "the list") if made.__name__ in _RULES else own
                raise InputError(f"{called} has no argument `{name}`: {explain(name) or advice}")
        return fn(*args, **kwargs)

    if not is_class:
        return call  # type: ignore[return-value]
    made.__init__ = call  # type: ignore[method-assign]
    return made


def check_group(name: str, value: Any, *kinds: type[_Kind], **example: Any) -> _Kind:
    """Check that an argument is an object of options; None is the default one of the first class.

    ``example`` are settings of the call that the error shows.
    """
    if value is None:
        return kinds[0]()
    if isinstance(value, kinds):
        return value
    made = call_of(f"pybackend.{kinds[0].__name__}", **example)
    raise wrong(name, f"{one_of(*(kind.__name__ for kind in kinds))}, e.g. {made}", value)


def check_fields(options: Any, **checks: Callable[[str, Any], Any]) -> None:
    """Replace attributes of a frozen dataclass, while it is created, by what their checks return.

    None is not checked if it is the default.
    """
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name in checks and (value is not None or one.default is not None):
            object.__setattr__(options, one.name, checks[one.name](one.name, value))


def wrong(name: str, expected: str, value: Any) -> InputError:
    """Return the error for an argument that is not what it must be."""
    return InputError(f"`{name}` must be {expected}, not {show(value)}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 row`` or ``2 rows``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    number = as_number(value)
    if number is None or not number.is_integer():
        raise wrong(name, "a whole number", value)
    if number < least or (most is not None and number > most):
        raise wrong(name, f"at least {least}" if most is None else f"from {least} to {most}", value)
    return int(value)


def check_number(name: str, value: Any, expected: str, is_fit: Callable[[float], bool]) -> float:
    number = as_number(value)
    if number is None or not is_fit(number):
        raise wrong(name, expected, value)
    return number


def check_seconds(name: str, value: Any) -> float:
    return check_number(name, value, "a positive number of seconds", lambda n: 0 < n < math.inf)


def check_positive(name: str, value: Any, *, most: float = math.inf) -> float:
    """Check that an argument is a positive number; by default, infinity is one."""
    return check_number(name, value, "a positive number", lambda n: 0 < n <= most)


def check_fraction(name: str, value: Any) -> float:
    return check_number(name, value, "a number from 0 to below 1", lambda n: 0 <= n < 1)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, f"{show(True)} or {show(False)}", value)
    return value


def check_choice(name: str, value: Any, *, choices: list[Any]) -> Any:
    # True == 1 in Python, and 1 is not a choice.
    if not any(value is choice or (type(value) is str and value == choice) for choice in choices):
        raise wrong(name, listed(map(show, choices)), value)
    return value


@dataclass(frozen=True)
class Whole:
    """Check for a whole number in a range; ``optional``: None is allowed, too."""

    least: int
    most: int | None = None
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        return check_whole_number(name, value, least=self.least, most=self.most)


@dataclass(frozen=True)
class Choice:
    """Check for one of a few values."""

    choices: tuple[Any, ...]

    def __call__(self, name: str, value: Any) -> Any:
        return check_choice(name, value, choices=list(self.choices))


def find_mismatch(fn: Callable[..., Any], /, *arguments: Any, **named: Any) -> str | None:
    """Describe why a function cannot take these arguments; None if it can."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some built-in functions have no signature
        return None
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        return f"takes {signature}: {error}"
    return None


def is_variable_name(text: str) -> bool:
    """Return whether a string can be the name of an environment variable in every shell."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None


def as_number(value: Any) -> float | None:
    """Return the value as a float if it is a real number (numpy's too, but no bool), else None."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else None
    except OverflowError:  # a whole number beyond the floats
        return math.inf


def describe_stranger(callback: Any) -> str:
    how = f": {call_of('Observer', on_epoch_end=...)} calls a function"
    advice = how if callable(callback) else ""
    kind = either("keras.callbacks.Callback", "callback of keras3")
    return f"`callbacks` contains {type(callback).__name__}, which is not a {kind}{advice}"


# Default folder of event files for TensorBoard, in the working directory; `tfdist tensorboard`
# shows all training runs in it.
LOGS = "logs"


def check_log_folder(value: Any) -> str | None:
    """Check the argument ``folder`` of `track_tensorboard`; return an absolute path, a URI or None.

    Raises `InputError` for a different type, or a file.
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise wrong("folder", "a folder or a URI", value)
    folder = re.sub(r"^file:(//)?(?=/)", "", os.fspath(value))
    if is_uri(folder):
        return folder
    if os.path.isfile(folder):
        raise InputError(f"`folder`: {show(folder)} is a file: specify a folder")
    return os.path.abspath(folder)


def check_tensorboard(there: str = "") -> None:
    """Check that TensorBoard is installed: without it TensorFlow writes no event files.

    The error adds ``there`` to its first part, such as `` on ann``.
    """
    if find_spec("tensorboard") is None:
        raise InputError(
            f"TensorBoard is not installed{there} for {sys.executable}: {install('tensorboard')}"
        )


def is_uri(folder: str) -> bool:
    """Return whether this is a URI, which rank 0 writes to; the driver writes to folders."""
    return "://" in folder


def choose_log_folder() -> str:
    """Return a new folder named by the time; a number is appended if it already exists."""
    first = os.path.abspath(os.path.join(LOGS, time.strftime("%Y%m%d-%H%M%S")))
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(folder for folder in names if not os.path.exists(folder))
