"""Check the model in a request, and encode it as files for the workers."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pybackend.core.api.result import TrainResult
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import InputError, SerializationError, TfdistError
from pybackend.core.job.arguments import describe_stranger
from pybackend.core.job.job import EXTRAS, MODEL_DIGESTS, ModelJob, argument_of
from pybackend.core.job.pickling import pickle_value
from pybackend.core.words import either, setting, spoken, term

if TYPE_CHECKING:
    from pybackend.core.model.view import ModelView


def find_source(model: Any) -> Literal["file", "function"]:
    """Return whether a model (or a result with one) or a function that builds one was passed.

    Raises
    ------
    InputError
        It is neither.
    """
    if isinstance(model, TrainResult) or is_keras_model(model):
        return "file"
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("tf_keras"):
        raise InputError("this is a Keras 2 model (tf_keras): tfdist trains Keras 3 models")
    if not callable(model):
        raise InputError(
            "`model` must be a compiled Keras model, a function that returns one, or a "
            f"{term('TrainResult')}, not a {kind}"
        )
    _check_needs_no_arguments(model)
    return "function"


def is_keras_model(model: Any) -> bool:
    """Return whether this is a Keras 3 model; if so, Keras is already loaded."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


def encode_model(
    source: Any,
    custom_objects: Mapping[str, Any],
    job: ModelJob,
    callbacks: Sequence[Any] = (),
    as_file: bool = False,
    rows: Any = None,
    datasets: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Encode the model, its callbacks and its custom objects as files for the workers.

    Functions that return data or the model are pickled with the callbacks, and so share objects
    with them on the workers, too. The model becomes a Keras file if that preserves the whole model,
    which is checked on some rows. Otherwise it is pickled, unless ``as_file`` is set.

    Parameters
    ----------
    source
        A `ModelView`, or the function that builds the model.
    """
    sent: dict[str, Any] = {
        "callbacks": list(callbacks),
        "custom_objects": _add_registered_names(custom_objects),
        "functions": {k: v for k, v in (datasets or {}).items() if isinstance(v, FunctionRows)},
    }
    is_built = job.model_source != "function"
    if spoken() == "R" and (is_built or callbacks or custom_objects):
        from pybackend.core.model.checks import check_r_functions

        check_r_functions(source.model if is_built else None, callbacks, custom_objects, job.kind)
    if not is_built:
        return _encode_extras({**sent, "model": source})
    from pybackend.core.model.checks import check_model
    from pybackend.core.model.compare import digest_start
    from pybackend.core.model.transfer import encode_file, encode_objects, holds_parts

    model = source.model
    check_model(source, job)
    extras, start = _encode_extras(sent), {}
    if job.kind == "train":
        digests = digest_start(model, not job.shards_optimizer)
        start = {MODEL_DIGESTS: json.dumps(digests).encode()}
    file_error: TfdistError | None = None
    functions = [rows.fn for rows in sent["functions"].values()]
    if as_file or not holds_parts(callbacks, functions, model):
        try:
            file = encode_file(source, custom_objects, job.safe_mode, job.kind, rows)
            return {**extras, **file, **start}
        except (InputError, SerializationError) as error:
            if as_file:
                raise
            file_error = error
    try:
        return {**encode_objects(model, sent, rows), **start}
    except Exception as error:  # an open file, a lock
        if file_error is not None:
            raise type(file_error)(f"{file_error} It cannot be pickled either: {error}") from error
        raise InputError(
            "the callbacks or the function that returns the data refer to parts of the model and "
            f"cannot be sent together with it: {error}"
        ) from error


def check_callbacks(callbacks: Sequence[Any], job: ModelJob) -> None:
    """Check that callbacks are Keras callbacks, and that the job supports them."""
    # If there is a valid callback, Keras is loaded already.
    if "keras" in sys.modules:
        from pybackend.core.model.callbacks import check_callbacks, check_sharded_callbacks

        check_callbacks(callbacks)
        if job.shards_optimizer:
            check_sharded_callbacks(callbacks)
    elif callbacks:
        raise InputError(describe_stranger(callbacks[0]))


def add_custom_objects(view: ModelView, custom_objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the custom classes and functions found in a model."""
    return {**view.custom_objects, **(custom_objects or {})}


def _encode_extras(sent: Mapping[str, Any]) -> dict[str, bytes]:
    if not any(sent.values()):
        return {}
    named = {f"the `{argument_of(name)}` function": v.fn for name, v in sent["functions"].items()}
    if "model" in sent:
        named["the `model` function"] = sent["model"]
    content = pickle_value(
        sent,
        "`callbacks`, `custom_objects`, or a part of the model,",
        [*sent["callbacks"], *sent["custom_objects"].values(), *named.values()],
        named.items(),
    )
    return {EXTRAS: content}


def _add_registered_names(custom_objects: Mapping[str, Any]) -> dict[str, Any]:
    """Add the names under which classes are registered here: workers lack these registrations."""
    keras = sys.modules.get("keras")
    if keras is None:
        return dict(custom_objects)
    registered = {
        keras.saving.get_registered_name(value): value
        for value in custom_objects.values()
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    return {**registered, **custom_objects}


def _check_needs_no_arguments(fn: Any) -> None:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # some built-in functions have no signature
        return
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"the `model` function needs arguments ({', '.join(needed)}): workers call it without "
            f"any, so wrap it, e.g. {either('lambda:', 'function()')} build({setting(units=64)})"
        )
