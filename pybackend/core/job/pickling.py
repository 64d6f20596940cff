"""Pickle the user's functions and objects for machines that do not have their source."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import io
import linecache
import sys
import sysconfig
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import cloudpickle

from pybackend.core.errors import InputError
from pybackend.core.words import show

# Limits for pickling parts to find those that fail.
_SECONDS = 10
_MOST_PARTS = 10_000
# Names of Keras's base classes in messages.
_KINDS = {name: name.lower() for name in ("Callback", "Model", "Layer", "Loss", "Metric")}
_KINDS |= {"Optimizer": "optimizer", "LearningRateSchedule": "schedule"}
_OTHER = "other"


def explain_failure(value: Any, what: str, dump: Callable[[Any], object], error: Exception) -> str:
    """Describe which attribute of which object cannot be sent to the workers, and what to do.

    ``what`` names the value, if the attribute does not belong to a Keras object. ``dump`` pickles a
    value, and raised ``error`` for this one.
    """
    part, path, owner = _find_failing_part(value, dump)
    advice = ". Create it inside the function that uses it" if path else ""
    if owner is not None:
        kind = _KINDS[_find_base(owner)]
        what = f"the {kind} {(owner if isinstance(owner, type) else type(owner)).__name__}"
        advice = ". Pass a function that builds and compiles the model: each worker calls it"
        if kind == "callback":
            advice = ". Create it in the callback's `on_train_begin`, which each worker calls"
    because = f" because of `{path}` (class {type(part).__qualname__})" if path else ""
    return f"{what} cannot be sent to the workers{because}: {str(error).rstrip('.')}{advice}"


def _find_failing_part(value: Any, dump: Callable[[Any], object]) -> tuple[Any, str, Any]:
    """Find a part that fails although none of its own parts do.

    A public attribute of an instance of a user-defined class is preferred, then the nearest part.
    Returns the part, its path, and the Keras object at the beginning of the path, if there is one.
    If there are too many parts, it may be a container of the part that fails.
    """
    found: list[tuple[Any, str, Any]] = []
    tried: dict[int, tuple[Any, bool]] = {}

    def fails(part: Any) -> bool:
        if id(part) not in tried:
            tried[id(part)] = part, True
            with suppress(Exception):  # pickling raises whatever the part's own methods do
                dump(part)
                tried[id(part)] = part, False
        return tried[id(part)][1]

    end = time.monotonic() + _SECONDS  # models are pickled in another thread
    waiting = deque([(value, "", None)])
    while waiting:
        part, path, owner = waiting.popleft()
        if _find_base(part) in _KINDS:
            path, owner = "", part
        known = set(tried)
        failing = [
            (child, path + step, owner)
            for step, child in list_parts(part, is_sent)
            if len(tried) < _MOST_PARTS and time.monotonic() < end and fails(child)
        ]
        # Containers and internal objects of Keras fail because of their parts.
        is_inner = isinstance(part, (Mapping, list, tuple, set)) or _find_base(part) == _OTHER
        if not failing and not is_inner:
            found.append((part, path.lstrip(".").removeprefix("`, which uses `"), owner))
        waiting.extend(each for each in failing if id(each[0]) not in known)
    found.append((value, "", None))
    return min(found, key=lambda one: _rank(one[1], one[2]))


def _rank(path: str, owner: Any) -> tuple[bool, ...]:
    is_library = owner is not None and not is_sent(type(owner))
    is_named = bool(path) or owner is not None
    return not is_named, is_library, path.startswith("_") or "._" in path


def list_parts(part: Any, is_user_code: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container, a function, or a user-defined or Keras object.

    ``is_user_code`` returns whether a class or a function is user-defined, so that its parts are
    listed.
    """
    if isinstance(part, dict):  # other mappings may read files
        yield from ((f"[{show(key)}]", item) for key, item in part.items())
    elif isinstance(part, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", item) for number, item in enumerate(part))
    elif inspect.ismethod(part):
        yield "", part.__self__
        yield "", part.__func__
    elif isinstance(part, FunctionType | type) and not is_user_code(part):
        return
    elif isinstance(part, FunctionType):
        yield from ((f"`, which uses `{name}", item) for name, item in _list_used(part))
    elif isinstance(part, type):
        yield from _list_attributes(part)
        yield from (("", base) for base in part.__bases__)
    elif _find_base(part) or is_user_code(type(part)):
        yield from _list_attributes(part)
        yield from list_parts(type(part), is_user_code)


def _list_attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's own attributes, public ones first, without methods that Keras wrapped."""
    own = sorted(getattr(part, "__dict__", {}).items(), key=lambda item: item[0].startswith("_"))
    for name, value in own:
        if not name.startswith("__") and not _is_of_keras(getattr(value, "__globals__", {})):
            yield f".{name}", value


def _list_used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values sent with a function: defaults, closure, and globals that it uses."""
    parameters = inspect.signature(function).parameters.values()
    yield from ((p.name, p.default) for p in parameters if p.default is not p.empty)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    names = set(_list_globals(function.__code__))
    yield from ((k, v) for k, v in function.__globals__.items() if k in names)


def _list_globals(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables in a function, and in the functions inside it."""
    yield from (s.argval for s in dis.get_instructions(code) if s.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_globals(constant)


def _find_base(part: Any) -> str:
    """Return the Keras class from which an object or a class is derived; empty if there is none."""
    kind = part if isinstance(part, type) else type(part)
    names = [base.__name__ for base in kind.__mro__ if _is_of_keras(vars(base))]
    return next((name for name in names if name in _KINDS), _OTHER if names else "")


def _is_of_keras(names: Mapping[str, Any]) -> bool:
    module = names.get("__module__") or names.get("__name__")
    return str(module).startswith("keras.")


_ABOUT_R = (
    "it contains an R function, which exists only in this session. Layers, losses and metrics "
    "written in R need a `model_fn`: pass the function that builds and compiles the model, and "
    "the workers call it. Callbacks must be Keras's own, or `observer()`"
)


class Pickler(cloudpickle.Pickler):
    """Pickler of cloudpickle that adds the source of user-defined functions to their code.

    ``look`` sees each value first, and returns how to reduce it, or None.
    """

    def __init__(
        self,
        file: IO[bytes],
        protocol: int | None = None,
        look: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        super().__init__(file, protocol)
        self._look = look
        self._sources: dict[str, str] = {}  # one object per file, which is written once

    def reducer_override(self, value: Any) -> Any:
        if reduced := self._look(value):
            return reduced
        if isinstance(value, CodeType):
            return self._reduce_code(value)
        tf = sys.modules.get("tensorflow")
        if tf is not None and isinstance(value, tf.types.experimental.PolymorphicFunction):
            return _reduce_tf_function(value)
        reduced = super().reducer_override(value)
        if not isinstance(value, FunctionType) or reduced is NotImplemented:
            return reduced
        make, arguments, state, items, pairs, set_state = reduced
        names = find_annotations(value)
        return make, arguments, (state, set_state, names), items, pairs, set_function

    def _reduce_code(self, code: CodeType) -> Any:
        make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
        file = code.co_filename
        # cloudpickle 3.1.3 writes no names of files.
        parts = tuple(file if part == "<dynamic-code>" else part for part in parts)
        if _is_in_packages(file):
            return make, parts
        if file not in self._sources:
            self._sources[file] = read_source(file)
        return make_code, (make, parts, file, self._sources[file])


def _reduce_tf_function(function: Any) -> Any:
    """Reduce a ``tf.function`` without its traces, which cannot be sent."""
    options = {k: v for k, v in function.__getstate__().items() if isinstance(v, bool | str)}
    return _make_tf_function, (function.python_function, function.input_signature, options)


def _make_tf_function(function: Any, signature: Any, options: Mapping[str, Any]) -> Any:
    import tensorflow as tf

    made = tf.function(function, input_signature=signature)
    made.__setstate__({**made.__getstate__(), **options})
    return made


def pickle_value(
    value: Any,
    what: str,
    owners: Iterable[Any] = (),
    parts: Iterable[tuple[str, Any]] = (),
    dump: Callable[[Any, Callable[[Any], None]], bytes] = lambda value, _: _pickle(value),
) -> bytes:
    """Pickle a value for the workers; raise `InputError` if some part of it cannot be pickled.

    Functions and classes are sent as code if their module is one of the user's files, which the
    workers' machines need not have, and by name if it is an installed package. The modules of
    ``owners``, functions or objects of the value, are examined. ``what`` names the value in errors,
    and ``parts`` are parts of it with their names. The second argument of ``dump`` registers the
    module of a value, as `sending_code` does.
    """
    with sending_code() as send_code:
        for owner in owners:
            send_code(owner)
        try:
            return dump(value, send_code)
        except Exception as error:
            for name, part in parts:  # the error of the part that fails is more precise
                pickle_value(part, name)
            if "PyCapsule" in str(error):  # reticulate's R functions
                raise InputError(f"{what} cannot be sent to the workers: {_ABOUT_R}") from error
            explained = explain_failure(value, what, lambda part: dump(part, send_code), error)
            raise InputError(explained) from error


def _pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def is_sent(owner: Any) -> bool:
    """Return whether a class or a function is user-defined, and sent as code."""
    return owner.__module__ == "__main__" or _module_to_send(owner) is not None


def _module_to_send(owner: Any) -> ModuleType | None:
    """Return the module of a class, a function or an object, if it is one of the user's files."""
    while isinstance(owner, partial):
        owner = owner.func
    name = getattr(owner, "__module__", None) or type(owner).__module__
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or _is_installed(module):
        return None
    return module


@cache
def _is_installed(module: ModuleType) -> bool:
    if (file := getattr(module, "__file__", None)) is None:
        # A built-in, or a module that the session made itself.
        return getattr(module, "__spec__", None) is not None
    return module.__name__.partition(".")[0] == "pybackend" or _is_in_packages(file)


@cache
def _is_in_packages(file: str) -> bool:
    paths = {Path(p).resolve() for p in sysconfig.get_paths().values()}
    parents = set(Path(file).resolve().parents)
    # pip's --user and --target have folders of their own.
    others = {Path(p).resolve() for p in sys.path if p} & parents
    return bool(paths & parents) or any(any(folder.glob("*.dist-info")) for folder in others)


@contextmanager
def sending_code() -> Iterator[Callable[[Any], None]]:
    """Have cloudpickle send registered user modules as code within this context.

    Yields a function that registers the module of a class, a function or an object.
    """
    # The registry is global: a module that the user registered must stay in it.
    known = set(cloudpickle.list_registry_pickle_by_value())
    registered: list[ModuleType] = []

    def send_code(value: Any) -> None:
        module = _module_to_send(value)
        if module is not None and module.__name__ not in known:
            known.add(module.__name__)
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)

    try:
        yield send_code
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


# Source of user-defined functions, sent with their code.
# Tracebacks show its lines, and TensorFlow's AutoGraph reads it: without the source, an ``if`` on
# a tensor fails on a machine that lacks the file, and everywhere for a cell of a notebook.


def read_source(file: str) -> str:
    """Return the text of a file or a notebook cell; empty if it cannot be read."""
    linecache.checkcache(file)  # it may have been edited
    return "".join(linecache.getlines(file))


def make_code(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str, text: str) -> Any:
    """Make a code object, and store its source in this process."""
    if read_source(file) != text:
        # An entry without a modification time stays in the cache, whether or not the file exists.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return make(*parts)


def find_annotations(function: FunctionType) -> set[str]:
    """Return the names in a function's annotations."""
    # AutoGraph compiles the source with its annotations, but cloudpickle sends only the globals
    # that the code reads.
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or part of an expression
        return set()
    parts = [getattr(n, name, None) for n in ast.walk(tree) for name in ("annotation", "returns")]
    names = {n.id for one in parts if one for n in ast.walk(one) if isinstance(n, ast.Name)}
    return names - set(vars(builtins))


def set_function(function: FunctionType, state: tuple[Any, Any, set[str]]) -> None:
    """Complete an unpickled function, and define the names in its annotations."""
    own, set_state, names = state
    set_state(function, own)
    for name in names:
        function.__globals__.setdefault(name, _ANNOTATION)


class _Annotation:
    """Placeholder for a name in an annotation, whose package need not be installed here."""

    def __getattr__(self, name: str) -> _Annotation:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any) -> _Annotation:
        return self

    __getitem__ = __or__ = __ror__ = __call__


_ANNOTATION = _Annotation()
