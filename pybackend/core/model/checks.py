"""Reject models that the workers cannot get unchanged, or cannot train as a single process would.

The checks raise an error before training starts, because a wrong result would look like a correct
one. A loss with a mask is a mean over valid steps, not over rows. R functions exist only in the R
session, and cannot be pickled.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from pybackend.core.errors import InputError
from pybackend.core.job.job import ModelJob, TrainingJob
from pybackend.core.job.worker_options import Exchange, LocalSteps
from pybackend.core.model.view import ModelView, find_outputs, flatten, has_own, reach, read_closure
from pybackend.core.words import setting, show, term


def check_masks(view: ModelView) -> None:
    """Reject masks combined with several losses or other means: each would need its own weights."""
    if not view.has_masked_loss:
        return
    model = view.model
    outputs = find_outputs(model)
    if outputs is not None and len(outputs) > 1:
        raise InputError(
            f"the model {show(model.name)} leaves time steps or a class out of the loss and has "
            f"{len(outputs)} outputs: each loss would be a mean over a different number of steps. "
            f"Set {setting(loss_over='global batch')} in `exchange`, or use one output, or sample "
            "weights in place of the mask"
        )
    for layer in view.layers:
        if getattr(layer, "activity_regularizer", None) is not None:
            raise InputError(
                f"layer {show(layer.name)} has an activity regularizer, a mean over rows, in a "
                "model whose masks make the loss a mean over time steps: set "
                f"{setting(loss_over='global batch')} in `exchange`, or use one without the other"
            )


def check_model(view: ModelView, job: ModelJob) -> None:
    """Reject models that the workers of a job cannot train exactly."""
    model = view.model
    if not isinstance(model, keras.Model):
        raise InputError(f"expected a Keras model, not {type(model).__name__}")
    if job.kind == "predict":  # needs no loss, so the model need not be compiled
        return
    _check_compiled(model)
    if not isinstance(job, TrainingJob):
        return
    if job.scale_lr is not None:
        _check_rate(view)
    if job.workers == 1:
        return
    _check_optimizers(view, job)
    if job.shards_optimizer:
        _check_sharded(model, job)
    if isinstance(job.exchange, Exchange) and not job.has_global_loss:
        check_losses(model)
        check_masks(view)
        if job.exchange.transport == "tf" and view.has_masked_loss:
            raise InputError(f"a model whose masks reach the loss needs {setting(transport='tcp')}")
    _check_layers(view, job)


def _check_compiled(model: Any) -> None:
    if not model.compiled or model.optimizer is None:
        raise InputError("the model is not compiled: call `compile()` first")
    if keras.config.backend() != "tensorflow":
        raise InputError(
            f"Keras runs on {show(keras.config.backend())}; set KERAS_BACKEND=tensorflow before "
            "Keras is first imported"
        )


def _check_rate(view: ModelView) -> None:
    """Reject optimizers whose learning rate is not a variable that callbacks can change."""
    optimizer, others = view.model.optimizer, view.other_optimizers
    rate = optimizer.learning_rate
    if not isinstance(rate, keras.Variable):
        raise InputError(
            "`scale_lr` needs an optimizer with a number as its learning rate, but that of "
            f"{type(optimizer).__name__} is a schedule or a function: use a number, with "
            f"warm-up and decay in {term('ScaleLearningRate')}, or omit `scale_lr` and scale the "
            "schedule"
        )
    if others:
        raise InputError(
            f"`scale_lr` scales only the optimizer given to compile(), but the model has others "
            f"({', '.join(sorted(others))}): omit it, and scale their learning rates yourself"
        )


def _check_optimizers(view: ModelView, job: TrainingJob) -> None:
    for optimizer in view.optimizers:
        if has_own(optimizer, "apply_gradients"):
            raise InputError(
                f"the optimizer {type(optimizer).__name__} has its own apply_gradients, which "
                "would see only one worker's gradients: override `update_step` instead"
            )
    if not isinstance(job.exchange, LocalSteps):
        return
    compiled, others = view.model.optimizer, view.other_optimizers
    inner = getattr(compiled, "inner_optimizer", compiled)
    if inner.use_ema:
        raise InputError(
            f"`{term('LocalSteps')}` cannot be combined with an optimizer with "
            f"{setting(use_ema=True)}: each worker would have its own moving averages"
        )
    if others:
        raise InputError(
            f"`{term('LocalSteps')}` cannot be combined with further optimizers "
            f"({', '.join(sorted(others))}): the workers would only average the state of the one "
            "given to compile()"
        )


def _check_sharded(model: Any, job: TrainingJob) -> None:
    """Reject what needs the optimizer's state, or the gradients, of all weights in one place."""
    optimizer = model.optimizer
    name = type(optimizer).__name__
    reason = None
    if has_own(model, "train_step"):
        reason = "a model with its own train_step, which may read the optimizer's state"
    elif has_own(model, "compile", "compile_from_config"):
        reason = "a model with its own compile() or compile_from_config()"
    elif type(optimizer).apply is not keras.optimizers.Optimizer.apply:
        reason = f"the optimizer {name}, which looks at the gradients of all weights at once"
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            reason += ". Use the dtype policy 'mixed_bfloat16', which needs no loss scale"
    elif optimizer.global_clipnorm and optimizer.gradient_accumulation_steps:
        reason = "global_clipnorm together with gradient_accumulation_steps"
    elif optimizer.global_clipnorm and optimizer.loss_scale_factor:
        reason = "global_clipnorm together with loss_scale_factor"
    if reason is not None:
        raise InputError(f"`shard_optimizer` does not support {reason}. Or omit `shard_optimizer`")
    # A rank without a variable would have nothing to update.
    count = len(model.trainable_variables)
    if model.built and count < job.workers:
        raise InputError(
            f"`shard_optimizer` divides whole variables, but the model has only {count} for "
            f"{job.workers} workers: omit `shard_optimizer`, or use at most {count} workers"
        )


def _check_layers(view: ModelView, job: TrainingJob) -> None:
    for layer in view.layers:
        if getattr(layer, "stateful", False):
            raise InputError(
                f"layer {show(layer.name)} has {setting(stateful=True)}: its state depends on the "
                f"rows that one worker has seen. Use {setting(stateful=False)}"
            )
    for layer in view.synchronized:
        kind = keras.layers.BatchNormalization
        if isinstance(job.exchange, LocalSteps):
            reason = f"`{term('LocalSteps')}`, where each worker steps on its own"
        elif type(layer).call is not kind.call or layer.renorm:
            reason = (
                f"{setting(renorm=True)} or its own call(), whose statistics cover one worker's "
                "rows only"
            )
        else:
            continue
        raise InputError(
            f"layer {show(layer.name)} has {setting(synchronized=True)} together with {reason}: "
            f"use {setting(synchronized=False)} (its moving statistics are averaged over the "
            "workers after each epoch)"
        )


def check_losses(model: Any) -> None:
    """Reject losses that are not means over rows."""
    for loss in flatten(model.loss):
        if isinstance(loss, keras.losses.Circle):
            raise InputError(
                "the loss Circle compares the rows of a batch with each other, but each worker "
                f"has only some of them: set {setting(loss_over='global batch')} in `exchange`"
            )
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            name = getattr(loss, "name", type(loss).__name__)
            raise InputError(
                f"the loss {show(name)} has {setting(reduction=reduction)}: workers average "
                f"gradients by their rows, so use {setting(reduction='sum_over_batch_size')}, or "
                f"set {setting(loss_over='global batch')} in `exchange`"
            )


_PARTS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.initializers.Initializer,
    keras.constraints.Constraint,
)
# Names that reticulate and keras3 give to functions without a name.
_UNNAMED = {"python_function", "anonymous_R_function"}

_ADVICE = {
    "train": (
        "Pass the function that builds and compiles the model as `model_fn`: each worker calls it"
    ),
    "evaluate": "Evaluate it in this session, or pass a fit that was trained with `model_fn`",
    "predict": "Predict in this session, or pass a fit that was trained with `model_fn`",
}
_ABOUT_CALLBACKS = (
    "Callbacks that run on the workers must be Keras's own, without R functions; the functions of "
    "`observer()` run in this session"
)
_ABOUT_SCHEDULES = (
    "Pass a schedule to the optimizer instead, such as "
    "`keras3::learning_rate_schedule_exponential_decay()`"
)


def check_r_functions(
    model: Any, callbacks: Sequence[Any], custom_objects: Mapping[str, Any], kind: str
) -> None:
    """Reject R functions and classes, which cannot be pickled, in a job of this kind.

    Model None: it is built on the workers.
    """
    searches = [(_find_r_functions(model, "the model"), _ADVICE[kind])]
    for callback in callbacks:
        is_schedule = isinstance(callback, keras.callbacks.LearningRateScheduler)
        found = _find_r_functions(callback, f"the callback `{type(callback).__name__}`")
        searches.append((found, _ABOUT_SCHEDULES if is_schedule else _ABOUT_CALLBACKS))
    own = [f"`custom_objects${name}`" for name, one in custom_objects.items() if _is_r(one)]
    for found, advice in [*searches, (own, _ADVICE[kind])]:
        if found:
            raise InputError(f"{_state(found)}. {advice}")


def _state(found: Sequence[str]) -> str:
    *others, last = found
    if not others:
        return f"{last} is written in R and exists only in this session"
    return f"{', '.join(others)} and {last} are written in R and exist only in this session"


def _find_r_functions(whole: Any, what: str) -> list[str]:
    found: dict[int, str] = {}
    seen = set()
    waiting = deque([(whole, what)])
    while waiting:
        part, what = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind = type(part)
        if is_r_class := any(map(_is_r, vars(kind).values())):
            name = f"`{kind.__name__}`"
            found.setdefault(id(kind), what if name in what else f"the class {name} of {what}")
        for own, value in getattr(part, "__dict__", {}).items():
            name = own.lstrip("_")
            for leaf in flatten(value):
                if isinstance(leaf, _PARTS):
                    waiting.append((leaf, _describe_part(name, leaf, what)))
                elif _is_r(leaf) and not is_r_class:  # Keras wraps methods in attributes
                    found.setdefault(id(leaf), _describe_function(name, leaf, part, what))
    return list(found.values())


def _describe_part(name: str, part: Any, owner: str) -> str:
    bases = {keras.layers.Layer: "layer", keras.metrics.Metric: "metric", keras.losses.Loss: "loss"}
    for base, kind in bases.items():
        if isinstance(part, base):
            return f"the {kind} `{part.name}`"
    return "the optimizer" if name == "optimizer" else f"`{name}` of {owner}"


def _describe_function(name: str, function: Any, owner: Any, what: str) -> str:
    if isinstance(owner, keras.metrics.Metric):
        return f"the metric{_sign(function)}"
    if isinstance(owner, keras.losses.Loss) or (isinstance(owner, keras.Model) and name == "loss"):
        return f"the loss{_sign(function)}"
    return f"`{name}` of {what}"


def _sign(function: Any) -> str:
    """Return " `name(arguments)`"; empty without a name."""
    name = function.__name__
    return "" if name in _UNNAMED else f" `{name}{inspect.signature(function)}`"


def _is_r(value: Any) -> bool:
    """Return whether a function calls R: reticulate keeps a pointer in its closure."""

    def find_inside(part: Any) -> list[Any]:
        part = part.__func__ if inspect.ismethod(part) else part
        return read_closure(part) if inspect.isfunction(part) else []

    return any(type(part).__name__ == "PyCapsule" for part in reach(value, find_inside))
