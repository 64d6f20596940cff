"""Metrics over the rows of all workers, from summed states rather than averages of averages.

At the end of an epoch, `combine_logs` sums the states. Metrics that have one value per step, such
as losses of several outputs, need more: Keras averages these values over the steps, regardless of
how many rows they have. So a worker's value is weighted by its share of the step's rows
(`StepMeans`), and the values of all workers together count as one step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum, broadcast_value
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import Rows, make_zero_row
from pybackend.core.engine.statistics.global_batch import find_compiled_metrics
from pybackend.core.engine.step_changes import StepCalls, override, override_each
from pybackend.core.errors import InputError
from pybackend.core.model.compare import compute_loss, keep_state
from pybackend.core.model.view import ModelView, find_ignored_class, has_own


def combine_logs(
    model: Any, logs: Mapping[str, Any], collective: Collective, rows: Any, shared: Any = ()
) -> dict[str, Any]:
    """Combine the logs of all ranks: metrics from their summed states, all other values averaged.

    A logged value belongs to a metric if it equals that metric's value on all ranks; a custom step
    may log anything under any name. Ranks without rows, which may have no logs, contribute nothing.
    ``rows`` has the number of rows behind each rank's logs, and ``shared`` the variables of metrics
    that are the same on all ranks.
    """
    local = {name: to_plain(value) for name, value in model.get_metrics_result().items()}
    names = _find_metrics(logs, local, collective, rows)
    own = [name for name, metric in names.items() if metric is None]
    share = rows[collective.rank] / rows.sum()
    known = logs if share else {}
    values = [np.mean(to_plain(known[name])) * share if name in known else 0.0 for name in own]
    averaged = dict(zip(own, all_sum(collective, values), strict=True)) if own else {}
    summed = _sum_metrics(model, collective, shared)
    found = {n: float(averaged[n]) if m is None else summed[m] for n, m in names.items()}
    return {"loss": found.pop("loss"), **found} if "loss" in found else found


def _find_metrics(
    logs: Mapping[str, Any], local: Mapping[str, Any], collective: Collective, rows: Any
) -> dict[str, str | None]:
    """Return logged names, each with the metric whose value it has on every rank that logged it."""
    # A rank with rows knows what is logged.
    root = int(np.argmax(rows))
    names = broadcast_value(collective, list(logs) or list(local), root)
    is_other = np.zeros((len(names), len(local)))
    for n, name in enumerate(names if rows[collective.rank] else ()):
        own = to_plain(logs.get(name, local.get(name)))
        is_other[n] = [not np.array_equal(own, one, equal_nan=True) for one in local.values()]
    found: dict[str, str | None] = {}
    for name, counts in zip(names, all_sum(collective, is_other), strict=True):
        same = [metric for metric, count in zip(local, counts, strict=True) if not count]
        found[name] = name if name in same else next(iter(same), None)
    return found


def _sum_metrics(model: Any, collective: Collective, shared: Sequence[Any]) -> dict[str, Any]:
    """Return the metrics' results from the sums of their variables, which is exact."""
    equal = {id(variable) for variable in shared}
    variables = [v for v in model.metrics_variables if id(v) not in equal]
    if collective.world_size > 1 and variables:
        values = [np.array(v.numpy()) for v in variables]
        flat = np.concatenate([v.reshape(-1).astype(np.float64) for v in values])
        collective.all_reduce(flat)
        parts = np.split(flat, np.cumsum([v.size for v in values])[:-1])
        for variable, value, part in zip(variables, values, parts, strict=True):
            variable.assign(part.reshape(value.shape).astype(value.dtype))
    return {name: to_plain(value) for name, value in model.get_metrics_result().items()}


def find_custom_metrics(model: Any, are_compiled_tried: bool) -> list[str]:
    """Return the names of custom metrics whose state has not been verified to be a sum.

    ``are_compiled_tried`` is true if the metrics passed to ``compile`` were checked.
    """
    known = {id(each) for each in find_compiled_metrics(model) if are_compiled_tried}
    return [
        metric.name
        for container in model.metrics
        if id(container) not in known
        for metric in getattr(container, "metrics", [container])
        if has_own(metric, "update_state")
    ]


def to_plain(value: Any) -> Any:
    """Convert a metric's value to a Python float, or a list if it has several (F1 per class)."""
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array.tolist()


# Too small to change a sum of counts, but a completely masked batch has a mean, too.
_NEXT_TO_NOTHING = 1e-9


class _UnmaskedCount(keras.losses.Loss):
    """Number of unmasked losses: Keras applies the mask, and this loss sums ones."""

    def __init__(self, ignored_class: Any) -> None:
        super().__init__(reduction="sum", name="valid_steps")
        self._ignored_class = ignored_class

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ones = keras.ops.ones_like(y_pred[..., 0])
        if self._ignored_class is None:
            return ones
        labels = keras.ops.reshape(y_true, keras.ops.shape(ones))
        return ones * keras.ops.cast(labels != self._ignored_class, ones.dtype)


class ValidStepCounter:
    """Counter of the valid steps in a batch, based on calls of a model's ``compute_loss``.

    `loss` is the batch's mean loss, as a tensor of the step that is being traced.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._count = model, _UnmaskedCount(find_ignored_class(model))
        self._valid: Any = None
        self.loss: Any = 0.0

    def install(self) -> AbstractContextManager[None]:
        return override_each([self._model], "compute_loss", self.watch)

    def watch(self, model: Any, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compute_loss`` of a model, so that the valid steps of a call are counted."""
        signature = inspect.signature(compute_loss)

        def watched(*args: Any, **options: Any) -> Any:
            arguments = signature.bind(*args, **options).arguments
            y_pred = arguments.get("y_pred")
            if isinstance(y_pred, (dict, list, tuple)) and len(y_pred) > 1:
                raise InputError(
                    "the model masks time steps and has several outputs: use one output, or "
                    "sample weights in place of the mask"
                )
            self.loss = compute_loss(*args, **options)
            y = arguments.get("y")
            self._valid = self._count(y_pred if y is None else y, y_pred)
            return self.loss

        # Keras checks whether there is a parameter `training`.
        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched

    def weight(self, rows: Any) -> Any:
        rows = tf.cast(rows, tf.float32)
        if self._valid is None:  # a custom train_step that computes its loss itself
            return rows
        return tf.cast(self._valid, tf.float32) + _NEXT_TO_NOTHING * rows


def find_step_means(model: Any) -> list[Any]:
    """Return the metrics of a model that may be means of one value per step.

    Keras itself weights the total loss by rows.
    """
    means = [m for m in model.metrics if type(m).update_state is keras.metrics.Mean.update_state]
    return [m for m in means if m.name != "loss" or has_own(model, "train_step")]


def build_losses(view: ModelView, rows: Rows) -> None:
    """Make Keras create the metrics for several losses, as a first step would."""
    model = view.model
    outputs = getattr(model, "outputs", None) or []
    loss = getattr(model, "loss", None)
    is_single = len(outputs) == 1 and not isinstance(loss, Mapping | list | tuple)
    if is_single and not view.custom_parts:  # else a layer may create variables when called
        return
    # Two rows, since a loss may compare rows.
    data = nest({key: np.repeat(array, 2, 0) for key, array in make_zero_row(rows).items()})
    with keep_state(model), suppress(Exception):  # the training will report the error
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        compute_loss(model, data, model(x, training=False), False)
    model.reset_metrics()


@dataclass(eq=False)
class StepMeans:
    """Weights for means of one value per step, in steps traced while `weigh` is active.

    ``count_total`` returns the number of rows in the step's global batch, given this worker's; it
    is called once per step, even by workers without rows. ``add_up`` returns sums over the workers.
    """

    model: Any
    calls: StepCalls
    count_total: Callable[[int], float]
    add_up: Callable[[list[float]], Sequence[float]] = list
    share: Any = None  # of the step that is being traced, while `weigh` lasts
    is_always_asked: bool = False
    is_uneven: bool = False  # Keras weights the total loss by rows other than the labels'

    @contextmanager
    def install(self) -> Iterator[None]:
        totals = [one for one in self.model.metrics if self.is_uneven and one.name == "loss"]
        with (
            override_each(find_step_means(self.model), "update_state", self._watch),
            override_each(totals, "update_state", self._count),
        ):
            yield

    def weigh(self, share: Any) -> AbstractContextManager[None]:
        """Context in which a step is traced, with this worker's share of the step's rows."""
        return override(self, "share", share)

    def _watch(self, mean: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(values: Any, sample_weight: Any = None) -> Any:
            is_one = self.share is not None and keras.ops.ndim(values) == 0
            weight = self.share if is_one and sample_weight is None else sample_weight
            return update(values, sample_weight=weight)

        return watched

    def _count(self, mean: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        def counted(values: Any, sample_weight: Any = None) -> Any:
            return update(values, sample_weight=self.compute_weight(sample_weight))

        return counted

    def compute_weight(self, own: Any) -> Any:
        """Return this worker's part of the total loss weight, based on its share of the rows."""

        def compute(rows: Any, own: Any) -> Any:
            total, weights = self.add_up([float(rows), float(own)])
            return np.float32(rows / total * weights if total else 0.0)

        return self._call(compute, [self.calls.rows, own], lambda: self.compute_weight(0))

    def compute_share(self) -> Any:
        """Return this worker's share of the rows in the current step; None if not needed."""
        if not self.is_always_asked and not find_step_means(self.model):
            return None

        def compute(rows: Any) -> Any:
            total = self.count_total(int(rows))
            return np.float32(rows / total if total else 0.0)

        return self._call(compute, [self.calls.rows], self.compute_share)

    def _call(
        self, compute: Callable[..., Any], given: Sequence[Any], replacement: Callable[[], object]
    ) -> Any:
        (found,) = self.calls.call(compute, given, [tf.TensorSpec([], tf.float32)])
        self.calls.record(replacement)
        return found
