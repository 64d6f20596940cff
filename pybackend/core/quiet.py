"""Import Keras and TensorFlow without the lines that TensorFlow prints at every start."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# How such lines begin; in the syntax that Python's `re` and `grep -E` share.
NOISE = (
    r"I[0-9]{4} [0-9]{2}:"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: I "
    r"|WARNING: All log messages before absl"
    r"|To enable the following instructions"
    r"|[EW][0-9]{4} .*\] (Unable to register cu[A-Z]+ |computation placer already registered)"
)
_noise = re.compile(NOISE)
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_STDERR = 2
_EXIT_SECONDS = 5.0
_lock = threading.RLock()
_is_importing = False


def is_noise(line: str) -> bool:
    """Return whether a line is one of those that TensorFlow prints at every start."""
    return _noise.match(line) is not None


def import_tensorflow(verbose: int = 1, waits: bool = True) -> None:
    """Import Keras and its backend; code in the driver that needs them calls this first.

    TensorFlow's start-up lines do not appear, unless ``verbose`` is 2 or the environment variable
    TF_CPP_MIN_LOG_LEVEL is set: then TensorFlow's own level applies. All other output to file
    descriptor 2, from any thread, does appear: when the import is done, when it raises an error,
    and when it terminates the process.

    Without ``waits``, it does nothing if this or another thread is already importing them: in an
    import hook, waiting for a thread that is itself waiting for a module would never end.
    """
    if not _lock.acquire(blocking=waits):
        return
    try:
        if waits or not _is_importing:
            _import(verbose)
    finally:
        _lock.release()


def _import(verbose: int) -> None:
    global _is_importing
    # Otherwise the first model that this process builds takes all memory of the GPUs, and its
    # workers get none. TensorFlow reads the variable when it first uses a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    is_loaded = "tensorflow" in sys.modules and "keras" in sys.modules
    _is_importing = True
    try:
        with ExitStack() as stack:
            if not is_loaded:
                stack.enter_context(uncollected())
                if verbose < 2 and _LEVEL not in os.environ:
                    os.environ[_LEVEL] = "2"  # read when TensorFlow is loaded
                    stack.callback(os.environ.pop, _LEVEL)
                    stack.enter_context(_filtered_stderr())
            import keras  # noqa: F401
    finally:
        _is_importing = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: an import creates no garbage, and a collection takes a second."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 through a filter."""
    # The filter is another process: TensorFlow may abort this one (e.g. on a processor that is too
    # old), and its last lines must not be lost.
    try:
        terminal = os.dup(_STDERR)
    except OSError:  # closed
        yield
        return
    try:
        sieve = subprocess.Popen(
            ["grep", "-a", "-v", "-E", f"^({NOISE})"],
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError:  # no grep: then all lines appear
        os.close(terminal)
        yield
        return
    assert sieve.stdin is not None
    try:
        with sieve.stdin:
            _point_stderr_at(sieve.stdin.fileno())
        yield
    finally:
        _point_stderr_at(terminal)
        os.close(terminal)
        try:
            sieve.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # a child process holds its input open
            threading.Thread(target=sieve.wait, daemon=True).start()


def _point_stderr_at(descriptor: int) -> None:
    with suppress(Exception):  # it may be None, or any object
        sys.stderr.flush()
    os.dup2(descriptor, _STDERR)


@contextmanager
def quiet_about_traces() -> Iterator[None]:
    """Suppress TensorFlow's warning about repeated tracing: here the models differ."""

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


_NAMES = ("keras", "tensorflow")


def install() -> None:
    """Have the first import of Keras or TensorFlow go through `import_tensorflow`.

    For R sessions: users import Keras there themselves, often before they call tfdist.
    """
    is_installed = any(isinstance(finder, _QuietFinder) for finder in sys.meta_path)
    if not is_installed and not any(name in sys.modules for name in _NAMES):
        sys.meta_path.insert(0, _QuietFinder())


class _QuietFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _NAMES:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            import_tensorflow(waits=False)
        except ImportError:  # Python's own search then reports what is missing
            return None
        loaded = sys.modules.get(name)
        return None if loaded is None else ModuleSpec(name, _LoadedModule(loaded))


class _LoadedModule(Loader):
    """Loader that returns a module that is already loaded, unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
