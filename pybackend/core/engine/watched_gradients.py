"""Gradients that a step gives its optimizers, and others that they apply instead.

`check_sums` needs no step: it tells from numbers of a few bytes whether a mean is that of all
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.exchange.transports import Exchanged
from pybackend.core.engine.step_changes import override_each
from pybackend.core.engine.step_difference import find_tolerance
from pybackend.core.model.view import ModelView

Array = npt.NDArray[Any]


class WatchedGradients:
    """Compares the gradients of steps with those that were exchanged, which the optimizers apply.

    Parameters
    ----------
    exchanged
        The exchanges of these steps; nothing: the optimizers apply the gradients of the steps.
    steps
        Number of steps.
    is_own
        True if the steps have this worker's rows: then its own gradients are compared.

    Attributes
    ----------
    pairs
        What was exchanged and what the steps computed, by the step, the number of the exchange in
        the step, and the variable's path. Gradients that are exchanged as one sum are summed.
    """

    def __init__(
        self,
        view: ModelView,
        exchange: GradientExchange,
        exchanged: Sequence[Exchanged],
        steps: int,
        is_own: bool = False,
    ) -> None:
        self._is_own = is_own
        self._view = view
        self._exchange = exchange
        self._remaining = iter(exchanged)
        self._each = max(1, len(exchanged) // steps)
        self._count = 0
        self.pairs: dict[Any, tuple[Array, Array]] = {}

    def install(self) -> AbstractContextManager[None]:
        """Watch all optimizers within this context."""
        return override_each(self._view.optimizers, "apply", self._watch)

    def _watch(self, optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        def watched(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            gradients = list(grads)
            given = trainable_variables
            variables = list(self._view.model.trainable_variables if given is None else given)
            exchanges = any(gradient is not None for gradient in gradients)
            if exchanges and (one := next(self._remaining, None)) is not None:
                gradients = self._replace(one, gradients, variables)
            return apply(gradients, trainable_variables)

        return watched

    def _replace(self, one: Exchanged, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        step, number = divmod(self._count, self._each)
        self._count += 1
        place = self._exchange.place_means
        is_whole = len(one.means) == len(one.own)
        means = place(one.means, gradients, variables, is_whole)
        compared = place(one.own, gradients, variables, True) if self._is_own else means
        for variable, value, gradient in zip(variables, compared, gradients, strict=True):
            if value is None:  # another worker has it, or there is none
                continue
            key = (0 if self._exchange.adds_up else step, number, str(variable.path))
            own = self._exchange.undo_share(gradient) if self._is_own else gradient
            pair = _as_arrays(value, own)
            before = self.pairs.get(key)
            self.pairs[key] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])
        return [
            gradient if mean is None else mean
            for mean, gradient in zip(means, gradients, strict=True)
        ]


_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], 1 << 16)


def check_sums(
    exchanged: Sequence[Exchanged], collective: Collective, tolerance: float
) -> list[int]:
    """Return the positions of gradients whose mean is not that of all workers, on all workers.

    Each worker adds up its gradients with random signs; the sum over the workers must equal that of
    the mean. An error of any kind changes it by about the error's norm (a random projection, as in
    Johnson and Lindenstrauss, 1984).

    Parameters
    ----------
    tolerance
        Relative rounding error of the exchange; of sparse gradients at least that of their type.
    """
    found: list[int] = []
    for one in exchanged:
        share = one.weight / one.total if one.total else 0.0
        slices = one.means[len(one.needed) :]
        count = len(one.own) - len(slices)
        own = [*map(_project, one.own[:count]), *_project_slices(one.own[count:])]
        means = [*map(_project, one.means[: len(one.needed)]), *_project_slices(slices)]
        places = [*one.needed, *range(count, len(own))]
        terms = [share * value for value, _ in own] + [share * norm for _, norm in own]
        sums = all_sum(collective, terms)
        # Indices and values of sparse gradients alternate.
        sparse = [max(tolerance, find_tolerance(values)) for values in one.own[count + 1 :: 2]]
        limits = [tolerance] * count + sparse
        for n, (mean, _) in zip(places, means, strict=True):
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
    flat, total, square = values.reshape(-1), 0.0, 0.0
    for first in range(0, len(flat), len(_SIGNS)):
        part = flat[first : first + len(_SIGNS)].astype(np.float64)
        total += float(part @ _SIGNS[: len(part)])
        square += float(part @ part)
    return total, float(np.sqrt(square))


def _as_arrays(mean: Any, gradient: Any) -> tuple[Array, Array]:
    """Return two gradients as arrays; of sparse ones, the rows that either of them has."""
    if not isinstance(mean, tf.IndexedSlices):
        return mean.numpy(), tf.convert_to_tensor(gradient).numpy()
    pair = [(np.array(one.indices), np.array(one.values)) for one in (mean, gradient)]
    rows = np.unique(np.concatenate([indices for indices, _ in pair]))
    arrays = []
    for indices, values in pair:
        summed = np.zeros((len(rows), *values.shape[1:]), values.dtype)
        np.add.at(summed, np.searchsorted(rows, indices), values)
        arrays.append(summed)
    return arrays[0], arrays[1]
