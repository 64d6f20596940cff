"""Check the model, callbacks and functions of a request, and encode them for the workers."""

from __future__ import annotations

import dis
import gc
import inspect
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pybackend.core.api.calls import TrainedModel
from pybackend.core.data.batches import describe_function, is_dataset
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import InputError, SerializationError, TfdistError
from pybackend.core.job.arguments import describe_stranger
from pybackend.core.job.job import EXTRAS, MODEL_DIGESTS, ModelJob, argument_of
from pybackend.core.job.pickling import is_sent, list_parts, pickle_value
from pybackend.core.words import either, setting, spoken, term

if TYPE_CHECKING:
    from pybackend.core.model.view import ModelView


def find_source(model: Any) -> Literal["file", "function"]:
    """Return whether a model (or a result with one) or a function that builds one was passed."""
    if isinstance(model, TrainedModel) or is_keras_model(model):
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

    ``source`` is a `ModelView`, or the function that builds the model. Functions that return data
    or the model are pickled with the callbacks, and so share objects with them on the workers, too.
    The model becomes a Keras file if that preserves the whole model, which is checked on some rows.
    Otherwise it is pickled, unless ``as_file`` is set.
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
        # What Keras cannot write, cloudpickle often can.
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
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):  # some built-in functions have no signature
        return
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"the `model` function needs arguments ({', '.join(needed)}): workers call it without "
            f"any, so wrap it, e.g. {either('lambda:', 'function()')} build({setting(units=64)})"
        )


def check_shared_state(data: Any, name: str, callbacks: Sequence[Any]) -> None:
    """Reject callbacks that hold a variable or changing object that a data set uses.

    The data set is read before training starts, and would not change with it.
    """
    # Workers read what a `data` function returns in each epoch, but store validation rows.
    if not callbacks or not (is_dataset(data) or (name != "data" and callable(data))):
        return
    used = _find_used(data)
    for callback in callbacks:
        if found := _find_shared(callback, used):
            path, part = found
            what = "is" if part is data else "is used by"
            function = f"pass a function, {describe_function()}, or " if name == "data" else ""
            raise InputError(
                f"the callback {type(callback).__name__} may change `{path}` (class "
                f"{type(part).__name__}), which {what} `{name}`, but `{name}` is read before "
                f"training starts, so its rows would not change as in Keras: {function}give the "
                "callback an object of its own"
            )


def _find_used(data: Any) -> dict[int, Any]:
    """Return all objects that a data set refers to, by id, and those that its functions use."""
    tensorflow = sys.modules["tensorflow"]
    found: dict[int, Any] = {}
    waiting = [data]
    while waiting:
        part = waiting.pop()
        # A module refers to nearly everything, and so does a class of a library.
        is_library = isinstance(part, ModuleType) or (isinstance(part, type) and not is_sent(part))
        # TensorFlow's default graph refers to the functions of other data sets.
        if is_library or type(part) is tensorflow.Graph or id(part) in found:
            continue
        found[id(part)] = part
        if isinstance(part, type):
            waiting += [*vars(part).values(), *part.__bases__]
        elif isinstance(part, FunctionType):
            waiting += [used for _, used in list_parts(part, is_sent)]
            waiting += [one for one in gc.get_referents(part) if one is not part.__globals__]
        else:
            waiting += gc.get_referents(part)
    return found


def _find_shared(callback: Any, used: Mapping[int, Any]) -> tuple[str, Any] | None:
    """Return the path and the value of a variable, or of an object that is changed, in ``used``."""
    tensorflow = sys.modules["tensorflow"]
    parts: dict[int, tuple[str, Any]] = {}
    waiting: deque[tuple[str, Any]] = deque([("", callback)])
    while waiting:
        path, part = waiting.popleft()
        if id(part) not in parts:
            parts[id(part)] = path, part
            waiting += [(path + step, one) for step, one in list_parts(part, is_sent)]
    methods = {
        id(method.__code__)
        for kind in type(callback).__mro__
        for method in vars(kind).values()
        if isinstance(method, FunctionType)
    }
    changed = {
        name
        for _, part in parts.values()
        if isinstance(part, FunctionType) and part.__name__ != "__init__"
        for name in _list_stored(part.__code__, id(part.__code__) in methods)
    }
    for path, part in parts.values():
        if isinstance(part, tensorflow.Variable):
            # A function of tf.data may hold only the variable's handle.
            is_shared = id(part) in used or id(part.handle) in used
        else:
            is_constant = isinstance(part, (type, FunctionType, ModuleType, logging.Logger))
            own = getattr(part, "__dict__", {re.split(r"\W", path)[-1] + "[]"})
            is_shared = id(part) in used and not is_constant and not changed.isdisjoint(own)
        if is_shared:
            return path.lstrip(".").removeprefix("`, which uses `") or "self", part
    return None


_CHANGES_ITEM = ["COPY", "COPY", "BINARY_SUBSCR"]


def _list_stored(code: CodeType, is_own: bool) -> Iterator[str]:
    """Yield the attributes that a function assigns, and ``name[]`` if it assigns an item.

    ``is_own``: a method of the callback, which may assign to itself.
    """
    steps = list(dis.get_instructions(code))
    names = [step.opname for step in steps]
    for index, step in enumerate(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            holder = steps[index - 1]
            is_self = holder.opname == "LOAD_FAST" and holder.argval in code.co_varnames[:1]
            if not (is_own and is_self):
                yield step.argval
        # a[b] = c; a[b] += c
        elif step.opname == "STORE_SUBSCR" or names[index : index + 3] == _CHANGES_ITEM:
            yield f"{steps[index - 2].argval}[]"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_stored(constant, is_own)
        elif isinstance(constant, str) and "setattr" in code.co_names:
            yield constant
