"""The user's functions and objects, pickled so that they run on machines without their source."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from pybackend.errors import InputError


def pickle_value(value: Any, what: str, owners: Iterable[Any] = ()) -> bytes:
    """Pickle a value for the workers.

    Functions and classes are sent as code if their module is one of the user's files, which the
    workers' machines need not have, and by name if it is an installed package.

    Parameters
    ----------
    what
        Names the value in errors.
    owners
        Functions or objects of ``value`` whose modules are examined.

    Raises
    ------
    InputError
        Something in it cannot be pickled.
    """
    try:
        with _by_value(_modules(owners)):
            return bytes(cloudpickle.dumps(value))
    except Exception as error:
        # What reticulate makes of an R function.
        hint = (
            ". It contains an R function: losses and metrics written in R need a `model_fn`, which "
            "builds the model on the workers; callbacks must be Keras's own"
            if "PyCapsule" in str(error)
            else ""
        )
        raise InputError(f"{what} cannot be sent to the workers: {error}{hint}") from error


def _modules(owners: Iterable[Any]) -> Iterator[ModuleType]:
    for owner in owners:
        name = getattr(owner, "__module__", None) or type(owner).__module__
        module = sys.modules.get(name)
        if module is not None and name != "__main__" and not _is_installed(module):
            yield module


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "pybackend":
        return True
    paths = {Path(p).resolve() for p in sysconfig.get_paths().values()}
    return any(folder in paths for folder in Path(file).resolve().parents)


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    registered = [m for m in dict.fromkeys(modules) if m.__name__ not in known]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
