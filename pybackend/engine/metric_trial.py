"""Tries on some rows whether the state of a model's metrics may be summed over workers.

Counts and sums may. Maxima may not, nor correlations, nor what is computed from a whole batch and
then averaged over batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from pybackend.engine.global_batch import find_compiled_metrics
from pybackend.engine.loss_trial import choose_move, count_rows, cut_rows, take_part
from pybackend.model.behavior import keep_state

# Where the rows are cut into parts, as shares of them.
_SHARES = (0.1, 0.35)


def find_unsummable_metrics(model: Any, rows: Any) -> list[str]:
    """Names of metrics whose value over all rows is not that of the summed state of parts.

    Those given to ``compile`` are tried, at predictions that are moved at random. The model is as
    it was afterwards, but has its metrics built, and reset.

    Parameters
    ----------
    rows
        ``(x, y)`` or ``(x, y, sample_weight)`` of at least two rows.
    """
    containers = find_compiled_metrics(model)
    if not containers:
        return []
    count = count_rows(rows)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
    generator = np.random.default_rng(0)
    with keep_state(model):
        y_pred = keras.tree.map_structure(
            lambda leaf: choose_move(leaf, count, generator)(leaf, slice(0, count)),
            model(take_part(x, slice(0, count)), training=False),
        )
        return [
            name
            for container in containers
            for name in _find_unsummable(
                container, [y, y_pred, *([] if weight is None else [weight])], count
            )
        ]


def _find_unsummable(container: Any, arguments: Sequence[Any], count: int) -> list[str]:
    def read_state(part: slice) -> list[Any]:
        container.reset_state()
        container.update_state(*take_part(arguments, part))
        return [variable.numpy().astype(np.float64) for variable in container.variables]

    read_state(slice(0, count))
    expected = _read_result(container)
    try:
        states = [read_state(part) for part in cut_rows(count, _SHARES)]
    except Exception:  # one that needs more rows than a part has depends on the batch
        container.reset_state()
        return list(expected)
    for variable, *values in zip(container.variables, *states, strict=True):
        variable.assign(np.sum(values, axis=0))
    found = _read_result(container)
    container.reset_state()
    return [name for name, value in expected.items() if not _is_close(value, found[name])]


def _read_result(container: Any) -> dict[str, Any]:
    # A copy: what a metric returns may be its variable.
    return {n: np.array(keras.ops.convert_to_numpy(v)) for n, v in container.result().items()}


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(other, one, rtol=1e-3, atol=1e-5, equal_nan=True))
