"""Checkpoints in a folder: first the data, then a small manifest with its digests as the commit.

So a checkpoint is either complete or absent, on file systems and in object stores.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from pybackend.core.data.files import open_folder
from pybackend.core.errors import ClusterError, InputError, TfdistError
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.report import Audit, Generation
from pybackend.core.words import call_of, show

VERSION = 2
# Limit for a folder to which a training run writes faster than it can be read.
_MOST_LISTINGS = 20
_MANIFEST = re.compile(r"checkpoint-(\d{6})-(\d{9})\.json")
# All names that a store writes, and the partial files that a killed `write_whole` leaves.
_OWN = re.compile(
    r"(checkpoint-\d{6}-\d{9}(\.json|-[0-9a-f]{8}\.state)|model-[0-9a-f]{8}\.[a-z0-9.]+)"
    r"(\.partial-[0-9a-f]{8})?"
)


@dataclass(frozen=True)
class Part:
    """File of a checkpoint: its name in the folder and the SHA-256 of its content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Files of a checkpoint, and the training run and step that it belongs to.

    Attributes
    ----------
    epoch, step
        Completed epochs, and completed steps of the next one.
    workers, seed
        Those of the training run.
    is_stopped
        Whether a callback stopped the training run at that point.
    job
        Settings that must be the same in a run that resumes from here, by name.
    model
        File of the model with its initial weights.
    model_format, model_weights, inputs
        Suffix of the model's file, the result of `hash_weights` for the model, and that of
        `describe_inputs` for the rows.
    state
        File with everything that training changes.
    run
        Random identifier of the process that wrote it; in elastic training, of all its workers.
    generations
        Worker groups so far, if the training run is elastic.
    fixed
        Worker groups so far, if it is not: the last one is its own. Empty if they are not known.
    audit
        Result of the audits so far.
    """

    epoch: int
    step: int
    workers: int
    seed: int
    is_stopped: bool
    job: Mapping[str, Any]
    model: Part
    model_format: str
    model_weights: str
    inputs: Any
    state: Part = Part("", "")
    version: int = VERSION
    run: str = ""
    generations: tuple[Generation, ...] = ()
    fixed: tuple[Generation, ...] = ()
    audit: Audit | None = None

    @property
    def name(self) -> str:
        """Names sort chronologically."""
        return f"checkpoint-{self.epoch:06d}-{self.step:09d}.json"

    @property
    def point(self) -> str:
        return describe_point(self.epoch, self.step)


def new_run() -> str:
    return secrets.token_hex(8)


def describe_point(epoch: int, step: int) -> str:
    """Describe the point after ``epoch`` completed epochs and ``step`` steps of the next."""
    return f"epoch {epoch + 1}, step {step}" if step else f"epoch {epoch}"


@dataclass(frozen=True)
class SavedCheckpoint:
    """An intact checkpoint, as read from its files.

    ``model`` is None if its file is damaged: all checkpoints share that file, and resuming does not
    need it.
    """

    manifest: Manifest
    state: bytes
    model: bytes | None


class CheckpointStore:
    """The checkpoints of one training run.

    It removes only files that it wrote, that existed when `open` was called, or that other workers
    of its run wrote; never files of other programs or training runs. ``run`` is that of `Manifest`.
    None: this process writes alone.
    """

    def __init__(self, uri: str, run: str | None = None) -> None:
        self.uri = uri
        self._folder = open_folder(uri)
        self._intact: dict[str, Manifest] = {}
        self._own: set[str] = set()
        self._orphans: set[str] = set()
        self._commits = 0
        self._run = run or new_run()
        self._runs = {self._run}

    def open(self) -> None:
        """Prepare for writing: checkpoints that exist now belong to this training run.

        Raises `ClusterError` if the folder cannot be read at the moment.
        """
        self._own |= {name for name in self._list() if _OWN.fullmatch(name)}
        known, manifests = set[str](), self.names()
        for name in manifests:
            with suppress(ValueError, FileNotFoundError), _reading(self._folder.path(name)):
                manifest = self._read_manifest(name)
                self._runs.add(manifest.run)
                known |= {manifest.state.name, manifest.model.name}
        # Left by a killed training, or by one that is about to write its manifest.
        self._orphans = {
            name
            for name in self._own - known
            if not _MANIFEST.fullmatch(name) and f"{name.rpartition('-')[0]}.json" not in manifests
        }

    def names(self) -> list[str]:
        """Names of the manifests, oldest first."""
        return [name for name in self._list() if _MANIFEST.fullmatch(name)]

    def check_is_empty(self) -> None:
        """Reject a folder with checkpoints, which a new training run would mix with its own."""
        if names := self.names():
            raise InputError(
                f"{show(self.uri)} already contains checkpoints ({names[-1]}): pass "
                f"{call_of('Recovery', ..., resume=True)} to resume from the newest one, or "
                "choose another folder"
            )

    def find_newest(self, warn: Callable[[str], object] = lambda _: None) -> SavedCheckpoint | None:
        """Return the newest intact checkpoint, or None if the folder has no checkpoints.

        Another training run may write and remove checkpoints at the same time. ``warn`` is called
        with a message for each damaged checkpoint that is skipped. An `InputError`: all are
        damaged, or a newer release wrote them. A `ClusterError`: a file cannot be read at the
        moment, and may still be intact.
        """
        names = self.names()
        for _ in range(_MOST_LISTINGS):
            kept, damaged = self._find_intact(names)
            is_whole = kept is not None and kept.model is not None and not damaged
            listed = names if is_whole else self.names()
            if listed == names:
                break
            names = listed  # missing files may have been removed after a newer checkpoint
        for name, error in damaged.items():
            warn(f"the checkpoint {show(self._folder.path(name))} is damaged ({error}): skipped")
        if kept is not None:
            self._intact = {kept.manifest.name: kept.manifest}
        elif names:
            raise InputError(
                f"there is no intact checkpoint at {show(self.uri)}: all {len(names)} are damaged. "
                "Choose another folder, or remove them to start from scratch"
            )
        return kept

    def _find_intact(self, names: list[str]) -> tuple[SavedCheckpoint | None, dict[str, Exception]]:
        """Return the newest intact checkpoint, and the errors of the newer ones."""
        damaged: dict[str, Exception] = {}
        for name in reversed(names):
            try:
                with _reading(self._folder.path(name)):
                    return self._read(name), damaged
            except InputError:
                raise
            except (ValueError, FileNotFoundError) as error:
                damaged[name] = error
        return None, damaged

    def read_manifest(self) -> Manifest | None:
        """Return the newest readable manifest, without checking its files."""
        for name in reversed(self.names()):
            with suppress(OSError, ValueError):
                return self._read_manifest(name)
        return None

    def write_model(self, content: bytes, suffix: str) -> Part:
        """All checkpoints share this file."""
        self._folder.make()
        return self._write(f"model-{secrets.token_hex(4)}.{suffix}", content)

    def commit(self, manifest: Manifest, state: bytes) -> None:
        """Write a checkpoint.

        Raises `InputError` if another training run, or a later generation of this one, has written
        a checkpoint since this store was opened.
        """
        others = self._read_others()
        if {other.run for other in others} - self._runs:
            raise InputError(
                f"another training run is writing to {show(self.uri)}: choose another folder for "
                "`recovery`, or stop the other run and pass "
                f"{call_of('Recovery', ..., resume=True)}"
            )
        self._check_is_current(manifest, others)
        stem = manifest.name.removesuffix(".json")
        part = self._write(f"{stem}-{secrets.token_hex(4)}.state", state)
        if manifest.generations:  # this process may have been suspended meanwhile
            try:
                self._check_is_current(manifest, self._read_others())
            except InputError:
                self._remove(iter([part.name]))
                raise
        manifest = replace(manifest, state=part, run=self._run)
        text = encode(manifest)
        self._write(manifest.name, f"{_digest(text.encode())}\n{text}".encode())
        self._commits += 1
        self._intact[manifest.name] = manifest

    def prune(self, keep: int) -> None:
        """Remove damaged checkpoints, and all others but the last ``keep``; call after a commit.

        If it fails, no file in use has been removed.
        """
        intact = sorted(self._intact)
        there = self._list_own()
        older = [name for name in there if _MANIFEST.fullmatch(name) and name < intact[0]]
        kept = [*older, *intact][-keep:]
        used = set(kept)
        for name in kept:  # read all before removing any: a file system may fail to read one
            manifest = self._intact.get(name) or self._read_manifest(name)
            used |= {manifest.state.name, manifest.model.name}
        self._intact = {name: self._intact[name] for name in intact if name in used}
        self._remove(name for name in there if name not in used)

    def clear(self) -> None:
        """Remove all checkpoints of this training run, and then the folder if it is empty."""
        self._remove(iter(self._list_own()))
        self._folder.remove_itself()

    def _list(self) -> list[str]:
        with _reading(self.uri):
            return self._folder.names() or []

    def _list_own(self) -> list[str]:
        """Return the files that may be removed.

        Before its second commit, a training run cannot know whether it is the only one. If two
        start at the same time, one of them later finds the other's manifest and fails.
        """
        own = self._own if self._commits > 1 else self._own - self._orphans
        return [name for name in self._list() if name in own]

    def _read_others(self) -> list[Manifest]:
        """Return the manifests that other processes may have written."""
        names, found = self.names(), list[Manifest]()
        # Another training may be at an earlier step, or write under the same names.
        for name in {*(name for name in names if name not in self._own), *names[-1:]}:
            with suppress(Exception):  # an unreadable manifest proves nothing
                found.append(self._read_manifest(name))
        return found

    def _check_is_current(self, own: Manifest, others: Sequence[Manifest]) -> None:
        """Raise an error if a later generation writes; adopt what an earlier one wrote late."""
        ours = [manifest for manifest in others if manifest.run == self._run]
        if any(len(manifest.generations) > len(own.generations) for manifest in ours):
            raise InputError(
                f"the training continues without this worker, and another one writes to "
                f"{show(self.uri)}: this worker was suspended, or its connections failed"
            )
        for manifest in ours:
            self._own |= {manifest.name, manifest.state.name, manifest.model.name}

    def _write(self, name: str, content: bytes) -> Part:
        self._own.add(name)
        self._folder.write(name, content)
        return Part(name, _digest(content))

    def _remove(self, names: Iterator[str]) -> None:
        """Remove files, manifests first: a manifest without its data would look damaged."""
        for name in sorted(names, key=lambda name: not _MANIFEST.fullmatch(name)):
            if self._folder.size(name) is not None:  # never remove a folder with its content
                self._folder.remove(name)

    def _read(self, name: str) -> SavedCheckpoint:
        manifest = self._read_manifest(name)
        state, model = self._read_part(manifest.state), None
        with suppress(ValueError, FileNotFoundError):
            model = self._read_part(manifest.model)
        return SavedCheckpoint(manifest, state, model)

    def _read_manifest(self, name: str) -> Manifest:
        digest, _, text = (self._folder.read(name) or b"").decode().partition("\n")
        if _digest(text.encode()) != digest:
            raise ValueError("its manifest was altered")
        version = re.search(r'"version": (\d+)', text)
        if version and int(version[1]) > VERSION:
            raise InputError(
                f"the checkpoint {show(self._folder.path(name))} was written by a newer release of "
                f"tfdist (format {version[1]}; this one reads {VERSION}): install that release"
            )
        manifest = decode(text, Manifest)
        if manifest.name != name:
            raise ValueError(f"its manifest belongs to {manifest.name}")
        return manifest

    def _read_part(self, part: Part) -> bytes:
        if not _OWN.fullmatch(part.name):  # a damaged manifest may name any file
            raise ValueError(f"{show(part.name)} is not a file of a checkpoint")
        content = self._folder.read(part.name)
        if content is None:
            raise ValueError(f"{part.name} is missing")
        if _digest(content) != part.sha256:
            raise ValueError(f"{part.name} was altered: it has {len(content)} bytes")
        return content


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise `ClusterError` if the file system fails, but not for a damaged or missing file."""
    try:
        yield
    except (TfdistError, ValueError, FileNotFoundError):
        raise
    except Exception as error:  # each file system has its own errors
        raise ClusterError(
            f"{show(path)} cannot be read right now ({type(error).__name__}: {error}): nothing was "
            "changed there; try again once it can be read"
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
