"""Compare a step of the workers with the same step in one process, on rank 0."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from pybackend.data.state_file import decode_state
from pybackend.engine.audit_rows import GlobalRows, unpack_rows
from pybackend.engine.exchange import GradientExchange
from pybackend.engine.one_process import (
    OneProcess,
    StepState,
    Values,
    disturb,
    find_unsynchronized,
)
from pybackend.engine.step_difference import Comparison, compare_changes, is_divided_rounding
from pybackend.engine.steps import has_keras_train_step
from pybackend.model.layers import find_layers, find_optimizers
from pybackend.words import setting, show

_DRAWS = 10
_MOST_NAMED = 3


class Judge:
    """Comparison of the steps in one training run.

    Parameters
    ----------
    is_sharded
        True if consecutive rows of a batch belong to consecutive ranks.
    """

    def __init__(
        self,
        model: Any,
        exchange: GradientExchange,
        state: StepState,
        process: OneProcess,
        is_sharded: bool,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._state = state
        self._process = process
        self._is_sharded = is_sharded

    def compare(
        self,
        before: Values,
        found: Values,
        changed: Sequence[Values],
        packed: Sequence[bytes],
        place: str,
    ) -> dict[str, Any]:
        """Return the verdict for all workers.

        Parameters
        ----------
        before, found
            Values of this worker's variables before and after the steps; the latter are completed
            here.
        changed
            Values that callbacks changed before each of the steps.
        packed
            By rank, the ``rows`` of each step, and the changes of ``metrics`` and ``statistics``.
        place
            Description of the steps for messages.

        Returns
        -------
        dict
            ``steps``, ``rows``, ``weights`` and ``metrics`` as in `Audit`, and ``error`` if there
            is a difference; or ``skipped``, the reason.
        """
        try:
            everyone = [decode_state(part) for part in packed]
            steps = [
                unpack_rows([one["rows"][n] for one in everyone], self._is_sharded)
                for n in range(len(changed))
            ]
            self._add_up(before, found, everyone, steps)
            return self._judge(before, found, changed, steps, place)
        except Exception as error:
            return {"skipped": f"the step fails outside of a graph ({describe_error(error)})"}

    def _judge(
        self,
        before: Values,
        found: Values,
        changed: Sequence[Values],
        steps: Sequence[GlobalRows],
        place: str,
    ) -> dict[str, Any]:
        precision = self._read_precision()
        compute = partial(self._compute, before, changed, steps)

        def move(which: Sequence[int]) -> Iterator[Values]:
            for draw in range(_DRAWS + 1):
                yield compute(precision if draw else 0.0, draw, which)

        compared = self._list_compared(before, found)
        metrics = set(self._state.list_metrics(self._exchange.shared_variables))
        expected = compute(0.0, 0, None)
        results = [
            compare_changes(
                {key: before[key] for key in keys},
                {key: found[key] for key in keys},
                expected,
                move,
                precision,
            )
            for keys in (
                [key for key in compared if key not in metrics],
                [key for key in compared if key in metrics],
            )
        ]
        if not all(result.is_repeatable for result in results):
            return {
                "skipped": "a step has a different result each time, because it draws its own "
                "random numbers"
            }
        if not self._has_learned(before, found) and not self._has_learned(before, expected):
            return {"has_learned": False}
        rows = int(sum(each.counts.sum() for each in steps))
        verdict = {
            "steps": len(steps),
            "rows": rows,
            "weights": results[0].largest,
            "metrics": results[1].largest,
        }
        if self._has_overflowed(before, found, expected):
            return {
                "skipped": "gradients in half precision overflowed, which is expected occasionally"
            }
        results[0] = self._leave_out_rounding(results[0], before, found, expected)
        if any(result.differing for result in results):
            return verdict | {"error": self._describe(results, place, rows)}
        return verdict

    def _add_up(
        self,
        before: Values,
        found: Values,
        everyone: Sequence[Mapping[str, Any]],
        steps: Sequence[GlobalRows],
    ) -> None:
        """Combine the workers' values of variables that each worker changes separately."""
        shared = self._exchange.shared_variables
        rows = np.sum([each.counts for each in steps], axis=0)
        for name, keys, weights in (
            ("metrics", self._state.list_metrics(shared), np.ones(len(everyone))),
            ("statistics", self._state.list_statistics(), rows / rows.sum()),
        ):
            for number, key in enumerate(keys):
                if key not in before:
                    continue
                changes = [
                    weight * one[name][number]
                    for one, weight in zip(everyone, weights, strict=True)
                    if number in one[name]
                ]
                if changes:
                    total = before[key] + np.sum(changes, axis=0)
                    is_whole = before[key].dtype.kind in "iu"
                    found[key] = (np.rint(total) if is_whole else total).astype(before[key].dtype)

    def _list_compared(self, before: Values, found: Values) -> list[int]:
        """Return the variables that should equal those of one process."""
        left_out = set(self._state.list_generators())
        left_out |= {id(v.value) for v in self._exchange.variables_of_others}
        for layer in find_unsynchronized(self._model):
            left_out |= {id(v.value) for v in layer.non_trainable_variables}
        if self._exchange.mean_loss is not None:  # it replaces Keras's own mean
            for metric in self._model.metrics:
                if metric.name == "loss":
                    left_out |= {id(v.value) for v in metric.variables}
        return [key for key in found if key in before and key not in left_out]

    def _compute(
        self,
        before: Values,
        changed: Sequence[Values],
        steps: Sequence[GlobalRows],
        noise: float,
        seed: int,
        which: Sequence[int] | None,
    ) -> Values:
        """Return the variables, all or some, after a step in one process with relative noise."""
        generator = np.random.default_rng(seed)
        self._state.write(before)
        if noise:
            trained = [id(v.value) for v in self._model.trainable_variables]
            moved = {key: before[key] for key in trained if key in before}
            self._state.write({k: disturb(v, noise, generator) for k, v in moved.items()})
        prepare = [partial(self._state.write, values) for values in changed]
        with self._exchange.paused():
            plain_step = self._exchange.plain_step
            self._process.take_all(plain_step, steps, prepare, noise, generator)
        return self._state.read(which)

    def _leave_out_rounding(
        self, result: Comparison, before: Values, found: Values, expected: Values
    ) -> Comparison:
        """Remove weights for which `is_divided_rounding` is true."""
        differing = {one.key for one in result.differing}
        weights = {id(v.value): v for v in self._model.trainable_variables}

        def is_left(key: int) -> bool:
            weight = weights.get(key)
            if weight is None:
                return True
            # Keras names an optimizer's variables after the path of their weight.
            start = f"{weight.path.replace('/', '_')}_"
            slots = [
                id(v.value)
                for v in self._model.optimizer.variables
                if v.shape == weight.shape and v.name.startswith(start)
            ]
            if any(other in differing or other not in found for other in slots):
                return True
            pairs = [(found[other], expected[other]) for other in slots]
            return not is_divided_rounding(before[key], found[key], expected[key], pairs)

        return replace(result, differing=[one for one in result.differing if is_left(one.key)])

    def _has_learned(self, before: Values, after: Values) -> bool:
        """Return whether a step changed a weight or an optimizer's state to finite numbers."""
        optimizers = find_optimizers(self._model)
        slots = [v for one in optimizers for v in one.variables if len(v.shape)]
        keys = [id(v.value) for v in [*self._model.trainable_variables, *slots]]
        return any(
            bool(np.any(np.isfinite(after[key]) & (after[key] != before[key])))
            for key in keys
            if key in before and key in after
        )

    def _has_overflowed(self, before: Values, found: Values, expected: Values) -> bool:
        """Return whether the loss scales differ, because one of the two skipped the step."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return False
        numbers = [id(v.value) for v in optimizer.variables if len(v.shape) == 0]
        known = [key for key in numbers if key in before]
        return any(not np.array_equal(found[key], expected[key]) for key in known)

    def _read_precision(self) -> float:
        """Return the relative rounding error of the least precise type in the model."""
        types = {str(layer.compute_dtype) for layer in find_layers(self._model)}
        if any("bfloat16" in name for name in types):
            return 2.0**-8
        if any("float16" in name for name in types):
            return 2.0**-11
        return 2.0**-53 if types and types <= {"float64"} else 2.0**-22

    def _describe(self, results: Sequence[Comparison], place: str, rows: int) -> str:
        names = self._state.name_variables()
        differing = [one for result in results for one in result.differing]
        listed = [
            f"{show(names.get(one.key, 'a variable'))} by {one.size:.2g} of its change"
            for one in differing[:_MOST_NAMED]
        ]
        if len(differing) > _MOST_NAMED:
            listed.append(f"{len(differing) - _MOST_NAMED} more")
        return (
            f"{place} was repeated in one process on the same {rows} rows, and the result differs: "
            f"{', '.join(listed)}. {self._advise(results)}"
        )

    def _advise(self, results: Sequence[Comparison]) -> str:
        differing = {one.key for one in results[0].differing}
        if differing and differing <= set(self._state.list_statistics()):
            return (
                "The weights are equal, but a variable that is not trained changes by something "
                "other than a mean over the rows, e.g. by their sum or maximum: update it with a "
                "mean, or from values that are the same on all workers, such as weights"
            )
        losses = [v for m in self._model.metrics if m.name == "loss" for v in m.variables]
        others = {one.key for one in results[1].differing}
        if not differing and not others & {id(v.value) for v in losses}:
            return (
                "The weights are equal, but a metric is neither a sum nor a mean over rows: "
                "write it as a `keras.metrics.Metric` whose variables are sums"
            )
        looks_up = any(isinstance(one, keras.layers.Embedding) for one in find_layers(self._model))
        if self._model.run_eagerly and looks_up:
            return (
                f"With {setting(run_eagerly=True)} the workers cannot know that an embedding is "
                "looked up by positions, not by rows: omit run_eagerly, or check whether the "
                "error remains"
            )
        if not has_keras_train_step(self._model):
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


def describe_error(error: Exception) -> str:
    """Return the text of an error, without the lines that TensorFlow and Keras add."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].startswith("Exception encountered") and len(lines) > 1:  # a layer's, of Keras
        said = lines[1]
    else:  # the traceback of a function that was traced comes first
        said = lines[-1] if lines[0].startswith("in user code") else lines[0]
    return f"{type(error).__name__}: {said}"
