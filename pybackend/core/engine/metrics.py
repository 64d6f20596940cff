"""Metrics over the rows of all workers, from summed states rather than averages of averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pybackend.core.collective import Collective, all_sum, broadcast_value
from pybackend.core.engine.global_batch import find_compiled_metrics
from pybackend.core.model.view import has_own


def combine_logs(
    model: Any,
    logs: Mapping[str, Any],
    collective: Collective,
    rows: Any,
    shared: Sequence[Any] = (),
) -> dict[str, Any]:
    """Combine the logs of all ranks: metrics from their summed states, all other values averaged.

    A logged value belongs to a metric if it equals that metric's value on all ranks; a custom step
    may log anything under any name. Ranks without rows, which may have no logs, contribute nothing.

    Parameters
    ----------
    rows
        Number of rows behind each rank's logs, of shape (world size,).
    shared
        Variables of metrics that are the same on all ranks.
    """
    local = {name: to_plain(value) for name, value in model.get_metrics_result().items()}
    names = _find_metrics(logs, local, collective, rows)
    own = [name for name, metric in names.items() if metric is None]
    share = rows[collective.rank] / rows.sum()
    values = [
        np.mean(to_plain(logs[name])) * share if name in logs and share else 0.0 for name in own
    ]
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
    has_rows = rows[collective.rank] > 0
    is_other = [
        [
            has_rows and not _is_same(to_plain(logs.get(name, local.get(name))), value)
            for value in local.values()
        ]
        for name in names
    ]
    others = all_sum(collective, np.array(is_other, float).reshape(len(names), len(local)))
    found: dict[str, str | None] = {}
    for name, counts in zip(names, others, strict=True):
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

    Parameters
    ----------
    are_compiled_tried
        True if the metrics passed to ``compile`` were checked.
    """
    compiled = find_compiled_metrics(model)
    known = compiled if are_compiled_tried else []
    return [
        metric.name
        for container in model.metrics
        if not any(container is each for each in known)
        for metric in getattr(container, "metrics", [container])
        if has_own(metric, "update_state")
    ]


def _is_same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))


def to_plain(value: Any) -> Any:
    """Convert a metric's value to a Python float, or a list if it has several (F1 per class)."""
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array.tolist()
