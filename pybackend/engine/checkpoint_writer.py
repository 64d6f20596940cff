"""Thread that writes checkpoints while the training continues."""

from __future__ import annotations

import threading
from collections import deque

from pybackend.data.checkpoint_store import CheckpointStore, Manifest
from pybackend.errors import ClusterError, InputError
from pybackend.job.messages import Emit, Note


class CheckpointWriter:
    """Thread that writes one checkpoint at a time; if several wait, only the newest.

    A checkpoint that cannot be written is reported, and the training continues without it, until
    ``keep`` (at least two) have failed in a row, or another training writes to the folder.

    Parameters
    ----------
    keep
        Number of checkpoints to retain.
    """

    def __init__(self, store: CheckpointStore, keep: int, emit: Emit) -> None:
        self._store = store
        self._keep = keep
        self._emit = emit
        self._waiting: tuple[Manifest, bytes] | None = None
        self._is_busy = False
        self._changed = threading.Condition()
        self._failures: deque[str] = deque()
        self._failed_in_a_row = 0
        self._last: str | None = None
        self._refusal: InputError | None = None
        self._can_prune = True
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, manifest: Manifest, state: bytes) -> None:
        """Request that a checkpoint is written."""
        with self._changed:
            self._waiting = manifest, state
            self._changed.notify_all()

    def check(self) -> None:
        """Report failures since the last call.

        Raises
        ------
        ClusterError
            ``keep`` checkpoints, at least two, have failed in a row.
        InputError
            Another training writes to the folder.
        """
        if self._refusal is not None:
            raise self._refusal
        self._report()
        if self._failed_in_a_row >= max(2, self._keep):
            raise ClusterError(
                f"{self._failed_in_a_row} checkpoints in a row could not be written to "
                f"{self._store.uri!r}; {self._describe_last()}. Check that disk, then resume with "
                "resume=True"
            )

    def finish(self, seconds: float) -> None:
        """Wait until all is written, up to a time limit, and report failures."""
        if not self._wait(seconds):
            self._failures.append(
                f"the last checkpoint was not written to {self._store.uri!r} within {seconds:g} s; "
                f"no longer waiting for it; {self._describe_last()}"
            )
        self._report()  # without an error: the trained model is about to be returned

    @property
    def newest(self) -> str | None:
        """Epoch and step of the newest written checkpoint."""
        return self._last

    def clear(self, seconds: float) -> None:
        """Stop writing, and remove all checkpoints; a note reports if that was not possible."""
        with self._changed:
            self._waiting = None
        try:
            if not self._wait(seconds):
                raise TimeoutError(f"the last one is still being written after {seconds:g} s")
            self._store.clear()
        except Exception as error:  # each file system has its own errors
            self._failures.append(
                f"the checkpoints at {self._store.uri!r} could not all be removed "
                f"({type(error).__name__}: {error}): remove them yourself"
            )
        self._report()

    def _wait(self, seconds: float) -> bool:
        """Wait until nothing is left to write; False if the time limit passed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._is_busy and self._waiting is None, seconds
            )

    def _report(self) -> None:
        while self._failures:  # from this thread alone: events share a pipe
            self._emit(Note(self._failures.popleft()))

    def _describe_last(self) -> str:
        return f"the newest one is of {self._last}" if self._last else "none has been written yet"

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._changed.wait()
                manifest, state = self._waiting
                self._waiting, self._is_busy = None, True
            self._write(manifest, state)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _write(self, manifest: Manifest, state: bytes) -> None:
        try:
            self._store.commit(manifest, state)
        except Exception as error:  # each file system has its own errors
            self._refusal = error if isinstance(error, InputError) else None
            self._failed_in_a_row += 1
            self._failures.append(
                f"the checkpoint of {manifest.place} could not be written to "
                f"{self._store.uri!r} ({type(error).__name__}: {error}); "
                f"{self._describe_last()}"
            )
        else:
            self._failed_in_a_row, self._last = 0, manifest.place
            self._prune()

    def _prune(self) -> None:
        could, self._can_prune = self._can_prune, True
        try:
            self._store.prune(self._keep)
        except Exception as error:  # each file system has its own errors
            self._can_prune = False
            if could:
                self._failures.append(
                    f"older checkpoints at {self._store.uri!r} could not be removed "
                    f"({type(error).__name__}: {error}); retrying after each new one"
                )
