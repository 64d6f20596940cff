"""Keeps all workers on one state: weights at the start, metrics and statistics at each epoch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective, all_sum
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
        emit: Callable[[dict[str, Any]], None],
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
        self._began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._agreed = [np.array(v.numpy()) for v in self._statistics()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._feed.epoch = epoch
        self._began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        results = self._summed_metrics()
        others = {name: value for name, value in logs.items() if name not in results}
        logs.clear()
        logs.update({"loss": results.pop("loss", None), **results, **others})
        self._agree_on_statistics()
        if self._validation is not None:
            self.model.reset_metrics()
            if self._validation_data is not None:
                self.model.evaluate(self._validation_data, verbose=0)
            logs.update({f"val_{k}": v for k, v in self._summed_metrics().items()})
        seconds = time.monotonic() - self._began
        self._emit(
            {
                "event": "epoch",
                "epoch": epoch + 1,
                "epochs": self._epochs,
                "seconds": seconds,
                "logs": {name: plain(value) for name, value in logs.items()},
            }
        )

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
    """Last of the callbacks: where one rank has asked to stop, all do."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        asked = all_sum(self._collective, [float(bool(self.model.stop_training))])
        if asked[0] > 0:
            self.model.stop_training = True


def plain(value: Any) -> Any:
    """A metric's value as a Python float, or a list where it has several (F1 per class)."""
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array.tolist()
