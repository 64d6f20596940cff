"""Options for a model's classes and file, in calls with a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_flag, name_arguments
from pybackend.core.words import call_of, one_of, show


@name_arguments
@dataclass(frozen=True)
class ModelOptions:
    """Options for custom classes of a model, and for the file of the trained model.

    Parameters
    ----------
    uri
        Only in training: where rank 0 writes the trained model, instead of sending it through the
        driver: a path that all hosts share, or a URI for fsspec, that ends in .h5 or .keras. Needed
        for models of a gigabyte or more. None (default): the model returns to this session.
    custom_objects
        Maps names to classes or functions, for custom layers, losses and metrics. The custom
        classes and loss functions of a model that you pass are found without it.
    safe_mode
        False: a model built by a function may be returned as a complete file, even if it contains
        Python code (a ``Lambda`` layer). True (default): only its weights are returned, and the
        function rebuilds the model here. A model that you pass needs no such permission.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    uri: str | os.PathLike[str] | None = None
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", None if self.uri is None else _check_uri(self.uri))
        _check_custom_objects(self.custom_objects)
        check_flag("safe_mode", self.safe_mode)

    @property
    def file(self) -> str | None:
        """The ``uri`` as text."""
        return None if self.uri is None else os.fspath(self.uri)


def check_model_options(value: Any) -> ModelOptions:
    """Check the argument ``model_options``; None is the default `ModelOptions`."""
    if value is None:
        return ModelOptions()
    if not isinstance(value, ModelOptions):
        example = call_of("pybackend.ModelOptions", uri="s3://bucket/model.h5")
        raise InputError(
            f"`model_options` must be {one_of('ModelOptions')}, e.g. {example}, not {show(value)}"
        )
    return value


def _check_uri(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"`uri` of a model must be a path or URI, not {show(value)}")
    uri = os.fspath(value)
    if not uri.endswith((".h5", ".keras")):
        raise InputError(f"`uri` of a model must end in .h5 or .keras, not {show(uri)}")
    # Workers have another working directory.
    return uri if "://" in uri else os.path.abspath(uri)


def _check_custom_objects(value: Any) -> None:
    if not isinstance(value, (Mapping, type(None))):
        raise InputError(
            f"`custom_objects` must map names to classes or functions, not {type(value).__name__}"
        )
    for name, one in (value or {}).items():
        if not (isinstance(name, str) and callable(one)):
            raise InputError(
                f"`custom_objects` must map names to classes or functions, not {show(name)} to "
                f"{show(one)}"
            )
