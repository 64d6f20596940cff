"""Create checkpoints during training, and write them in a thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import keras
import numpy as np

from pybackend.core.collective import Collective
from pybackend.core.data.checkpoint_store import CheckpointStore, Manifest, describe_point
from pybackend.core.engine.checkpoint.training_state import TrainingStart, TrainingState
from pybackend.core.engine.exchange.synchronizer import Preemption
from pybackend.core.engine.step_changes import EpochSteps
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.notice import PreemptedError
from pybackend.core.job.report import Audit
from pybackend.core.job.storage_options import Checkpoint
from pybackend.core.job.value_codec import decode_state, encode_state
from pybackend.core.words import call_of, show


class CheckpointWriter:
    """Thread that writes one checkpoint at a time; if several are waiting, only the newest.

    A checkpoint that cannot be written is reported, and training continues without it, until
    ``keep`` (at least two) have failed in a row, or another training run writes to the folder.
    ``keep`` checkpoints are retained.
    """

    def __init__(self, store: CheckpointStore, keep: int, emit: Emit) -> None:
        self.store = store
        self.newest: str | None = None
        """Epoch and step of the newest written checkpoint."""
        self._keep, self._emit = keep, emit
        self._waiting: tuple[Manifest, bytes] | None = None
        self._changed = threading.Condition()
        self._failures: deque[str] = deque()
        self._failed_in_a_row = 0
        self._refusal: InputError | None = None
        self._is_busy, self._can_prune = False, True
        # A daemon: a file system that hangs must not keep this process alive.
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, manifest: Manifest, state: bytes) -> None:
        with self._changed:
            self._waiting = manifest, state
            self._changed.notify_all()

    def check(self) -> None:
        """Report failures since the last call.

        Raises `ClusterError` once ``keep`` checkpoints, at least two, have failed in a row, and
        `InputError` if another training run writes to the folder.
        """
        if self._refusal is not None:
            raise self._refusal
        self._report()
        if self._failed_in_a_row >= max(2, self._keep):
            raise ClusterError(
                f"{self._failed_in_a_row} checkpoints in a row could not be written to "
                f"{show(self.store.uri)}; {self._describe_newest()}. Check that disk, then resume "
                f"with {call_of('Recovery', ..., resume=True)}"
            )

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, up to a time limit, and report failures."""
        if not self._wait(seconds):
            self._failures.append(
                f"the last checkpoint was not written to {show(self.store.uri)} within "
                f"{seconds:g} s; no longer waiting for it; {self._describe_newest()}"
            )
        self._report()  # without an error: the trained model is about to be returned

    def clear(self, seconds: float) -> None:
        """Stop writing, and remove all checkpoints; if that fails, show a note."""
        with self._changed:
            self._waiting = None
        try:
            if not self._wait(seconds):
                raise TimeoutError(f"the last one is still being written after {seconds:g} s")
            self.store.clear()
        except Exception as error:  # each file system has its own errors
            self._failures.append(
                f"the checkpoints at {show(self.store.uri)} could not all be removed "
                f"({type(error).__name__}: {error}): remove them yourself"
            )
        self._report()

    def _wait(self, seconds: float) -> bool:
        """Wait until nothing is left to write; return False if the time limit passed."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._is_busy or self._waiting), seconds)

    def _report(self) -> None:
        while self._failures:  # from this thread alone: events share a pipe
            self._emit(Note(self._failures.popleft()))

    def _describe_newest(self) -> str:
        return (
            f"the newest one is from {self.newest}" if self.newest else "none has been written yet"
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while (waiting := self._waiting) is None:
                    self._changed.wait()
                self._waiting, self._is_busy = None, True
            self._write(*waiting)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _write(self, manifest: Manifest, state: bytes) -> None:
        try:
            self.store.commit(manifest, state)
        except Exception as error:  # each file system has its own errors
            self._refusal = error if isinstance(error, InputError) else None
            self._failed_in_a_row += 1
            self._failures.append(
                f"the checkpoint of {manifest.point} could not be written to "
                f"{show(self.store.uri)} ({type(error).__name__}: {error}); "
                f"{self._describe_newest()}"
            )
        else:
            self._failed_in_a_row, self.newest = 0, manifest.point
            self._prune()

    def _prune(self) -> None:
        could, self._can_prune = self._can_prune, True
        try:
            self.store.prune(self._keep)
        except Exception as error:  # each file system has its own errors
            self._can_prune = False
            if could:
                self._failures.append(
                    f"older checkpoints at {show(self.store.uri)} could not be removed "
                    f"({type(error).__name__}: {error}); retrying after each new one"
                )


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a training run, and the point from which it resumes.

    Only rank 0 has a writer, and a manifest: what all checkpoints of this training run have in
    common.
    """

    options: Checkpoint
    start: TrainingStart
    writer: CheckpointWriter | None = None
    manifest: Manifest | None = None

    def wait(self, seconds: float) -> None:
        if self.writer is not None:
            self.writer.finish(seconds)

    def clear(self, seconds: float) -> None:
        if self.writer is not None:
            self.writer.clear(seconds)


class Saver:
    """Saves the state of training, at the same steps on all ranks.

    Training ends after ``epochs``. Audits are added to ``audit``.
    """

    def __init__(
        self,
        epochs: int,
        collective: Collective,
        emit: Emit,
        checkpoints: Checkpoints,
        state: TrainingState,
        audit: Audit,
    ) -> None:
        self.epochs, self.collective, self._emit = epochs, collective, emit
        self.checkpoints, self.state, self._audit = checkpoints, state, audit
        self._reported: set[str] = set()
        self.schedule = Schedule(checkpoints.options, collective, checkpoints.start.step)
        self._final: tuple[Manifest, bytes] | None = None

    def save(self, epoch: int, step: int, is_stopped: bool) -> None:
        """Save the state after some epochs, and steps of the next; all ranks call this together."""
        writer, manifest = self.checkpoints.writer, self.checkpoints.manifest
        if writer is not None:
            writer.check()
        self.report_lost()
        state = self.state.gather(self.collective, is_within_epoch=step > 0)
        if writer is not None and manifest is not None:
            audit = deepcopy(self._audit)  # the writer encodes it while training adds to it
            manifest = replace(manifest, epoch=epoch, step=step, is_stopped=is_stopped, audit=audit)
            writer.submit(manifest, state)
            is_over = not step and (is_stopped or epoch == self.epochs)
            self._final = (manifest, state) if is_over else None
        self.schedule.restart()

    def report_lost(self) -> None:
        """Report attributes that are not saved, once each; hooks may have created them."""
        if lost := [name for name in self.state.find_lost() if name not in self._reported]:
            text = (
                "checkpoints do not store these attributes of callbacks, which are not plain "
                f"data: {', '.join(lost)}"
            )
            self._emit(Note(text))
            self._reported.update(lost)

    def finish(self) -> None:
        """Store the final weights if the last callbacks changed them."""
        if self._final is None or self.checkpoints.writer is None:
            return
        manifest, encoded = self._final
        state, weights = decode_state(encoded), self.state.read_weights()
        if not all(map(_is_same, state["variables"], weights)):
            encoded = encode_state({**state, "final": weights})
            self.checkpoints.writer.submit(manifest, encoded)


class Checkpointing(keras.callbacks.Callback):
    """Callback that saves the state of training when due, at the same step on all ranks."""

    def __init__(
        self, saver: Saver, preemption: Preemption, batches: EpochSteps, timeout: float
    ) -> None:
        super().__init__()
        self._saver, self._preemption, self._batches = saver, preemption, batches
        self._timeout, self._start = timeout, saver.checkpoints.start
        self._epoch = self._start.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        # This overwrites what other callbacks set in their `on_train_begin`.
        if not self._start.is_within_epoch:
            self._restore()
        self._saver.report_lost()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if not self._start.state:
            self._saver.schedule.begin_epoch()
        self._restore()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last of several steps per execution may lie beyond the epoch's end.
        steps = self._batches.steps
        done = min(batch + 1, steps)
        is_due = self._saver.schedule.count(done)
        # A checkpoint at the end of the epoch replaces this one.
        if done == steps or self.model.stop_training:
            return
        preempted = self._preemption.find_preempted(is_epoch_end=False)
        if is_due or preempted:
            self._saver.save(self._epoch, done, is_stopped=False)
        if preempted:
            self._leave(preempted, self._epoch, done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_over = bool(self.model.stop_training) or epoch + 1 == self._saver.epochs
        is_due = self._saver.schedule.is_due_at_end()
        preempted = () if is_over else self._preemption.find_preempted(is_epoch_end=True)
        if is_due or is_over or preempted:
            self._saver.save(epoch + 1, 0, bool(self.model.stop_training))
        if preempted:
            self._leave(preempted, epoch + 1, 0)

    def _restore(self) -> None:
        collective, state = self._saver.collective, self._start.state
        if state:
            self._saver.state.restore(state, collective.rank, collective.world_size)
            state.clear()  # it may be large, and others refer to it

    def _leave(self, preempted: Sequence[int], epoch: int, step: int) -> NoReturn:
        """End this training run on all ranks together, once the last checkpoint is written."""
        place, is_kept = describe_point(epoch, step), np.zeros(1, np.int64)
        if (writer := self._saver.checkpoints.writer) is not None:
            writer.finish(self._timeout)
            is_kept[0] = writer.newest == place
        # No worker exits earlier: when the first one exits, the launcher ends the others.
        self._saver.collective.broadcast(is_kept)
        raise PreemptedError(preempted, place, bool(is_kept[0]))


def _is_same(one: Any, other: Any) -> bool:
    return bool(one.tobytes() == np.ascontiguousarray(other).tobytes())


class Schedule:
    """Steps or seconds until a checkpoint is due, at the same step on all workers.

    ``step`` steps of the epoch were done before. Seconds are measured by rank 0's clock. All
    workers check it together, at steps as far apart as the remaining time allows, because agreeing
    at every step would cost a message each time.
    """

    def __init__(self, checkpoint: Checkpoint, collective: Collective, step: int) -> None:
        self.is_each_epoch = checkpoint.every == "epoch"
        """True if each epoch ends with a checkpoint, and there are no others."""
        self._steps, self._seconds = checkpoint.steps, checkpoint.seconds
        self._collective, self._seen = collective, step
        self.restart()

    def restart(self) -> None:
        self._done, self._next_look, self._began = 0, 1, time.monotonic()

    def begin_epoch(self) -> None:
        self._seen = 0

    def is_due_at_end(self) -> bool:
        return self.is_each_epoch or self.count(self._seen)

    def count(self, done: int) -> bool:
        """Count the epoch's steps so far; return whether a checkpoint is due, on all ranks.

        All ranks must call this together.
        """
        self._done += done - self._seen
        self._seen = done
        if self._steps is not None:
            return self._done >= self._steps
        if self._seconds is None or self._done < self._next_look:
            return False
        passed = np.array([time.monotonic() - self._began])
        self._collective.broadcast(passed)
        left = self._seconds - float(passed[0])
        if left > 0:
            pace = max(float(passed[0]), 1e-9) / self._done
            # The first steps are slow: never more steps than were done already.
            self._next_look = self._done + max(1, min(int(left / pace), self._done))
        return left <= 0
