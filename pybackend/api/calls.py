"""Arguments of a call, as they were passed, before they are checked."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pybackend.job.checkpoint import Checkpoint
from pybackend.job.job import Shuffle
from pybackend.job.learning_rate import ScaleLearningRate
from pybackend.job.options import DataOptions, Exchange, LocalSteps
from pybackend.job.resources import Resources

# A path on the driver, or a URI.
Place = str | os.PathLike[str]
Features = Sequence[str] | Mapping[str, str | Sequence[str]]
OnMissing = Literal["null", "error"]
PredictionType = Literal["class", "prob", "raw"]
Scaling = Literal["linear", "sqrt"]
Strategy = Literal["parameter_server"]


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """Arguments that all calls with a model share: those of `barrier_evaluate`."""

    model: Any
    workers: int | None = 1
    batch_size: int = 32
    features: Features | None = None
    label: str | Mapping[str, str] | None = "label"
    weight: str | None = None
    data_options: DataOptions | None = None
    resources: Resources | None = None
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    verbose: int = 1
    timeout: float = 300.0


@dataclass(frozen=True, kw_only=True)
class EvaluationCall(ModelCall):
    """Arguments of `barrier_evaluate` and `TrainResult.evaluate`."""


@dataclass(frozen=True, kw_only=True)
class PredictionCall(ModelCall):
    """Arguments of `barrier_predict`, `predict_spark` and `TrainResult.predict`."""

    type: PredictionType | None = None
    levels: Sequence[Any] | None = None
    on_missing: OnMissing = "null"


@dataclass(frozen=True, kw_only=True)
class TrainingCall(ModelCall):
    """Arguments of `barrier_train`; ``discards_checkpoints`` comes from a `BackupAndRestore`."""

    spark: Any
    data: Any
    min_workers: int | None = None
    max_workers: int | None = None
    epochs: int = 1
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_data: Any = None
    validation_split: float = 0.0
    validation_freq: int | Collection[int] = 1
    callbacks: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | None = None
    seed: int | None = None
    shuffle: Shuffle = True
    exchange: Exchange | LocalSteps | None = None
    scale_lr: ScaleLearningRate | Scaling | None = None
    model_uri: Place | None = None
    checkpoint: Checkpoint | Place | None = None
    resume: bool = False
    discards_checkpoints: bool = False
    restarts: int = 0
    strategy: Strategy | None = None
    roles: Mapping[str, int] | None = None
    tensorboard: bool | Place | None = None
