"""Keeps all workers on one state: weights at the start, metrics and statistics at each epoch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.engine.evaluate import HeldOut
from pybackend.engine.feed import Feed
from pybackend.engine.flat import Agreement
from pybackend.engine.metrics import over_all_rows, unsummed_metrics
from pybackend.engine.stream import StreamFeed
from pybackend.errors import ClusterError
from pybackend.job.messages import Emit, EpochEnded, Note

# Odd and large: it spreads the ranks over the seeds of the random generators.
_RANK_STRIDE = 0x9E3779B1


def broadcast_state(model: Any, collective: Collective) -> None:
    """Give every rank the weights and the optimizer state of rank 0."""
    for variable in [*model.weights, *model.optimizer.variables]:
        value = np.array(variable.numpy(), order="C")
        if value.dtype.kind in "fiub" or value.dtype.name == "bfloat16":
            collective.broadcast(value.reshape(-1))
            variable.assign(value)


def separate_randomness(model: Any, rank: int) -> None:
    """Give each rank its own dropout masks, although all start from one saved model."""
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            state = np.array(variable.numpy())
            state[0] = (int(state[0]) + rank * _RANK_STRIDE) % 2**31
            variable.assign(state)


def weights_digest(model: Any) -> str:
    """SHA-256 over all weights: equal on two ranks only where the weights are bitwise equal."""
    digest = hashlib.sha256()
    for variable in model.weights:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


def ranks_that_differ(model: Any, collective: Collective) -> list[int]:
    """Ranks whose weights are not bitwise those of rank 0; the same answer on every rank."""
    own = np.frombuffer(bytes.fromhex(weights_digest(model)), np.uint8)
    reference = own.copy()
    collective.broadcast(reference)
    differs = np.zeros(collective.world_size)
    differs[collective.rank] = not np.array_equal(own, reference)
    return np.flatnonzero(all_sum(collective, differs)).tolist()


class Coupling(Protocol):
    """What couples a model's steps to those of the other workers during a ``fit``."""

    agreement: Agreement

    def begin_training(self) -> None:
        """All callbacks have begun, and all weights are equal."""

    def begin_epoch(self) -> None:
        """An epoch begins."""

    def end_epoch(self) -> None:
        """An epoch's steps are done."""

    @property
    def mean_loss(self) -> float | None:
        """The epoch's loss, where averaging the workers' own by rows is not right."""


class Uncoupled:
    """The coupling of a single worker."""

    mean_loss = None

    def __init__(self) -> None:
        self.agreement = Agreement()

    def begin_training(self) -> None:
        """Nothing to prepare."""

    def begin_epoch(self) -> None:
        """Nothing to count."""

    def end_epoch(self) -> None:
        """Nothing to finish."""


class EpochSync(keras.callbacks.Callback):
    """First of the callbacks: the others see figures over the rows of all workers."""

    def __init__(
        self,
        collective: Collective,
        coupling: Coupling,
        feed: Feed | StreamFeed,
        held_out: HeldOut | None,
        emit: Emit,
        epochs: int,
    ) -> None:
        super().__init__()
        self._collective = collective
        self._coupling = coupling
        self._feed = feed
        self._held_out = held_out
        self._emit = emit
        self._epochs = epochs
        self._agreed: list[Any] = []
        self._told = False
        self._began = 0.0
        self._steps = 0
        self.steps_done = 0
        """Steps of all epochs so far."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        epochs = all_sum(self._collective, [epoch])[0] / self._collective.world_size
        if epochs != epoch:
            raise ClusterError(
                f"worker {self._collective.rank} begins epoch {epoch + 1}, others do not: a "
                "callback has restored them to different epochs"
            )
        self._feed.begin_epoch(epoch)
        self._coupling.begin_epoch()
        self._agreed = [np.array(v.numpy()) for v in self._statistics()]
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The last of several steps per execution may lie beyond the epoch's end.
        self._steps = min(batch + 1, self._feed.steps)
        self._feed.taken(self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        if not self._told and self._collective.world_size > 1:
            self._tell_about_metrics()
        self._coupling.end_epoch()
        self.steps_done += self._steps
        rows = self._feed.rows_at(self._steps - 1)
        agreed = over_all_rows(self.model, logs, self._collective, rows)
        if self._coupling.mean_loss is not None and "loss" in agreed:
            agreed["loss"] = self._coupling.mean_loss
        self._agree_on_statistics()
        if self._held_out is not None:
            figures = self._held_out.evaluate(self.model, self._collective)
            agreed.update({f"val_{name}": value for name, value in figures.items()})
        logs.clear()
        logs.update(agreed)
        self._emit(EpochEnded(epoch + 1, self._epochs, time.monotonic() - self._began, dict(logs)))

    def _tell_about_metrics(self) -> None:
        self._told = True  # not before an epoch: Keras builds the metrics in its first step
        for name in unsummed_metrics(self.model):
            text = (
                f"metric {name!r} is of your own class: its variables are summed over the "
                "workers, which is right for sums and counts only"
            )
            self._emit(Note(text))

    def _statistics(self) -> Sequence[Any]:
        return [v for v in self.model.non_trainable_weights if "float" in str(v.dtype)]

    def _agree_on_statistics(self) -> None:
        """Average what the forward pass has moved (batch normalization), weighted by rows.

        Only the change since the epoch began is averaged, so weights that do not move, such
        as frozen layers', keep their bits.
        """
        if self._collective.world_size == 1:
            return
        share = self._feed.share()
        for place, variable in enumerate(self._statistics()):
            before = self._agreed[place].astype(np.float64)
            change = (np.array(variable.numpy()).astype(np.float64) - before) * share
            agreed = before + all_sum(self._collective, change)
            variable.assign(agreed.astype(self._agreed[place].dtype))


class StopTogether(keras.callbacks.Callback):
    """Last of the callbacks: where one rank has asked to stop, all do, after the same step.

    A rank that left an epoch by itself would miss the exchanges that the others wait for.
    """

    def __init__(self, collective: Collective, coupling: Coupling, verify_weights: bool) -> None:
        super().__init__()
        self._collective = collective
        self._agreement = coupling.agreement
        self._coupling = coupling
        self._verify_weights = verify_weights

    def on_train_begin(self, logs: Any = None) -> None:
        self._coupling.begin_training()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training:
            self._agreement.stop_asked = True
        # The wish travels with the next exchange; all ranks hear of it in the same step.
        self.model.stop_training = self._agreement.stop_agreed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        asked = self._agreement.stop_asked or bool(self.model.stop_training)
        self.model.stop_training = bool(all_sum(self._collective, [float(asked)])[0])
        if self._verify_weights:
            differing = ranks_that_differ(self.model, self._collective)
            if differing:
                raise ClusterError(
                    f"after epoch {epoch + 1} the weights of worker "
                    f"{', '.join(map(str, differing))} differ from those of worker 0: a callback, "
                    "a layer or a train_step of your own has changed them on one worker only"
                )
