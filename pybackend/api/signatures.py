"""Calls with arguments that do not exist here, answered in the words of the caller."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pybackend.errors import InputError

_P = ParamSpec("_P")
_T = TypeVar("_T")
# What Keras's `fit`, `evaluate` and `predict` take that has another form here.
_INSTEAD = {
    "x": "pass `data=(x, y)`",
    "y": "pass `data=(x, y)`",
    "sample_weight": "pass `data=(x, y, sample_weight)`",
    "validation_batch_size": "validation rows are read in batches of `batch_size`",
    "validation_steps": "all rows of `validation_data` are used",
    "steps": "all rows are used",
    "exchange": "an evaluation computes what depends on a batch from the global batch anyway",
    "loss_over": "pass `exchange=Exchange(loss_over=...)`",
    "transport": "pass `exchange=Exchange(transport=...)`",
    "compression": "pass `exchange=Exchange(compression=...)`",
    "encrypt": "pass `exchange=Exchange(encrypt=...)`",
    "return_dict": "a dict is what it returns",
    "num_workers": "pass `workers`",
    "gpus": "pass `resources=Resources(gpus=1)`, the number of each worker",
    "cpus": "pass `resources=Resources(cpus=4)`, the number of each worker",
    "memory": "pass `resources=Resources(memory='4GB')`, that of each worker",
    "spark_context": "pass a SparkSession as `spark`",
    **{
        name: f"pass `data_options=DataOptions({name}=...)`"
        for name in ("tensors", "categories", "encode", "tfrecord_spec", "repartition", "in_memory")
    },
}


def explain_arguments(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function raise an `InputError` that says what to pass, in place of a TypeError.

    The frames that an `InputError` or Ctrl-C has gone through are left out.
    """
    signature = inspect.signature(fn)

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(_explain(fn.__name__, signature, args, kwargs) or str(error)) from None
        _open_standard_streams()
        try:
            return fn(*args, **kwargs)
        except (InputError, KeyboardInterrupt) as error:  # how it came about is of no help
            raise error.with_traceback(None) from error.__cause__

    return call


def _open_standard_streams() -> None:
    """Give a process without standard streams, such as a daemon's, ones that lead nowhere.

    Else the next file or connection that it opens has one of their numbers, and is taken for it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest number that is free is the next one given
            os.open(os.devnull, os.O_RDWR)


def suggest(unknown: str, known: Iterable[str]) -> str | None:
    """What to pass in place of an argument that is not known; None if nothing is like it."""
    near = difflib.get_close_matches(unknown, list(known), 1)
    return _INSTEAD.get(unknown) or (f"do you mean `{near[0]}`?" if near else None)


def _explain(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    known = list(signature.parameters.values())
    by_place = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_place):
        return (
            f"{name}() takes {', '.join(f'`{place}`' for place in by_place)} and otherwise named "
            f"arguments, but {len(args)} values came without a name: pass arrays together as "
            f"(x, y), and name what follows, e.g. {known[len(by_place)].name}=..."
        )
    unknown = next((given for given in kwargs if given not in signature.parameters), None)
    if unknown is not None:
        instead = suggest(unknown, signature.parameters) or "see its help"
        return f"{name}() has no argument `{unknown}`: {instead}"
    missing = [p for p in by_place if p not in kwargs][len(args) :]
    if not missing:
        return None
    first = signature.parameters.keys() & {"spark"} and (
        ": `spark`, the first, is None or 'local' for this machine, or a SparkSession"
    )
    return f"{name}() needs {', '.join(f'`{one}`' for one in missing)}{first or ''}"
