"""The environment of a call: checked, packed once per session, and compared with its hosts."""

from __future__ import annotations

import atexit
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.packages import BUILDS, TITLES
from pybackend.job.resources import THIS, show_bytes
from pybackend.launchers.environment.archive import (
    PackedEnvironment,
    pack_entries,
    read_packed,
)
from pybackend.launchers.environment.contents import (
    Entry,
    EnvironmentFacts,
    describe_environment,
    find_python,
    list_entries,
)
from pybackend.machine.janitor import end_sweep, sweep
from pybackend.words import setting, show


class _Session:
    """The environments that this process has packed, in a folder that ends with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, PackedEnvironment] = {}
        self._folder: str | None = None
        self._janitor: subprocess.Popen[bytes] | None = None

    def read(self, path: str) -> PackedEnvironment:
        """Return what is known about a packed file, which is read again if it has changed."""
        return self._find(_identify([Entry("", path)]), lambda: read_packed(path))

    def pack(self, facts: EnvironmentFacts, say: Callable[[str], object]) -> PackedEnvironment:
        """Pack an environment, if it has changed since the last time."""
        entries = list_entries(facts)

        def pack() -> PackedEnvironment:
            say(f"packing the Python environment {facts.prefix}")
            packed = pack_entries(
                facts, entries, self._make_folder() / f"{len(self._known)}.tar.gz"
            )
            say(f"packed it in {packed.seconds:.0f} s: {show_bytes(packed.size)}")
            return packed

        return self._find(_identify(entries), pack)

    def _find(self, key: str, make: Callable[[], PackedEnvironment]) -> PackedEnvironment:
        with self._lock:
            if key not in self._known:
                self._known[key] = make()
            return self._known[key]

    def _make_folder(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="tfdist-")
            self._janitor = sweep(self._folder)
            atexit.register(self._close)
        return Path(self._folder)

    def _close(self) -> None:
        assert self._janitor is not None
        end_sweep(self._janitor)


_SESSION = _Session()


def _identify(entries: Sequence[Entry]) -> str:
    """Return a text that changes with any of the files."""
    digest = hashlib.sha256()
    for entry in entries:
        known: list[Any] = [entry.name, entry.link, entry.content]
        if entry.source is not None:
            status = os.stat(entry.source)
            known += [entry.source, status.st_size, status.st_mtime_ns]
        digest.update(repr(known).encode(errors="surrogateescape"))
    return digest.hexdigest()


def pack_for(job: Job, say: Callable[[str], object]) -> PackedEnvironment | None:
    """Return the packed environment of a job's workers; None: they use what their hosts have.

    Parameters
    ----------
    say
        Receives texts about the progress.

    Raises
    ------
    InputError
        The environment cannot run this job's workers.
    """
    environment = job.resources.environment
    if environment is None:
        return None
    path = os.fspath(environment)
    if os.path.isfile(path):
        packed = _SESSION.read(path)
        if packed.manifest is not None:
            _check(job, packed.manifest.python, packed.manifest.packages)
        return packed
    facts = describe_environment(find_python(path))
    _check(job, facts.version, facts.packages)
    return _SESSION.pack(facts, say)


def _check(job: Job, version: str, packages: Mapping[str, str]) -> None:
    """Check the Python of an environment, and the packages that every model needs."""
    named = f"`environment`, {show(job.resources.environment)},"
    own = ".".join(map(str, sys.version_info[:2]))
    if version.split(".")[:2] != own.split("."):
        raise InputError(
            f"{named} has Python {version}, but this is Python {own}, and functions cannot be sent "
            f"between releases: pass an environment with Python {own}, or "
            f"{setting(environment=THIS)}"
        )
    installed = {name.lower().replace("_", "-") for name in packages}
    wanted = {"numpy": ("numpy",), "cloudpickle": ("cloudpickle",)}
    for package, names in (wanted if job.kind == "run" else {**BUILDS, **wanted}).items():
        if not installed & set(names):
            raise InputError(
                f"{named} has no {TITLES.get(package, package)}: install it there with "
                f"`pip install {package}`, and pack it again if it is a file"
            )
