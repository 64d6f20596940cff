"""Import hook that suppresses the start-up lines of Keras and TensorFlow.

For R sessions: users import Keras there themselves, often before they call tfdist.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from pybackend.core.model.quiet import import_unless_importing

_NAMES = ("keras", "tensorflow")


def install() -> None:
    """Have the first import of Keras or TensorFlow go through `pybackend.core.model.quiet`."""
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
            import_unless_importing()
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
