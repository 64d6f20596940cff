"""A function written in R that runs in a Python process, or in R that embeds Python."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from pybackend.core.errors import InputError, RError
from pybackend.core.job.arguments import wrong
from pybackend.core.job.context import WorkerContext
from pybackend.core.words import show

# Newer versions call R_getVar, which exists since R 4.5. The extra `r44` of tfdist installs these.
FOR_R_BEFORE_45 = ("rpy2-rinterface==3.6.5", "rpy2-robjects==3.6.4")
ADVICE = f"for R before 4.5 with {' and '.join(FOR_R_BEFORE_45)}"


# Input of a call, and its output from R. R accesses it by its full name, so
# that reticulate converts the values, and a model stays the same Python object.
exchange: dict[str, Any] = {}
# Calls R if the process is R with Python embedded.
_call_r: Callable[[], object] | None = None
# R has no 64-bit integers: reticulate converts them to doubles.
_LARGEST_EXACT = 1 << 53


class RFunction:
    """Function written in R, for `barrier_train` and `barrier_run`.

    It is sent to the workers as text or bytes, and runs there in TensorFlow's process. So models
    built in R are trained unchanged, including layers, losses and metrics written in R. Only the
    weights of such a model are returned, and the function is called again when the model is used.
    The workers' machines need R with the package reticulate, and rpy2 in TensorFlow's Python
    environment.

    Parameters
    ----------
    code
        R source text of a function, e.g. ``"function() keras_model()"``, or the bytes of R's
        ``serialize(f, NULL)``.
    packages
        R packages to attach before the function runs.
    library_paths
        Additional folders to search for R packages, if they exist.

    Raises
    ------
    InputError
        ``code`` is not an R function.
    """

    def __init__(
        self,
        code: str | bytes | bytearray,
        packages: Sequence[str] = (),
        library_paths: Sequence[str] = (),
    ) -> None:
        self.code = _check_code(code)
        self.packages = _check_names("packages", packages)
        self.library_paths = _check_names("library_paths", library_paths)

    def __repr__(self) -> str:
        shown = repr(self.code[:40]) if isinstance(self.code, str) else f"{len(self.code)} bytes"
        return f"RFunction({shown})"

    def __call__(self, *arguments: Any) -> Any:
        """Run the function in R.

        The arguments are plain data, numpy arrays or Python objects, converted as reticulate does;
        a `WorkerContext` becomes a named list. So is the value; a Keras model is the same object.
        R's missing values do not exist in Python and raise an error, except in doubles, where they
        become NaN. Raises `RError`: R's own error with its call stack, or an error that names what
        is missing to run R here.
        """
        global exchange
        # An R function may call Python, which may call R again.
        outer, exchange = exchange, {}
        try:
            return self._call(arguments)
        finally:
            exchange = outer

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        exchange["code"] = self.code if isinstance(self.code, str) else bytearray(self.code)
        exchange["packages"] = self.packages
        # A tuple always becomes an R list; a list of numbers would become a vector.
        exchange["arguments"] = tuple(
            _context_for_r(a) if isinstance(a, WorkerContext) else a for a in arguments
        )
        exchange["seed"] = _draw_seed()
        call = _call_r or _embed_r(self.library_paths)
        call()
        if "error" in exchange:
            raise RError(str(exchange["error"]), str(exchange["calls"]))
        return exchange.pop("value")


def host(call: Callable[[], object]) -> None:
    """Set the function that calls R in this process, which is R with Python embedded."""
    global _call_r
    _call_r = call


def read_glue() -> str:
    """Return R's half of a call, as the source text of an R function without arguments."""
    return files("pybackend.core.r").joinpath("call.R").read_text()


def _context_for_r(context: WorkerContext) -> dict[str, Any]:
    """Return the fields of a context in types for R: lists, which become vectors, not tuples."""
    fields = context.to_dict()
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    return {**plain, "feed": lambda batch_size: _feed_r(context, batch_size)}


def _feed_r(context: WorkerContext, batch_size: Any) -> Iterator[dict[str, Any]]:
    for batch in context.feed(batch_size):
        yield {name: _column_for_r(name, column) for name, column in batch.items()}


def _column_for_r(name: str, column: Any) -> Any:
    if column.dtype.kind == "O":
        return column.tolist()
    if column.dtype == "float16":  # unknown to reticulate
        return column.astype("float32")
    if column.dtype.itemsize == 8 and column.dtype.kind in "iu" and column.size:
        largest = max(abs(int(column.min())), abs(int(column.max())))
        if largest > _LARGEST_EXACT:
            unfit = f"column {show(name)} has the number {largest}, which R's doubles cannot"
            advice = "convert it to text, or leave the column out"
            raise InputError(f"{unfit} represent exactly: {advice}")
    return column


def _draw_seed() -> int:
    """Derive a seed for R from Python's state, without changing it."""
    copy = random.Random()  # noqa: S311 (a seed is not a secret)
    copy.setstate(random.getstate())
    return copy.getrandbits(31)


def _embed_r(library_paths: Sequence[str]) -> Callable[[], object]:
    # The API mode needs a build for the installed R, and warns if that is missing.
    os.environ.setdefault("RPY2_CFFI_MODE", "ABI")
    # reticulate inside this R must use this Python process.
    os.environ["RETICULATE_PYTHON"] = sys.executable
    here = f"on {socket.gethostname()}"
    if shutil.which("R") is None and "R_HOME" not in os.environ:
        raise RError(f"R is not installed {here}: a function written in R needs R on every host")
    try:
        r: Any = importlib.import_module("rpy2.rinterface")
    except Exception as error:  # missing, or built for another version of R
        raise RError(
            f"the Python package rpy2 is missing {here}, or does not match R: {error}. Install it "
            f"for {sys.executable} ({ADVICE}), or use a sparklyr connection, whose workers do not "
            "need it"
        ) from error
    r.initr()
    # rpy2 shuts R down at the interpreter's end, which crashes if reticulate was used in it.
    atexit.unregister(r.endr)
    atexit.register(_keep_objects)
    callbacks: Any = importlib.import_module("rpy2.rinterface_lib.callbacks")
    # Otherwise rpy2's logger shows R's messages and warnings as its own warnings.
    callbacks.consolewrite_warnerror = sys.stderr.write
    known = [str(path) for path in r.baseenv[".libPaths"]()]
    r.baseenv[".libPaths"](r.StrSexpVector([*filter(os.path.isdir, library_paths), *known]))
    if not r.baseenv["requireNamespace"](r.StrSexpVector(["reticulate"]), quietly=True)[0]:
        advice = 'run install.packages("reticulate") there'
        raise RError(f"the R package reticulate is missing {here}: {advice}")
    function: Callable[[], object] = r.evalr(read_glue())
    return function


def _keep_objects() -> None:
    """Keep all objects alive until the process ends.

    Some objects hold R functions. Python would finalize them when R can no longer run, which
    sometimes crashes the process. Files are flushed, as they are without R.
    """
    objects = gc.get_objects()
    for item in objects:
        if issubclass(type(item), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or its disk is full
                item.flush()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


def _check_code(code: Any) -> str | bytes:
    expected = "the source text of an R function"
    if isinstance(code, str):
        lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
        if not "".join(lines).lstrip().startswith(("function", "\\(")):
            raise wrong("code", f"{expected}, e.g. 'function() ...'", code[:60])
        return code
    if not isinstance(code, (bytes, bytearray)):
        either = f"{expected}, or the bytes of R's serialize(f, NULL)"
        raise InputError(f"`code` must be {either}, not {type(code).__name__}")
    # R's formats: binary big-endian, binary little-endian, ASCII.
    if bytes(code[:2]) not in (b"X\n", b"B\n", b"A\n"):
        raise InputError("`code` has bytes that are not the output of R's serialize(f, NULL)")
    return bytes(code)


def _check_names(argument: str, values: Any) -> list[str]:
    if isinstance(values, str):
        return [values]
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise wrong(argument, "a list of names", values)
    return list(values)
