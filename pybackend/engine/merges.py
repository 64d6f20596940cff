"""Check what workers merge at the end of an epoch: metrics, and statistics of normalization.

Both are merged by the functions that an epoch ends with, after its first step, and once more here:
from the values of each worker, by rank 0 alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pybackend.collective import broadcast_bytes
from pybackend.data.state_file import decode_state, encode_state
from pybackend.engine.exchange import GradientExchange
from pybackend.engine.metrics import to_plain
from pybackend.engine.one_process import StepState, Values
from pybackend.engine.replica import Replica
from pybackend.engine.sync import EpochSync
from pybackend.engine.verdict import ABOUT_OWN_FAULT
from pybackend.words import show

# Relative rounding errors of the sums, and the size below which a value is zero.
_ROUNDING, _ZERO = 1e-4, 1e-6


class Merges:
    """Comparison of merged values in one training run."""

    def __init__(
        self, replica: Replica, exchange: GradientExchange, state: StepState, sync: EpochSync
    ) -> None:
        self._model = replica.model
        self._collective = replica.collective
        self._feed = replica.feed
        self._exchange = exchange
        self._state = state
        self._sync = sync

    def compare(
        self, after: Values, steps: Sequence[int], logs: Mapping[str, Any] | None, place: str
    ) -> dict[str, Any]:
        """Merge the values after an epoch's first steps; return a verdict as that of `Judge`.

        Parameters
        ----------
        after
            Values of the variables, which are others at the end.
        logs
            What the steps logged.
        """
        metrics = self._state.list_metrics(self._exchange.shared_variables)
        statistics = self._sync.list_statistics()
        logged = dict(logs or {})
        results = self._model.get_metrics_result()
        own = encode_state(
            {
                "rows": self._feed.count_rows(),
                # A train_step of a model's own may log other values by the name of a metric.
                "others": [
                    name
                    for name, value in logged.items()
                    if name in results
                    and not np.allclose(value, results[name], _ROUNDING, _ZERO, equal_nan=True)
                ],
                "metrics": [after[key] for key in metrics],
                "changes": [_change(variable, last) for variable, last in statistics],
            }
        )
        received = self._collective.gather(np.frombuffer(own, np.uint8).copy())
        merged = self._sync.merge_logs(logged, steps[-1])
        self._sync.agree_on_statistics()
        wrong: list[str] = []
        if self._collective.rank == 0:
            ranks = [decode_state(part.tobytes()) for part in received]
            rows = [one["rows"] for one in ranks]
            names = self._state.name_variables()
            for n, (variable, last) in enumerate(statistics):
                mean = np.average([one["changes"][n] for one in ranks], axis=0, weights=rows)
                if not _is_near(_change(variable, last), mean, last):
                    wrong.append(str(variable.path))
            for n, key in enumerate(metrics):
                total = np.sum([one["metrics"][n].astype(np.float64) for one in ranks], axis=0)
                if not _is_near(self._state.variables[key].numpy(), total, after[key]):
                    wrong.append(names.get(key, "a metric"))
            others = {name for one in ranks for name in one["others"]}
            # Results are compared with those of the merged variables: they may magnify rounding.
            wrong += [
                name
                for name, value in self._model.get_metrics_result().items()
                if name in merged
                and name not in others
                and not np.allclose(merged[name], to_plain(value), _ROUNDING, _ZERO, equal_nan=True)
            ]
        wrong = json.loads(broadcast_bytes(self._collective, json.dumps(wrong).encode()))
        if not wrong:
            return {}
        listed = ", ".join(map(show, wrong))
        error = f"in {place}, the workers' values of {listed} were merged wrongly"
        return {"error": f"{error}. {ABOUT_OWN_FAULT}"}


def _change(variable: Any, last: Any) -> Any:
    return variable.numpy().astype(np.float64) - last


def _is_near(found: Any, expected: Any, last: Any) -> bool:
    """Return whether numbers are equal up to rounding, in the type of ``last``."""
    if last.dtype.kind in "iub":
        return bool(np.array_equal(found, expected))
    # Half precision has 8 bits or more.
    rounding = _ZERO if last.dtype.itemsize >= 4 else 2.0**-6
    is_finite = np.isfinite(expected)
    if not np.array_equal(is_finite, np.isfinite(found)):
        return False
    found, expected, last = (
        np.asarray(one, np.float64)[is_finite] for one in (found, expected, last)
    )
    size = np.linalg.norm(np.nan_to_num(last)) + np.linalg.norm(expected)
    error = np.linalg.norm(found - expected)
    return bool(error <= _ROUNDING * np.linalg.norm(expected) + rounding * size)
