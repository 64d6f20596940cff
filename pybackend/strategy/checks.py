"""Models that cannot be trained asynchronously, each refused by name before any step is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from pybackend.engine.steps import has_keras_train_step
from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.model.checks import check_model
from pybackend.model.layers import find_layers, find_synchronized, is_of_keras

_INSTEAD = "leave out `strategy`: the synchronous training takes it as it is"


def check_asynchronous(model: Any, job: Job) -> None:
    """Reject a model that depends on what all workers do in the same step.

    Raises
    ------
    InputError
        Names the part of the model, and what to use instead.
    """
    check_model(model, replace(job, workers=1))
    found = _find_obstacle(model)
    if found is not None:
        raise InputError(f"strategy={job.strategy!r} cannot train {found}; or {_INSTEAD}")


def _find_obstacle(model: Any) -> str | None:
    if not has_keras_train_step(model):
        return "a model with a train_step of its own: override compute_loss instead"
    if not is_of_keras(type(model).compute_metrics):
        return "a model with a compute_metrics of its own: pass metrics to compile()"
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return "with a LossScaleOptimizer, whose scale all steps share: use bfloat16 or float32"
    if optimizer.gradient_accumulation_steps:
        return "with gradient_accumulation_steps, which workers would add to at once: drop it"
    if optimizer.use_ema:
        return "with use_ema=True, whose averages are of one sequence of steps: drop it"
    if model.run_eagerly:
        return "with run_eagerly=True: its workers run graphs"
    for layer in find_layers(model):
        if getattr(layer, "stateful", False):
            return f"layer {layer.name!r} with stateful=True: use stateful=False"
    for layer in find_synchronized(model):
        return f"layer {layer.name!r} with synchronized=True: use synchronized=False"
    return None
