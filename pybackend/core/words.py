"""Text in messages: values, code and names as users of Python or of R write them, and numbers.

The language is a setting of the process, which R's package changes. Workers take it from their job,
so that their errors arrive in the user's language, too. The functions return text in the language
of the moment: do not call them in a module's constants.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, Literal

Language = Literal["Python", "R"]

# Classes, each of which a function makes in R.
_CLASSES = (
    "DataOptions Elastic Exchange LocalSteps ModelOptions Observer ParameterServer Recovery "
    "Resources"
)
_FUNCTIONS = {one: re.sub(r"\B([A-Z])", r"_\1", one).lower() for one in _CLASSES.split()}
_FUNCTIONS["ScaleLearningRate"] = "list"
_TERMS = {
    "(x, y)": "list(x, y)",
    "(x, y, sample_weight)": "list(x, y, sample_weight)",
    "CategoricalCrossentropy": "`loss_categorical_crossentropy()`",
    "DataFrame": "Spark table",
    "SparseCategoricalCrossentropy": "`loss_sparse_categorical_crossentropy()`",
    "Spark DataFrame": "Spark table",
    "TrainResult": "tfdist_fit",
    "barrier_run": "barrier_apply",
    "dict": "named list",
    "keras.callbacks.TerminateOnNaN()": "`keras3::callback_terminate_on_nan()`",
    "keras.Model(inputs, outputs)": "keras_model()",
    "keras.Sequential": "keras_model_sequential()",
    "keras.metrics.Metric": "keras3::Metric()",
    "keras.random.SeedGenerator": "keras3::random_seed_generator()",
    "model.predict()": "predict()",
    "model.save": "write_model()",
    "pandas or polars data frame": "data frame",
    "spark": "sc",
    **{name: f"{function}()" for name, function in _FUNCTIONS.items()},
}
_CONSTANTS = {None: "NULL", True: "TRUE", False: "FALSE"}
_NUMBERS = {"inf": "Inf", "-inf": "-Inf", "nan": "NaN"}
_KINDS = {dict: "a list", float: "a number", int: "a number", list: "a list", tuple: "a list"}
# What R calls a syntactic name, unless it is reserved.
_NAME = re.compile(r"(?:[A-Za-z]|\.(?![0-9]))[A-Za-z0-9._]*")

_RESERVED = {"if", "else", "for", "while", "repeat", "function", "break", "next", "in"}
_RESERVED |= {"TRUE", "FALSE", "NULL", "NA", "Inf", "NaN"}

_language: Language = "Python"


def speak(language: Language) -> None:
    global _language
    _language = language


def spoken() -> Language:
    return _language


def either(python: str, r: str) -> str:
    """Return the first text for users of Python, the second for users of R."""
    return r if _language == "R" else python


class Code(str):
    """Code, which `show` leaves unchanged."""

    __slots__ = ()
    __repr__ = str.__str__


REST = Code("...")


def show(value: Any) -> str:
    """Return a value as code: its ``repr`` or, for R, what its users would write."""
    if value is ...:
        return REST
    return _show_in_r(value) if _language == "R" else repr(value)


def setting(**values: Any) -> str:
    """Return arguments of a call: ``workers=2`` or, in R, ``workers = 2``."""
    sign = either("=", " = ")
    return ", ".join(f"{name}{sign}{show(value)}" for name, value in values.items())


def call_of(function: str, /, *arguments: Any, **settings: Any) -> Code:
    """Return the call of a function of tfdist: ``Elastic(2)`` or, in R, ``elastic(2)``."""
    own = function.removeprefix("pybackend.")
    name = either(function, _FUNCTIONS.get(own, own))
    inside = [*map(show, arguments), setting(**settings)]
    return Code(f"{name}({', '.join(filter(None, inside))})")


def term(name: str) -> str:
    """Return the name of a function, a class or a kind of data."""
    return either(name, _TERMS[name])


def one_of(*classes: str) -> str:
    """Return "an Exchange or a Resources" or, in R, "made by `exchange()` or `resources()`"."""
    if _language == "R":
        return f"made by {listed(f'`{term(name)}`' for name in classes)}"
    return listed(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in classes)


def listed(texts: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *others, last = texts
    return f"{', '.join(others)} or {last}" if others else last


def kind_of(value: Any) -> str:
    """Return the class of a value or, in R, "a number", "a list", "a function" or text as code."""
    if value is None or (_language == "R" and isinstance(value, (bool, str))):
        return show(value)
    if _language == "R" and isinstance(value, FunctionType):
        return "a function"
    return either(type(value).__name__, _KINDS.get(type(value), type(value).__name__))


def element(name: str, key: Any) -> Code:
    """Return an element of a list as code: ``worker[0]`` or, in R, ``worker[1]``."""
    counted = isinstance(key, int) and _language == "R"
    return Code(f"{name}[{show(key + 1 if counted else key)}]")


def row_number(row: int) -> str:
    """Return "row 3 (counting from 0)" or, in R, "row 4"."""
    return either(f"row {row} (counting from 0)", f"row {row + 1}")


def install(extra: str) -> str:
    """Return the command that installs an optional part of tfdist."""
    in_r = f'run `install_tfdist(extras = c("cpu", "{extra}"))`'
    return either(f"pip install 'tfdist[{extra}]'", in_r)


def _show_in_r(value: Any) -> str:
    if isinstance(value, Code):
        return str(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # R has the same escapes
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, float):
        text = repr(float(value)).removesuffix(".0")
        return _NUMBERS.get(text, text)
    if type(value) is tuple and all(one is None or type(one) is int for one in value):
        return f"({', '.join(map(_size, value))})"  # a shape
    if type(value) in (list, tuple):
        return _show_items(value)
    if type(value) is dict:
        return f"list({', '.join(f'{_name(key)} = {_item(one)}' for key, one in value.items())})"
    if is_dataclass(value) and type(value).__name__ in _FUNCTIONS:
        given = {one.name: getattr(value, one.name) for one in fields(value)}
        return call_of(type(value).__name__, **given)
    return repr(value)


def _show_items(values: Sequence[Any]) -> str:
    kinds = {type(one) for one in values if not isinstance(one, Code)}
    if not values or len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        return f"list({', '.join(map(_item, values))})"
    if len(values) == 1 and values[0] is not REST:  # R has no single values
        return show(values[0])
    return f"c({', '.join(map(show, values))})"


def _item(value: Any) -> str:
    """Show a part of a list; a shape in it is a vector."""
    is_shape = type(value) is tuple and {type(one) for one in value} <= {int, type(None)}
    return _show_items([Code(_size(one)) for one in value]) if is_shape else show(value)


def _size(size: int | None) -> str:
    return "NA" if size is None else str(size)


def _name(key: Any) -> str:
    if not isinstance(key, str):
        return f'"{key}"'
    return key if _NAME.fullmatch(key) and key not in _RESERVED else f"`{key}`"


def show_number(value: float | None) -> str:
    """Format a number as ``12,345``, ``0.1235`` or ``1.2e-06``; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_value(value: Any) -> str:
    """Format a setting, e.g. ``yes``, ``0.001`` or, of a dict, ``kind Exchange, buckets 4``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {show_value(one)}" for k, one in value.items() if one is not None)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_loss(value: float) -> str:
    """Format with four decimals, or four digits if that shows too little: 0.2912, 2.314e-05."""
    is_shown = not value or 5e-5 <= abs(value) < 1e6
    return f"{value:.4f}" if is_shown else f"{value:.4g}"


def show_bytes(number: float) -> str:
    """Format a number of bytes as ``2.3 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def show_seconds(value: float | None, is_estimate: bool = False) -> str:
    """Format seconds as ``850 µs``, ``12.3 ms``, ``4.5 s``, ``3 min 12 s`` or ``2 h 5 min``.

    Estimates are in whole seconds and, from 100 s on, in whole minutes.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if is_estimate:
        value = round(value) if value < 99.5 else 60 * round(value / 60)
    if value < 99.95:
        unit, size = next(
            ((u, s) for u, s in (("µs", 1e6), ("ms", 1e3)) if 0 < value * s < 999.5), ("s", 1)
        )
        return f"{value * size:.3g} {unit}"
    minutes, seconds = divmod(round(value), 60)
    # Hours without seconds.
    parts = [(minutes // 60, "h"), (minutes % 60, "min"), (seconds * (minutes < 60), "s")]
    return " ".join(f"{number:,} {unit}" for number, unit in parts if number)


def show_time(seconds: float) -> str:
    """Return a time since 1970 as local date and time, for tables."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
