"""Check what workers merge at the end of an epoch: metrics, and statistics of normalization.

Both are merged by the functions that an epoch ends with, after its first step, and once more here:
from the values of each worker, by rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pybackend.core.collective import Collective, broadcast_value, gather_values
from pybackend.core.engine.audit.audited_steps import OWN_FAULT, Values
from pybackend.core.engine.audit.one_process import StepState
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.row_batches import Batches
from pybackend.core.words import show

# Relative rounding errors of the sums, and the size below which a value is zero.
_ROUNDING, _ZERO = 1e-4, 1e-6


class EpochMerge(Protocol):
    """Functions of `EpochSync` that merge values, and those that they merge."""

    def list_merged(self) -> list[tuple[Any, Any]]: ...
    def merge_logs(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]: ...
    def agree_on_statistics(self) -> None: ...


@dataclass(frozen=True)
class Merges:
    collective: Collective
    batches: Batches
    exchange: GradientExchange
    state: StepState
    sync: EpochMerge

    def compare(
        self, after: Values, steps: Sequence[int], logs: Mapping[str, Any] | None, where: str
    ) -> dict[str, Any]:
        """Merge the values after an epoch's first steps; return a verdict as that of `Judge`.

        ``after`` has the values of the variables, which are others at the end, and ``logs`` what
        the steps logged.
        """
        collective, logged = self.collective, dict(logs or {})
        model = self.state.view.model
        # Of all metrics, only those that the model lists are merged. Keras's own mean of the loss,
        # which a model that lists its metrics itself leaves out, ended a right training
        # (test_there_is_no_false_alarm).
        listed = {id(v.value) for v in model.metrics_variables}
        shared = self.exchange.shared_variables
        metrics = [key for key in self.state.list_metrics(shared) if key in listed]
        results = model.get_metrics_result()
        own = {
            "rows": self.batches.count_rows(),
            # A train_step of a model's own may log other values by the name of a metric.
            "others": [n for n in logged if n in results and not _is_close(logged[n], results[n])],
            "metrics": [after[key] for key in metrics],
            "changes": [_change(variable, last) for variable, last in self.sync.list_merged()],
        }
        ranks = gather_values(collective, own)
        merged = self.sync.merge_logs(logged, steps[-1])
        self.sync.agree_on_statistics()
        wrong = [] if collective.rank else self._find_wrong(ranks, metrics, merged)
        wrong = broadcast_value(collective, wrong)
        error = (
            f"in {where}, the workers' values of {', '.join(map(show, wrong))} were merged wrongly"
        )
        return {"error": f"{error}. {OWN_FAULT}"} if wrong else {}

    def _find_wrong(
        self, ranks: Sequence[Any], metrics: Sequence[int], merged: Mapping[str, Any]
    ) -> list[str]:
        wrong = []
        rows, names = [one["rows"] for one in ranks], self.state.name_variables()
        for n, (variable, last) in enumerate(self.sync.list_merged()):
            mean = np.average([one["changes"][n] for one in ranks], axis=0, weights=rows)
            if not _is_near(_change(variable, last), mean, last):
                wrong.append(str(variable.path))
        for n, key in enumerate(metrics):
            values = [one["metrics"][n] for one in ranks]
            total = np.sum([value.astype(np.float64) for value in values], axis=0)
            if not _is_near(self.state.variables[key].numpy(), total, values[0]):
                wrong.append(names.get(key, "a metric"))
        others = {name for one in ranks for name in one["others"]}
        # Results are compared with those of the merged variables: they may magnify rounding.
        results = self.state.view.model.get_metrics_result()
        logged = set(results) & set(merged) - others
        return wrong + [n for n in results if n in logged and not _is_close(merged[n], results[n])]


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, _ROUNDING, _ZERO, equal_nan=True))


def _change(variable: Any, last: Any) -> Any:
    return variable.numpy().astype(np.float64) - last


def _is_near(found: Any, expected: Any, last: Any) -> bool:
    """Return whether numbers are equal up to rounding, in the type of ``last``."""
    if last.dtype.kind in "iub":
        return bool(np.array_equal(found, expected))
    is_finite = np.isfinite(expected)
    if not np.array_equal(is_finite, np.isfinite(found)):
        return False
    # Half precision has 8 bits or more.
    rounding = _ZERO if last.dtype.itemsize >= 4 else 2.0**-6
    found, expected, last = (np.asarray(v, np.float64)[is_finite] for v in (found, expected, last))
    size = np.linalg.norm(np.nan_to_num(last)) + np.linalg.norm(expected)
    error = np.linalg.norm(found - expected)
    return bool(error <= _ROUNDING * np.linalg.norm(expected) + rounding * size)
