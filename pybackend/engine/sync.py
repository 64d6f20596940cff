"""Keeps all workers on one state: weights at the start, metrics and statistics at each epoch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective, all_sum
from pybackend.engine.checks import unsummed_metrics
from pybackend.engine.feed import Feed

# Odd and large: it spreads the ranks over the seeds of the random generators.
_RANK_STRIDE = 0x9E3779B1


def broadcast_state(model: Any, collective: Collective) -> None:
    """Give every rank the weights and the optimizer state of rank 0."""
    for variable in [*model.weights, *model.optimizer.variables]:
        value = np.array(variable.numpy(), order="C")
        if value.dtype.kind in "fiub" or value.dtype.name == "bfloat16":
            collective.broadcast(value)
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


class EpochSync(keras.callbacks.Callback):
    """First of the callbacks: the others see figures over the rows of all workers."""

    def __init__(
        self,
        collective: Collective,
        feed: Feed,
        share: float,
        validation: Feed | None,
        emit: Callable[[dict[str, Any]], object],
        epochs: int,
    ) -> None:
        super().__init__()
        self._collective = collective
        self._feed = feed
        self._share = share
        self._validation = validation
        self._validation_data = validation.dataset() if validation and validation.rows else None
        self._emit = emit
        self._epochs = epochs
        self._agreed: list[Any] = []
        self._told = False
        self._began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._agreed = [np.array(v.numpy()) for v in self._statistics()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._feed.epoch = epoch
        self._began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        if not self._told and self._collective.world_size > 1:
            self._tell_about_metrics()
        agreed = self._over_all_rows(logs, self._share)
        self._agree_on_statistics()
        if self._validation is not None:
            agreed.update(self._validate(self._validation))
        logs.clear()
        logs.update(agreed)
        self._emit(
            {
                "event": "epoch",
                "epoch": epoch + 1,
                "epochs": self._epochs,
                "seconds": time.monotonic() - self._began,
                "logs": logs,
            }
        )

    def _tell_about_metrics(self) -> None:
        self._told = True  # not before an epoch: Keras builds the metrics in its first step
        for name in unsummed_metrics(self.model):
            text = (
                f"metric {name!r} is of your own class: its variables are summed over the "
                "workers, which is right for sums and counts only"
            )
            self._emit({"event": "note", "text": text})

    def _validate(self, validation: Feed) -> dict[str, Any]:
        self.model.reset_metrics()
        logs = {}
        if self._validation_data is not None:
            logs = self.model.evaluate(self._validation_data, verbose=0, return_dict=True)
        total = float(all_sum(self._collective, [validation.rows])[0])
        found = self._over_all_rows(logs, validation.rows / total)
        return {f"val_{name}": value for name, value in found.items()}

    def _over_all_rows(self, logs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """One rank's logs made those of all: metrics from their summed state, the rest averaged.

        A log is a metric's where it has that metric's name and value; a training step of the
        user's own may log anything under any name. Ranks without rows, which have no logs, take
        part with nothing.
        """
        model = self.model
        local = {name: plain(value) for name, value in model.get_metrics_result().items()}
        names = self._names_of_all(logs, local)
        own = [name for name, is_metric in names.items() if not is_metric]
        values = [np.mean(plain(logs[name])) * share if name in logs else 0.0 for name in own]
        averaged = dict(zip(own, all_sum(self._collective, values), strict=True)) if own else {}
        summed = self._summed_metrics()
        found = {
            n: summed[n] if is_metric else float(averaged[n]) for n, is_metric in names.items()
        }
        return {"loss": found.pop("loss"), **found} if "loss" in found else found

    def _names_of_all(self, logs: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, bool]:
        """Logged names, and whether each is a metric's on every rank that has logged it."""
        names = list(logs) or list(local)
        is_metric = [
            name in local and _same(plain(logs.get(name, local[name])), local[name])
            for name in names
        ]
        others = all_sum(self._collective, [float(not flag) for flag in is_metric])
        return {name: count == 0 for name, count in zip(names, others, strict=True)}

    def _summed_metrics(self) -> dict[str, Any]:
        """Results of the metrics from the sums of their variables: exact, not averages."""
        variables = self.model.metrics_variables
        if self._collective.world_size > 1 and variables:
            values = [np.array(v.numpy()) for v in variables]
            flat = np.concatenate([v.reshape(-1).astype(np.float64) for v in values])
            self._collective.all_reduce(flat)
            parts = np.split(flat, np.cumsum([v.size for v in values])[:-1])
            for variable, value, part in zip(variables, values, parts, strict=True):
                variable.assign(part.reshape(value.shape).astype(value.dtype))
        return {name: plain(value) for name, value in self.model.get_metrics_result().items()}

    def _statistics(self) -> Sequence[Any]:
        return [v for v in self.model.non_trainable_weights if "float" in str(v.dtype)]

    def _agree_on_statistics(self) -> None:
        """Average what the forward pass has moved (batch normalization), weighted by rows.

        Only the change since the last agreement is averaged, so weights that do not move, such
        as frozen layers', keep their bits.
        """
        if self._collective.world_size == 1:
            return
        for place, variable in enumerate(self._statistics()):
            before = self._agreed[place].astype(np.float64)
            change = (np.array(variable.numpy()).astype(np.float64) - before) * self._share
            agreed = before + all_sum(self._collective, change)
            self._agreed[place] = agreed.astype(self._agreed[place].dtype)
            variable.assign(self._agreed[place])


class StopTogether(keras.callbacks.Callback):
    """Last of the callbacks: where one rank has asked to stop, all do, after the epoch.

    A rank that left an epoch in the middle would miss the exchanges that the others wait for.
    """

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective
        self._asked = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training:
            self._asked = True
            self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        asked = self._asked or bool(self.model.stop_training)
        self.model.stop_training = bool(all_sum(self._collective, [float(asked)])[0])


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))


def plain(value: Any) -> Any:
    """A metric's value as a Python float, or a list where it has several (F1 per class)."""
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array.tolist()
