"""Packed environments: `.tar.gz` files that `tfdist pack`, venv-pack, conda-pack or calls write."""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import re
import sys
import tarfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pybackend.core.data.files import naming_full_disk
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import Job
from pybackend.core.job.worker_options import THIS
from pybackend.core.launchers.environment import contents
from pybackend.core.launchers.environment.contents import Entry, EnvironmentFacts
from pybackend.core.machine.capacity import count_cores
from pybackend.core.machine.janitor import end_sweep, sweep, swept_folder
from pybackend.core.machine.packages import BUILDS, TITLES
from pybackend.core.words import either, setting, show, show_bytes

# The first file in a packed environment.
MANIFEST = "tfdist.json"
_BLOCK = 4 << 20
_PIECE = 256 << 10
# Level 6 takes three times as long, and saves a tenth.
_LEVEL = 1
_GZIP = 31
_GLIBC = re.compile(rb"GLIBC_2\.(\d{1,2})\0")
_OVERLAP = 16


@dataclass(frozen=True)
class Manifest:
    """Contents of a packed environment, and its requirements.

    Attributes
    ----------
    digest
        SHA-256 of the names and contents of all files, except compiled code. Equal environments
        have equal digests.
    python
        Version of Python, such as ``3.11.7``.
    machine
        Such as ``x86_64``.
    libc
        The C library of the machine on which it was packed, such as ``glibc 2.36``.
    glibc
        The oldest release of glibc that its compiled files can be loaded with, such as ``2.34``;
        None if that is unknown.
    packages
        Versions by the names of the packages.
    editable
        Packages that are not in it, because they are folders of sources (``pip install -e``).
    """

    digest: str
    python: str
    machine: str
    libc: str
    glibc: str | None
    packages: Mapping[str, str]
    editable: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedEnvironment:
    """A packed environment, as `pack_environment` returns it.

    Attributes
    ----------
    path
        Path of the file.
    digest
        SHA-256 of the contents. Equal environments have equal digests.
    size
        Bytes of the file.
    manifest
        The versions of Python and of all packages, and what a host needs; None for a file that
        another program packed.
    seconds
        Time that it took to pack it.
    """

    path: str
    digest: str
    size: int
    manifest: Manifest | None
    seconds: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        """Name of the environment on the workers' hosts."""
        return f"tfdist-environment-{self.digest[:16]}"

    def summary(self) -> str:
        """Return a text with the size, the versions and the number of packages."""
        lines = [f"{self.path}: {show_bytes(self.size)}, packed in {self.seconds:.1f} s"]
        if found := self.manifest:
            shown = re.compile(r"tensorflow([-_]\w+)?|keras|numpy|pyarrow", re.IGNORECASE)
            versions = [f"{n} {v}" for n, v in found.packages.items() if shown.fullmatch(n)]
            python = f"Python {found.python} and {counted(len(found.packages), 'package')}"
            lines.append(": ".join(filter(None, (python, ", ".join(versions)))))
            needs = f"glibc {found.glibc} or later" if found.glibc else found.libc
            lines.append(f"runs on Linux {found.machine} with {needs}")
            if found.editable:
                lines.append(f"not in it (editable installations): {', '.join(found.editable)}")
        return "\n".join([*lines, f"digest {self.digest}"])

    def __str__(self) -> str:
        return self.summary()


def pack_environment_of(environment: str, path: Path) -> PackedEnvironment:
    """Pack an environment, ``"this"`` or a folder, into a file."""
    facts = contents.describe_environment(contents.find_python(environment))
    return pack_entries(facts, contents.list_entries(facts), path)


def pack_entries(
    facts: EnvironmentFacts, entries: Sequence[Entry], path: Path
) -> PackedEnvironment:
    """Write the entries of an environment to a file, which appears when it is complete."""
    began = time.monotonic()
    manifest = make_manifest(facts, entries)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # A killed `tfdist pack` left half an archive
    # (test_a_process_that_is_killed_as_it_packs_leaves_nothing).
    janitor = sweep(str(partial))
    try:
        with naming_full_disk(path.parent, "packed environment"), partial.open("wb") as file:
            first = Entry(MANIFEST, content=encode(manifest).encode())
            with _ParallelGzip(file) as compressed:
                _write_tar(compressed, [first, *entries])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        end_sweep(janitor)
    seconds = time.monotonic() - began
    return PackedEnvironment(str(path), manifest.digest, path.stat().st_size, manifest, seconds)


def read_packed(path: str) -> PackedEnvironment:
    """Read the manifest of a packed environment; one without a manifest is digested."""
    size = os.path.getsize(path)
    try:
        with tarfile.open(path, "r|gz") as archive:
            first = archive.next()
            is_ours = first is not None and first.name == MANIFEST and first.size < _BLOCK
            if first is not None and is_ours and (file := archive.extractfile(first)):
                manifest = decode(file.read(), Manifest)
                return PackedEnvironment(path, manifest.digest, size, manifest)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        ours = either("`tfdist pack`", "pack_environment()")
        raise InputError(
            f"`environment` is {show(path)}, which is not a .tar.gz of an environment ({error}): "
            f"write one with {ours}, venv-pack or conda-pack"
        ) from error
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    return PackedEnvironment(path, digest.hexdigest(), size, None)


def make_manifest(facts: EnvironmentFacts, entries: Sequence[Entry]) -> Manifest:
    """Read all files, and return their digest, and what the environment contains and needs."""
    stable = [e for e in entries if not (e.is_code or Path(e.name).name in contents.OF_ORIGIN)]
    digest, newest = hashlib.sha256(f"{facts.version} {facts.machine}\n".encode()), 0
    with ThreadPoolExecutor(count_cores()) as threads:
        for entry, (content, release) in zip(stable, threads.map(_read, stable), strict=True):
            kind = "link" if entry.link else "program" if entry.is_executable else "file"
            digest.update(f"{kind} {content} {entry.name}\n".encode(errors="surrogateescape"))
            newest = max(newest, release)
    glibc = f"2.{newest}" if newest and facts.libc.startswith("glibc") else None
    packages = dict(sorted(facts.packages.items(), key=lambda item: item[0].lower()))
    editable = tuple(name for name in facts.editable if name != "tfdist")
    needs = facts.version, facts.machine, facts.libc, glibc
    return Manifest(digest.hexdigest(), *needs, packages, editable)


def _read(entry: Entry) -> tuple[str, int]:
    """Return the digest of an entry's content, and the release of glibc that it needs."""
    if entry.source is None:
        return hashlib.sha256((entry.link or "").encode() + entry.content).hexdigest(), 0
    try:
        return _scan(entry.source)
    except OSError as error:
        raise InputError(f"`environment` cannot be packed: {error}") from error


def _scan(path: str) -> tuple[str, int]:
    digest, newest, tail = hashlib.sha256(), 0, b""
    with open(path, "rb") as file:
        is_compiled = file.read(4) == b"\x7fELF"
        file.seek(0)
        while block := file.read(_BLOCK):
            digest.update(block)
            if is_compiled:
                releases = _GLIBC.findall(tail + block)
                newest = max([newest, *map(int, releases)])
                tail = block[-_OVERLAP:]
    return digest.hexdigest(), newest


def _write_tar(file: _ParallelGzip, entries: Iterable[Entry]) -> None:
    # tarfile copies all that it has buffered with each piece of a file.
    options: Any = {"bufsize": _PIECE, "copybufsize": _PIECE, "format": tarfile.GNU_FORMAT}
    with tarfile.open(fileobj=file, mode="w|", **options) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = 0o755 if entry.is_executable else 0o644
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(info)
            elif entry.source is None or entry.is_code:
                content = contents.read_code(entry.source) if entry.source else entry.content
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                with open(entry.source, "rb") as opened:
                    info.size = os.fstat(opened.fileno()).st_size
                    archive.addfile(info, opened)


class _ParallelGzip(io.RawIOBase):
    """File that compresses blocks on all cores; each block is a member of the gzip file."""

    def __init__(self, file: IO[bytes]) -> None:
        cores = count_cores()
        self._file = file
        self._threads = ThreadPoolExecutor(cores)
        self._pending: deque[Future[bytes]] = deque()
        self._most = 2 * cores
        self._block = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._block += content
        while len(self._block) >= _BLOCK:
            self._compress(bytes(self._block[:_BLOCK]))
            del self._block[:_BLOCK]
        return len(content)

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._block:
                self._compress(bytes(self._block))
            self._write(0)
        finally:
            self._threads.shutdown(cancel_futures=True)
            super().close()

    def _compress(self, block: bytes) -> None:
        self._pending.append(self._threads.submit(_compress, block))
        self._write(self._most)

    def _write(self, most: int) -> None:
        """Write compressed blocks, until only ``most`` are pending."""
        while len(self._pending) > most:
            self._file.write(self._pending.popleft().result())


def _compress(block: bytes) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)  # with no time in its header
    return compressor.compress(block) + compressor.flush()


# The environment of a call, packed once per session.


class _Session:
    """The environments that this process has packed, in a folder that ends with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, PackedEnvironment] = {}
        self._folder: Path | None = None

    def read(self, path: str) -> PackedEnvironment:
        """Return what is known about a packed file, which is read again if it has changed."""
        return self._find(_identify([Entry("", path)]), lambda: read_packed(path))

    def pack(self, facts: EnvironmentFacts, say: Callable[[str], object]) -> PackedEnvironment:
        """Pack an environment, if it has changed since the last time."""
        entries = contents.list_entries(facts)

        def pack() -> PackedEnvironment:
            say(f"packing the Python environment {facts.prefix}")
            path = self._make_folder() / f"{len(self._known)}.tar.gz"
            packed = pack_entries(facts, entries, path)
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
            end = ExitStack()
            self._folder = end.enter_context(swept_folder())
            atexit.register(end.close)
        return self._folder


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

    ``say`` receives texts about the progress. Raises `InputError` if the environment cannot run
    this job's workers.
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
    facts = contents.describe_environment(contents.find_python(path))
    _check(job, facts.version, facts.packages)
    return _SESSION.pack(facts, say)


def _check(job: Job, version: str, packages: Mapping[str, str]) -> None:
    """Check the release of Python, and the packages that every model needs."""
    named = f"`environment`, {show(job.resources.environment)},"
    own = ".".join(map(str, sys.version_info[:2]))
    if version.split(".")[:2] != own.split("."):
        advice = f"pass an environment with Python {own}, or {setting(environment=THIS)}"
        raise InputError(
            f"{named} has Python {version}, but this is Python {own}, and functions cannot be sent "
            f"between releases: {advice}"
        )
    installed = {name.lower().replace("_", "-") for name in packages}
    wanted = {"numpy": ("numpy",), "cloudpickle": ("cloudpickle",)}
    for package, names in (wanted if job.kind == "run" else {**BUILDS, **wanted}).items():
        if not installed & set(names):
            title, how = TITLES.get(package, package), f"`pip install {package}`"
            advice = f"install it there with {how}, and pack it again if it is a file"
            raise InputError(f"{named} has no {title}: {advice}")
