"""Check the step that trained: what it computed, exchanged and applied on each worker.

What the judge compares may be another step: with constants instead of random numbers, in another
type, or without compression. And an error of the judge may only tell that the step's Python code
has changed since it was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.collective import Collective, all_sum, is_true_anywhere
from pybackend.core.data.arrays import nest
from pybackend.core.engine.audit.audited_steps import OWN_FAULT, Values, Window, describe_error
from pybackend.core.engine.audit.one_process import OneProcess, StepState, WatchedGradients
from pybackend.core.engine.audit.stand_ins import Noise
from pybackend.core.engine.audit.step_difference import (
    PIECE,
    cut_pieces,
    find_tolerance,
    is_another,
)
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.exchange.transports import Exchanged
from pybackend.core.engine.row_batches import Batches
from pybackend.core.engine.step_changes import override

Array = npt.NDArray[Any]
_ABOUT_TRACED = (
    "the traced step computes other gradients than its Python code does now: Python values that it "
    "reads have changed since it was traced, or the traced step is wrong"
)
_ABOUT_DRAWS = (
    "; a layer may draw other random numbers outside of a graph, as recurrent layers with dropout "
    "do"
)
_ABOUT_HALF = "; in half precision, rounding alone may do that"
_ABOUT_FAILED = "a worker cannot repeat the step that trained: it fails outside of a graph"
_ABOUT_REPEATED = "it has to be repeated, but fails outside of a graph ({})"
_ABOUT_SUM = "the mean of the workers' gradients is not what was exchanged"
_ABOUT_UPDATE = "the optimizer has not made of the gradients what it makes of them again"
# Relative errors of the exchange's sums: of half precision, and of float32.
_OF_COMPRESSED, _OF_SUMS = 2.0**-6, 2.0**-17
# How much gradients of a step may differ from those of its repetition.
_AGAIN, _AGAIN_IN_HALF = 1e-3, 0.05


@dataclass(frozen=True)
class TracedStep:
    """Repetition of this worker's steps, with its own rows."""

    collective: Collective
    batches: Batches
    exchange: GradientExchange
    process: OneProcess
    noise: Noise

    @property
    def state(self) -> StepState:
        return self.process.state

    def is_anywhere(self, is_so: bool) -> bool:
        return is_true_anywhere(self.collective, is_so)

    @property
    def draws_others(self) -> bool:
        """True if a repeated step draws other random numbers than the step that trained.

        XLA has its own generator, and a global one is not restored.
        """
        noise = self.noise
        is_unknown = noise.is_unseeded or not noise.states <= set(self.state.variables)
        return noise.is_drawn and (is_unknown or self.exchange.is_split)

    @property
    def has_parts(self) -> bool:
        """True if each rank can repeat the update of its own part of the weights.

        Not if the optimizer clips by the norm of all gradients, which a rank does not have.
        """
        optimizer = self.state.view.model.optimizer
        return self.exchange.shards is not None and not optimizer.global_clipnorm

    def compare(self, window: Window, after: Values, where: str, is_rough: bool) -> dict[str, Any]:
        """Compare the step that trained with its repetition, with the same random numbers.

        Returns a verdict as that of `Judge`, the same on all workers. ``is_rough`` is true if the
        step computes in half precision, or on a GPU.
        """
        if not self.exchange.adds_up:
            rounding = _OF_COMPRESSED if self.exchange.is_compressed else _OF_SUMS
            wrong = check_sums(window.exchanged, self.collective, rounding)
            if self.is_anywhere(bool(wrong)):
                return {"error": f"in {where}, {_ABOUT_SUM}. {OWN_FAULT}"}
        has_rows = all(all(self.batches.rows_at(step)) for step in window.steps)
        if self.is_anywhere(self.draws_others) or not has_rows:  # without rows, a step exchanges
            return {}
        failed = ""
        try:
            # In the layers' types, as the step that trained.
            with override(self.process, "type", None):
                found = self._repeat_alone(window, after, _AGAIN_IN_HALF if is_rough else _AGAIN)
        except Exception as error:  # e.g. an operation without a kernel for half precision
            found, failed = "failed", describe_error(error)
        finally:
            self.state.write(after)
        kinds = ("failed", "gradients", "update")
        has_failed, is_other, is_wrong = all_sum(self.collective, [kind == found for kind in kinds])
        if has_failed:
            return {"skipped": f"{_ABOUT_FAILED} ({failed or 'on another worker'})"}
        if is_other:
            why = _ABOUT_DRAWS * self.noise.is_drawn + _ABOUT_HALF * is_rough
            return {"skipped": _ABOUT_TRACED + why}
        return {"error": f"in {where}, {_ABOUT_UPDATE}. {OWN_FAULT}"} if is_wrong else {}

    def confirm(
        self, window: Window, after: Values, verdict: dict[str, Any], is_rough: bool
    ) -> dict[str, Any]:
        """Withdraw an error if a worker's own gradients are no longer those that were traced.

        Its gradients before the exchange: what the exchange makes of them is compared.
        """
        _, again, failed = self.repeat(window)
        self.state.write(after)
        own, now = ([part for each in x for part in each.own] for x in (window.exchanged, again))
        is_other = self.is_anywhere(failed is None and is_another(own, now))
        return {"skipped": _ABOUT_TRACED + _ABOUT_HALF * is_rough} if is_other else verdict

    def repeat(self, window: Window) -> tuple[Values, list[Exchanged], str | None]:
        """Let all workers repeat the steps, and exchange.

        Returns the variables after them, their exchanges, and why they failed, if they did.
        """
        self.exchange.copy_exchanges()
        reason = None
        try:
            with self.exchange.repeating(len(window.steps)):
                self._take(window)
        except Exception as error:  # operations that need a graph fail on all workers
            reason = _ABOUT_REPEATED.format(describe_error(error))
        if self.is_anywhere(reason is not None):
            reason = reason or "it has to be repeated, but fails on another worker"
        return self.state.read(), self.exchange.take_exchanges(), reason

    def _repeat_alone(self, window: Window, after: Values, tolerance: float) -> str | None:
        """Return what differs if this worker repeats the step and applies the same means."""
        exchange, model, steps = self.exchange, self.state.view.model, len(window.steps)
        watch = WatchedGradients(self.state.view, exchange, window.exchanged, steps, is_own=True)
        with exchange.repeating(steps), exchange.paused(), watch.install():
            self._take(window)
        found, again = ([pair[n] for pair in watch.pairs.values()] for n in (0, 1))
        if is_another(found, again, tolerance):
            return "gradients"
        now = self.state.read([id(v.value) for v in model.trainable_variables])
        left_out = {id(v.value) for v in exchange.variables_of_others}
        keys = [key for key in now if key in window.before and key not in left_out]
        moved, again = (
            [values[key].astype(np.float64) - window.before[key] for key in keys]
            for values in (after, now)
        )
        return "update" if is_another(moved, again, tolerance) else None

    def _take(self, window: Window) -> None:
        self.state.write(window.before)
        for step, changed in window.changed.items():
            self.state.write(changed)
            batch = nest(self.batches.read_step(step)[0])
            self.process.take(self.state.view.model.train_step, batch)


_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], PIECE)


def check_sums(
    exchanged: Sequence[Exchanged], collective: Collective, tolerance: float
) -> list[int]:
    """Return the positions of gradients whose mean is not that of all workers, on all workers.

    Each worker adds up its gradients with random signs; the sum over the workers must equal that of
    the mean. An error of any kind changes it by about the error's norm (a random projection, as in
    Johnson and Lindenstrauss, 1984). So a few bytes are enough, and no step. ``tolerance`` is the
    relative rounding error of the exchange; of sparse gradients at least that of their type.
    """
    found: list[int] = []
    for one in exchanged:
        share = one.weight / one.total if one.total else 0.0
        slices = one.means[len(one.needed) :]
        count = len(one.own) - len(slices)
        own = [*map(_project, one.own[:count]), *_project_slices(one.own[count:])]
        means = [*map(_project, one.means[: len(one.needed)]), *_project_slices(slices)]
        positions = [*one.needed, *range(count, len(own))]
        terms = [share * value for value, _ in own] + [share * norm for _, norm in own]
        sums = all_sum(collective, terms)
        # Indices and values of sparse gradients alternate.
        sparse = [max(tolerance, find_tolerance(values)) for values in one.own[count + 1 :: 2]]
        limits = [tolerance] * count + sparse
        for n, (mean, _) in zip(positions, means, strict=True):
            expected, norm = sums[n], sums[len(own) + n]
            # Gradients that overflow in half precision are infinite on all workers.
            is_finite = np.isfinite(expected) and np.isfinite(norm)
            is_equal = abs(mean - expected) <= limits[n] * norm
            if not (is_equal if is_finite else not np.isfinite(mean)):
                found.append(n)
    return found


def _project_slices(slices: Sequence[Array]) -> list[tuple[float, float]]:
    """Return the projections of sparse gradients, in which a row's sign depends on its index.

    So the rows of all workers, in any order, have the sum of the workers' projections.
    """
    found = []
    for indices, values in zip(slices[::2], slices[1::2], strict=True):
        signs = _SIGNS[indices.astype(np.int64) % len(_SIGNS)].reshape(-1, 1)
        rows = values.reshape(len(indices), -1).astype(np.float64)
        summed = np.sum(rows * signs, axis=0)
        found.append((_project(summed)[0], float(np.linalg.norm(rows))))
    return found


def _project(values: Array) -> tuple[float, float]:
    """Return the sum of some numbers with random signs, and their norm."""
    total, square = 0.0, 0.0
    for (part,) in cut_pieces(values):
        total += float(part @ _SIGNS[: len(part)])
        square += float(part @ part)
    return total, float(np.sqrt(square))
