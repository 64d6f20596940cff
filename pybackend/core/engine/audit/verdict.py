"""Compare a step of the workers with the same step in one process, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import keras
import numpy as np

from pybackend.core.engine.audit import step_difference as difference
from pybackend.core.engine.audit.audited_rows import GlobalRows, unpack_rows
from pybackend.core.engine.audit.audited_steps import OWN_FAULT, Values, Window, describe_error
from pybackend.core.engine.audit.one_process import OneProcess, WatchedGradients
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.step_changes import override
from pybackend.core.model.view import has_own
from pybackend.core.words import setting, show, term

_MOST_NAMED = 3
_ABOUT_OWN_NUMBERS = (
    "a step has a different result each time, because it draws its own random numbers"
)
_ABOUT_OVERFLOW = "gradients in half precision overflowed, which is expected occasionally"


class Judge:
    """Comparison of a step, or of steps compared as one, on rank 0.

    What the optimizer gets is compared, not what it makes of it: Adam divides a gradient that
    consists of rounding errors by its own size. So the single process computes its gradients, but
    applies those of the workers. Then its weights must equal theirs, whatever the optimizer is.

    ``found`` are the values of this worker's variables after the steps. ``everyone`` has what each
    rank packed: the ``rows`` of each step, and the changes of ``metrics`` and ``statistics``.
    ``is_sharded`` is as in `unpack_rows`.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        process: OneProcess,
        window: Window,
        found: Values,
        everyone: Sequence[Mapping[str, Any]],
        is_sharded: bool,
    ) -> None:
        self._exchange, self._state, self._process = exchange, process.state, process
        self._view, self._model = self._state.view, self._state.view.model
        self._before, self._changed = window.before, list(window.changed.values())
        self._found = dict(found)
        steps = zip(*(one["rows"] for one in everyone), strict=True)
        self._steps = [unpack_rows(step, is_sharded) for step in steps]
        self._add_up(everyone)
        self._exchanged = window.exchanged
        if exchange.shards is not None:
            parts = zip(*(one["parts"] for one in everyone), strict=True)
            self._exchanged = [
                one.with_parts([(part["needed"], part["means"]) for part in each])
                for one, each in zip(window.exchanged, parts, strict=True)
            ]

    def judge(self, where: str) -> dict[str, Any]:
        """Return the verdict for all workers; ``where`` names the steps in messages.

        It has ``steps``, ``rows``, ``weights``, ``metrics`` and ``zeros`` as in `Audit`, and
        ``error`` if there is a difference; or ``skipped``, the reason; or a false ``has_learned``,
        if nothing was trained.
        """
        before, found = self._before, self._found
        try:
            expected, gradients = self._compute(self._steps)
        except Exception as error:
            return {"skipped": f"the step fails outside of a graph ({describe_error(error)})"}
        metrics = set(self._state.list_metrics(self._exchange.shared_variables))
        trained = self._find_trained() if self._exchanged else set()
        measured = {name: difference.measure_gradient(*pair) for name, pair in gradients.items()}
        kinds: list[dict[Any, difference.Measure]] = [measured, {}]
        for key in self._list_compared():
            values = before[key], found[key], expected[key]
            kinds[key in metrics][key] = difference.measure_variable(*values, key in trained)
        results = [difference.compare(kind, cache(self._compute_again)) for kind in kinds]
        if not all(result.is_repeatable for result in results):
            return {"skipped": _ABOUT_OWN_NUMBERS}
        if not self._has_learned(found) and not self._has_learned(expected):
            return {"has_learned": False}
        rows = int(sum(each.counts.sum() for each in self._steps))
        verdict = {"steps": len(self._steps), "rows": rows, "zeros": results[0].zeros}
        verdict |= {"weights": results[0].largest, "metrics": results[1].largest}
        if self._has_overflowed(expected):
            return {"skipped": _ABOUT_OVERFLOW}
        if any(result.differing for result in results):
            return verdict | {"error": self._describe(results, where, rows)}
        if undecided := [one for result in results for one in result.undecided]:
            return {"skipped": f"it is ill-conditioned, or overflows: {self._list(undecided)}"}
        return verdict

    def _compute_again(self, how: str) -> Values | None:
        """Return variables and gradients of the one process, as `compare` asks for them."""
        steps = [one.reordered() for one in self._steps] if how == "order" else self._steps
        kind = "float64" if how == "float64" else self._process.type
        try:
            with override(self._process, "type", kind):
                values, pairs = self._compute(steps)
        except Exception:
            if how != "float64":
                raise
            return None  # e.g. a layer with constants in float32
        return {**values, **{key: pair[1] for key, pair in pairs.items()}}

    def _find_trained(self) -> set[int]:
        model, view = self._model, self._view
        return {id(v.value) for v in [*model.trainable_variables, *view.optimizer_variables]}

    def _add_up(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Combine the workers' values of variables that each worker changes separately."""
        before, found = self._before, self._found
        shared = self._exchange.shared_variables  # the same on all workers: not added up
        rows = np.sum([each.counts for each in self._steps], axis=0)
        for name, keys, weights in (
            ("metrics", self._state.list_metrics(shared), np.ones(len(everyone))),
            ("statistics", self._state.list_statistics(), rows / rows.sum()),
        ):
            for number, key in enumerate(keys):
                changes = [
                    weight * one[name][number]
                    for one, weight in zip(everyone, weights, strict=True)
                    if number in one[name]
                ]
                if key in before and changes:
                    total = before[key] + np.sum(changes, axis=0)
                    is_whole = before[key].dtype.kind in "iu"
                    found[key] = (np.rint(total) if is_whole else total).astype(before[key].dtype)

    def _list_compared(self) -> list[int]:
        """Return the variables that should equal those of one process."""
        others = [*self._exchange.variables_of_others]
        for layer in self._view.unsynchronized:
            others += layer.non_trainable_variables
        if self._exchange.mean_loss is not None:  # it replaces Keras's own mean
            others += self._list_losses()
        left_out = {*self._state.list_generators(), *(id(v.value) for v in others)}
        return [key for key in self._found if key in self._before and key not in left_out]

    def _list_losses(self) -> list[Any]:
        return [v for one in self._model.metrics if one.name == "loss" for v in one.variables]

    def _compute(self, steps: Sequence[GlobalRows]) -> tuple[Values, dict[Any, tuple[Any, Any]]]:
        """Take steps in one process, which applies the workers' gradients.

        Returns all variables, and the workers' gradients with those of the one process.
        """
        self._state.write(self._before)
        prepare = [partial(self._state.write, values) for values in self._changed]
        watch = WatchedGradients(self._view, self._exchange, self._exchanged, len(steps))
        with self._exchange.paused(), watch.install():
            self._process.take_all(self._exchange.plain_step, steps, prepare)
        return self._state.read(), watch.pairs

    def _has_learned(self, after: Values) -> bool:
        """Return whether a step changed a weight or an optimizer's state to finite numbers."""
        before = self._before
        slots = [v for v in self._view.optimizer_variables if len(v.shape)]
        keys = [id(v.value) for v in [*self._model.trainable_variables, *slots]]
        known = [key for key in keys if key in before and key in after]
        return any(np.any(np.isfinite(after[k]) & (after[k] != before[k])) for k in known)

    def _has_overflowed(self, expected: Values) -> bool:
        """Return whether the loss scales differ, because one of the two skipped the step."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return False
        keys = {id(v.value) for v in optimizer.variables if v.name == "dynamic_scale"}
        known = keys & self._before.keys()
        return any(not np.array_equal(self._found[key], expected[key]) for key in known)

    def _describe(self, results: Sequence[difference.Comparison], where: str, rows: int) -> str:
        advice = OWN_FAULT if self._is_own_fault() else self._advise(results)
        return (
            f"{where} was repeated in one process on the same {rows} rows, and the result differs: "
            f"{self._list([one for result in results for one in result.differing])}. {advice}"
        )

    def _list(self, sizes: Sequence[tuple[Any, float]]) -> str:
        names = self._state.name_variables()
        listed = [
            f"{show(names.get(key, 'a variable'))} by {size:.2g} of its change"
            if isinstance(key, int)
            else f"the gradient of {show(key[-1])} by {size:.2g}"
            for key, size in sizes[:_MOST_NAMED]
        ]
        if len(sizes) > _MOST_NAMED:
            listed.append(f"{len(sizes) - _MOST_NAMED} more")
        return ", ".join(listed)

    def _is_own_fault(self) -> bool:
        """Return whether the mean of the workers' gradients, computed here, is another one.

        Only for losses whose mean is weighted by rows, in a single step with one exchange.
        """
        if len(self._steps) > 1 or len(self._exchanged) != 1 or not self._exchange.weighs_rows:
            return False
        (rows,) = self._steps
        sums: dict[Any, Any] = {}
        found: dict[Any, Any] = {}  # the same for each rank
        for rank, count in enumerate(rows.counts):
            if count:
                _, pairs = self._compute([rows.of_rank(rank)])
                for key, (mean, own) in pairs.items():
                    share = own.astype(np.float64) * count / rows.counts.sum()
                    found[key], sums[key] = mean, sums.get(key, 0.0) + share
        keys = [key for key in found if found[key].shape == np.shape(sums[key])]
        return difference.is_another([found[key] for key in keys], [sums[key] for key in keys])

    def _advise(self, results: Sequence[difference.Comparison]) -> str:
        differing = {key for key, _ in results[0].differing}
        if differing and differing <= set(self._state.list_statistics()):
            return (
                "The weights are equal, but a variable that is not trained changes by something "
                "other than a mean over the rows, e.g. by their sum or maximum: update it with a "
                "mean, or from values that are the same on all workers, such as weights"
            )
        others = {key for key, _ in results[1].differing}
        if not differing and not others & {id(v.value) for v in self._list_losses()}:
            return (
                "The weights are equal, but a metric is neither a sum nor a mean over rows: "
                f"write it as a `{term('keras.metrics.Metric')}` whose variables are sums"
            )
        looks_up = any(isinstance(one, keras.layers.Embedding) for one in self._view.layers)
        if self._model.run_eagerly and looks_up:
            return (
                f"With {setting(run_eagerly=True)} the workers cannot know that an embedding is "
                "looked up by positions, not by rows: omit run_eagerly, or check whether the "
                "error remains"
            )
        if has_own(self._model, "train_step"):
            return (
                "The model's own train_step, a loss or a layer combines the rows of a batch. If a "
                "loss has a value for each row, take the mean (a tape sums the values). If a loss "
                "compares rows with each other, compute it with `self.compute_loss()`, and set "
                f"{setting(loss_over='global batch')} in `exchange`. Clip gradients with the "
                "optimizer's `clipnorm`"
            )
        if self._exchange.over.loss:
            return (
                "A layer or `add_loss` combines the rows of a batch: return the values that the "
                "loss needs as an output of the model, and use them in a loss of compile(). "
                "Update metrics in `compute_metrics()` or `train_step()`, not in `compute_loss()`"
            )
        return (
            "The loss or a layer combines the rows of a batch: set "
            f"{setting(loss_over='global batch')} in `exchange`, so that the loss gets the rows of "
            "all workers. The argument of `add_loss` must be a mean over rows, and a layer must "
            "compute each row separately"
        )
