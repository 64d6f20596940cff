"""Train a classifier with several workers, or in one process with the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import keras
from models import INPUTS, build
from reading import pipeline, read_batches

import pybackend
from pybackend import ScaleLearningRate


@dataclass(frozen=True)
class Plan:
    """Length and learning rate of a training; ``batch_size`` is that of one worker."""

    epochs: int = 12
    batch_size: int = 128
    learning_rate: float = 0.0015
    scale: ScaleLearningRate = ScaleLearningRate(  # noqa: RUF009 - it is frozen
        "linear", warmup_epochs=1, decay={7: 0.3, 10: 0.1}
    )
    dropout: float = 0.2
    seed: int = 1

    def build(self, name: str) -> Any:
        """Return the model with this name, whose initial weights depend only on the seed."""
        keras.utils.set_random_seed(self.seed)
        return build(name, self.learning_rate, self.dropout)


def train(name: str, files: Sequence[str], workers: int, plan: Plan, spark: Any = "local") -> Any:
    """Train with several workers on this machine or on Spark, and return the `TrainResult`."""
    return pybackend.barrier_train(
        spark,
        plan.build(name),
        pipeline(files, INPUTS[name], plan.batch_size),
        workers=workers,
        epochs=plan.epochs,
        exchange=pybackend.Exchange(scale_lr=plan.scale),
        seed=plan.seed,
        verbose=0,
    )


def train_in_one_process(name: str, files: Sequence[str], workers: int, plan: Plan) -> Any:
    """Train with Keras's own ``fit`` in the steps of this number of workers; return the model."""
    import tensorflow as tf

    parts = [
        read_batches(files, INPUTS[name], plan.batch_size, rank, workers) for rank in range(workers)
    ]

    def join() -> Iterator[Any]:
        for batches in zip_longest(*parts):
            present = [batch for batch in batches if batch is not None]
            yield tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *present)

    data = tf.data.Dataset.from_generator(join, output_signature=parts[0].element_spec)
    steps = max(sum(1 for _ in part) for part in parts)
    data = data.apply(tf.data.experimental.assert_cardinality(steps))
    model = plan.build(name)
    rates = _Rates(plan.scale, workers, steps)
    model.fit(data, epochs=plan.epochs, callbacks=[rates], shuffle=False, verbose=0)
    return model


def predict(name: str, model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the model's scores for rows, shape (rows, classes)."""
    chosen = {key: inputs[key] for key in INPUTS[name]}
    return model.predict(chosen, batch_size=4096, verbose=0)


class _Rates(keras.callbacks.Callback):
    """Set the learning rate of each step, as `barrier_train` does with ``scale_lr``."""

    def __init__(self, scale: ScaleLearningRate, workers: int, steps: int) -> None:
        super().__init__()
        self._scale, self._workers, self._steps = scale, workers, steps
        self._epoch, self._rate = 0, 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._rate = float(self.model.optimizer.learning_rate.numpy())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        multiple = self._scale.multiple(self._workers, self._epoch + batch / self._steps)
        self.model.optimizer.learning_rate = self._rate * multiple
