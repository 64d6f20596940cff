"""The training step in three parts, for XLA: gradients, exchange, update.

XLA cannot compile a call to the host, so the exchange runs between two compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from pybackend.core.engine.overrides import override
from pybackend.core.engine.pipeline_feed import count_rows
from pybackend.core.engine.steps import StepOrSkip, normalize_spectra


class StepExchange(Protocol):
    """Exchange between the two compiled parts, such as a `GradientExchange`."""

    def begin_step(self, rows: Any) -> Any: ...
    def weigh_means(self, share: Any) -> AbstractContextManager[None]: ...
    def make_zeros(self) -> list[Any]: ...
    def weigh_step(self, rows: Any) -> tuple[Any, Any]: ...
    def average(self, gradients: list[Any], weight: Any, loss: Any) -> list[Any]: ...


class SplitStep:
    """Replacement for the ``train_step`` of a model compiled with ``jit_compile=True``.

    Only for Keras's own train_step, which ends with ``optimizer.apply``: any operations after that
    call would run before it here.
    """

    def __init__(
        self,
        model: Any,
        train_step: Callable[[Any], Any],
        apply: Callable[..., Any],
        exchange: StepExchange,
    ) -> None:
        self._model = model
        self._train_step = train_step
        self._apply = apply
        self._exchange = exchange
        self._compute = tf.function(
            self._compute_gradients, jit_compile=True, reduce_retracing=True
        )
        self._update = tf.function(self._apply_means, jit_compile=True)
        self._present: list[bool] = []
        self._step = StepOrSkip(model, self._take_step, self._skip_step)

    def __call__(self, data: Any) -> Any:
        """Take the step; return its logs."""
        return self._step(data)

    def _take_step(self, data: Any) -> Any:
        share = self._exchange.begin_step(count_rows(data))
        gradients, weight, loss, logs = self._compute(data, share)
        self._finish(gradients, weight, loss)
        return logs

    def _skip_step(self) -> None:
        normalize_spectra(self._model)
        gradients = [g for g in self._exchange.make_zeros() if g is not None]
        self._exchange.begin_step(tf.constant(0))
        self._finish(gradients, 0.0, 0.0)

    def _finish(self, gradients: list[Any], weight: Any, loss: Any) -> None:
        remaining = iter(gradients)
        listed = [next(remaining) if present else None for present in self._present]
        means = self._exchange.average(listed, weight, loss)
        self._update([mean for mean in means if mean is not None])

    def _compute_gradients(self, data: Any, share: Any) -> Any:
        """Return the gradients that train_step would apply, and its logs."""
        caught: list[Any] = []

        def catch(gradients: Any, trainable_variables: Any = None) -> None:
            caught.extend(gradients)

        with (
            override(self._model.optimizer, "apply", catch),
            self._exchange.weigh_means(share),
        ):
            logs = self._train_step(data)
        self._present = [gradient is not None for gradient in caught]
        weight, loss = self._exchange.weigh_step(count_rows(data))
        return [gradient for gradient in caught if gradient is not None], weight, loss, logs

    def _apply_means(self, means: list[Any]) -> None:
        variables = self._model.trainable_variables
        chosen = [v for v, present in zip(variables, self._present, strict=True) if present]
        self._apply(means, chosen)
