"""Checkpoints in a folder: data first, then a small manifest with their digests as the commit.

So a checkpoint is there as a whole or not at all, on file systems and in object stores alike.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from pybackend.data.folder import open_folder
from pybackend.errors import ClusterError, InputError, TfdistError
from pybackend.job.codec import decode, encode

VERSION = 1
# Of a folder to which a training writes faster than it can be read.
_MOST_LISTINGS = 20
_MANIFEST = re.compile(r"checkpoint-(\d{6})-(\d{9})\.json")
# Every name that a store writes, and what a killed `write_whole` leaves of it.
_OWN = re.compile(
    r"(checkpoint-\d{6}-\d{9}(\.json|-[0-9a-f]{8}\.state)|model-[0-9a-f]{8}\.[a-z0-9.]+)"
    r"(\.partial-[0-9a-f]{8})?"
)


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint: its name in the folder, and the SHA-256 of its content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of, and which moment of which training it keeps.

    Attributes
    ----------
    epoch, step
        Epochs that are done, and steps of the next one.
    workers, seed
        Of the training.
    is_stopped
        Whether a callback has stopped the training there.
    job
        What must be the same in a training that goes on from here, by name.
    model
        A file of the model, with the weights that it had at first.
    model_format, model_weights, inputs
        What the file's name ends in, `hash_weights` of it, and `describe_inputs` of the rows.
    state
        The file of what training changes.
    run
        Which process has written it, at random.
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

    @property
    def name(self) -> str:
        """Its own name in the folder; names sort by time."""
        return f"checkpoint-{self.epoch:06d}-{self.step:09d}.json"

    @property
    def place(self) -> str:
        """Where in the training it is, in words."""
        return describe_place(self.epoch, self.step)


def describe_place(epoch: int, step: int) -> str:
    """In words, where a training is that has done so many epochs, and steps of the next."""
    return f"epoch {epoch + 1}, step {step}" if step else f"epoch {epoch}"


@dataclass(frozen=True)
class Kept:
    """A checkpoint that was read, and found intact.

    ``model`` is None if that file is damaged: all checkpoints share it, and resume without it.
    """

    manifest: Manifest
    state: bytes
    model: bytes | None


class CheckpointStore:
    """The checkpoints of one training.

    It removes what it has written, and what was there when it was opened for that; what other
    programs or trainings write stays.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._folder = open_folder(uri)
        self._intact: dict[str, Manifest] = {}
        self._own: set[str] = set()
        self._orphans: set[str] = set()
        self._commits = 0
        self._run = secrets.token_hex(8)
        self._runs = {self._run}

    def open(self) -> None:
        """Get ready to write: what is there by now belongs to this training.

        Raises
        ------
        ClusterError
            It cannot be read at this time.
        """
        self._own |= {name for name in self._list() if _OWN.fullmatch(name)}
        known, manifests = set[str](), self.names()
        for name in manifests:
            with suppress(ValueError, FileNotFoundError), _reading(self._folder.path(name)):
                manifest = self._read_manifest(name)
                self._runs.add(manifest.run)
                known |= {manifest.state.name, manifest.model.name}
        # They may be a killed training's, or those of one that is about to write its manifest.
        self._orphans = {
            name
            for name in self._own - known
            if not _MANIFEST.fullmatch(name) and f"{name.rpartition('-')[0]}.json" not in manifests
        }

    def names(self) -> list[str]:
        """Names of the manifests, oldest first."""
        return [name for name in self._list() if _MANIFEST.fullmatch(name)]

    def check_is_empty(self) -> None:
        """Refuse a folder with checkpoints, which a new training would mix with its own.

        Raises
        ------
        InputError
            There are some.
        """
        if names := self.names():
            raise InputError(
                f"there are checkpoints at {self.uri!r} already ({names[-1]}): give resume=True to "
                "go on from the newest one, or name another folder in `checkpoint`"
            )

    def find_newest(self, warn: Callable[[str], object] = lambda text: None) -> Kept | None:
        """The newest intact checkpoint; None if the folder has no checkpoints.

        A training may write and remove some at the same time.

        Parameters
        ----------
        warn
            Called with a sentence for each one that is passed over since it is damaged.

        Raises
        ------
        InputError
            All are damaged, or a newer release has written it.
        ClusterError
            A file cannot be read at this time, which does not make it a damaged one.
        """
        names = self.names()
        for _ in range(_MOST_LISTINGS):
            kept, damaged = self._find_intact(names)
            is_whole = kept is not None and kept.model is not None and not damaged
            listed = names if is_whole else self.names()
            if listed == names:
                break
            names = listed  # what was missing may just have been removed, after a newer one
        for name, error in damaged.items():
            warn(f"the checkpoint {self._folder.path(name)!r} is damaged ({error}): skipped")
        if kept is not None:
            self._intact = {kept.manifest.name: kept.manifest}
        elif names:
            raise InputError(
                f"there is no intact checkpoint at {self.uri!r}: all {len(names)} are damaged. "
                "Name another folder, or remove them to start from scratch"
            )
        return kept

    def _find_intact(self, names: Sequence[str]) -> tuple[Kept | None, dict[str, Exception]]:
        """The last one that is intact, and what is wrong with those behind it."""
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
        """The newest manifest that can be read, whose files were not looked at."""
        for name in reversed(self.names()):
            with suppress(OSError, ValueError):
                return self._read_manifest(name)
        return None

    def write_model(self, content: bytes, suffix: str) -> Part:
        """Write the file of the model, to which all checkpoints refer."""
        self._folder.make()
        return self._write(f"model-{secrets.token_hex(4)}.{suffix}", content)

    def commit(self, manifest: Manifest, state: bytes) -> None:
        """Write a checkpoint.

        Raises
        ------
        InputError
            Another training has written one since this one was opened.
        """
        self._check_is_alone()
        stem = manifest.name.removesuffix(".json")
        part = self._write(f"{stem}-{secrets.token_hex(4)}.state", state)
        manifest = replace(manifest, state=part, run=self._run)
        text = encode(manifest)
        self._write(manifest.name, f"{_digest(text.encode())}\n{text}".encode())
        self._commits += 1
        self._intact[manifest.name] = manifest

    def prune(self, keep: int) -> None:
        """After a commit, remove the checkpoints that are too many, and those that are damaged.

        An error on the way has removed nothing that is in use.
        """
        intact = sorted(self._intact)
        there = self._list_own()
        older = [name for name in there if _MANIFEST.fullmatch(name) and name < intact[0]]
        kept = [*older, *intact][-keep:]
        used = set(kept)
        for name in kept:  # before anything is removed: a file system may fail to read one
            manifest = self._intact.get(name) or self._read_manifest(name)
            used |= {manifest.state.name, manifest.model.name}
        self._intact = {name: self._intact[name] for name in intact if name in used}
        self._remove(name for name in there if name not in used)

    def clear(self) -> None:
        """Remove all checkpoints of this training, and the folder if nothing else is in it."""
        self._remove(iter(self._list_own()))
        self._folder.remove_itself()

    def _list(self) -> list[str]:
        with _reading(self.uri):
            return self._folder.names() or []

    def _list_own(self) -> list[str]:
        """The files that may be removed.

        Before its second commit a training cannot know that it is alone: of two that begin at once,
        one sees the other's manifest there, and fails.
        """
        own = self._own if self._commits > 1 else self._own - self._orphans
        return [name for name in self._list() if name in own]

    def _check_is_alone(self) -> None:
        names, runs = self.names(), set[str]()
        # The other one may be behind, or write under the same names.
        for name in {*(name for name in names if name not in self._own), *names[-1:]}:
            with suppress(Exception):  # what cannot be read says nothing
                runs.add(self._read_manifest(name).run)
        if runs - self._runs:
            raise InputError(
                f"another training writes to {self.uri!r}: name another folder in `checkpoint`, or "
                "end that one and go on with resume=True"
            )

    def _write(self, name: str, content: bytes) -> Part:
        self._own.add(name)
        self._folder.write(name, content)
        return Part(name, _digest(content))

    def _remove(self, names: Iterator[str]) -> None:
        """Remove files, manifests first: one without its data would look damaged."""
        for name in sorted(names, key=lambda name: not _MANIFEST.fullmatch(name)):
            if self._folder.size(name) is not None:  # not a folder, all of which would go
                self._folder.remove(name)

    def _read(self, name: str) -> Kept:
        manifest = self._read_manifest(name)
        state, model = self._read_part(manifest.state), None
        with suppress(ValueError, FileNotFoundError):
            model = self._read_part(manifest.model)
        return Kept(manifest, state, model)

    def _read_manifest(self, name: str) -> Manifest:
        content = self._folder.read(name) or b""
        digest, _, text = content.decode().partition("\n")
        if _digest(text.encode()) != digest:
            raise ValueError("its manifest was altered")
        version = re.search(r'"version": (\d+)', text)
        if version and int(version[1]) > VERSION:
            raise InputError(
                f"the checkpoint {self._folder.path(name)!r} was written by a newer tfdist (form "
                f"{version[1]}; this one knows {VERSION}): install that release"
            )
        manifest = decode(text, Manifest)
        if manifest.name != name:
            raise ValueError(f"its manifest is that of {manifest.name}")
        return manifest

    def _read_part(self, part: Part) -> bytes:
        if not _OWN.fullmatch(part.name):  # whatever else it may name is not a checkpoint's
            raise ValueError(f"{part.name!r} is no file of a checkpoint")
        content = self._folder.read(part.name)
        if content is None:
            raise ValueError(f"{part.name} is missing")
        if _digest(content) != part.sha256:
            raise ValueError(f"{part.name} was altered: it has {len(content)} bytes")
        return content


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Tell a file system that fails from a file that is damaged or missing."""
    try:
        yield
    except (TfdistError, ValueError, FileNotFoundError):
        raise
    except Exception as error:  # each file system has its own errors
        raise ClusterError(
            f"{path!r} cannot be read at this time ({type(error).__name__}: {error}): nothing was "
            "changed there; try again once it can be read"
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
