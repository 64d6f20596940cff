"""Tries on some rows whether workers can compute a loss of the global batch together.

Workers are simulated: each part of the rows is given the outputs of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from pybackend.engine.calls import StepCalls
from pybackend.engine.global_batch import GlobalBatch, OverBatch
from pybackend.engine.loss_trial import (
    FEW_PARTS,
    compute_step_gradients,
    count_rows,
    find_difference,
    hold_statistics,
    take_part,
)
from pybackend.engine.overrides import override
from pybackend.engine.traced_loops import trace_loops
from pybackend.errors import InputError
from pybackend.model.behavior import keep_state

_WAYS_OUT_OF_BATCHES = (
    "the rows of all workers come together in `compute_loss` and the losses of `compile` only, but "
    "a layer, `add_loss` or the model's own `train_step` makes something of the rows of a batch, "
    "too. Return what the loss needs as an output of the model, and call `self.compute_loss()` in "
    "a train_step"
)


def check_global_loss(model: Any, rows: Any) -> None:
    """Reject a model whose loss over the global batch would not have the gradients of one process.

    Raises
    ------
    InputError
        Says what workers cannot compute together.
    """
    count = count_rows(rows)
    others = _SimulatedRows(model, rows)
    with keep_state(model), hold_statistics(model), trace_loops(model), others.install():
        try:
            found = find_difference(
                others.compute_gradients, count, model, shares=FEW_PARTS, prepare=others.begin
            )
        except Exception:  # what it cannot do here shows in the training
            return
    # Of all workers' rows it may well be a number.
    if found.differs and np.isfinite(found.whole).all():
        raise InputError(
            f"the loss or the gradients of {count} rows are not those of parts of them together: "
            f"{_WAYS_OUT_OF_BATCHES}"
        )


class _SimulatedRows:
    """Parts of the rows as workers, each of which is given the outputs of the others."""

    def __init__(self, model: Any, rows: Any) -> None:
        self._model = model
        self._rows = rows
        self._calls = StepCalls()
        self._batch = GlobalBatch(model, self, self._calls, OverBatch(loss=True))
        self._part = slice(0, 0)
        self._is_recording = False
        # By part, for each time that a step asks for rows.
        self._recorded: dict[int, list[Sequence[Any]]] = {}
        self._asked = 0

    def install(self) -> AbstractContextManager[None]:
        """Watch the model while the context lasts."""
        return self._batch.install()

    def begin(self, cut: Sequence[slice]) -> None:
        """Let all workers compute their outputs."""
        self._recorded = {}
        self._is_recording = True
        for part in cut:
            self.compute_gradients(part)
        self._is_recording = False

    def compute_gradients(self, part: slice) -> Any:
        """Those of one worker, for the mean over all, and behind them its losses."""
        self._part, self._asked = part, 0
        self._calls.begin(part.stop - part.start)
        compute_loss = self._model.compute_loss
        losses: list[float] = []

        def noting(*args: Any, **options: Any) -> Any:
            loss = compute_loss(*args, **options)
            losses.append(float(loss))
            return loss

        with self._batch.active(), override(self._model, "compute_loss", noting):
            gradients = compute_step_gradients(self._model, take_part(self._rows, part))
        return np.append(gradients, losses)

    def __call__(
        self, own: Sequence[Any], is_first: bool
    ) -> tuple[list[Any], list[Any], float, None]:
        """As `OtherRows`."""
        if self._is_recording:
            self._recorded.setdefault(self._part.start, []).append(own)
        before = [tensor[:0] for tensor in own]
        after = list(before)
        for start, asked in self._recorded.items():
            if self._is_recording or start == self._part.start:
                continue
            side = before if start < self._part.start else after
            found = [tf.stop_gradient(tensor) for tensor in asked[self._asked]]
            side[:] = [tf.concat(pair, 0) for pair in zip(side, found, strict=True)]
        self._asked += 1
        factor = count_rows(self._rows) / (self._part.stop - self._part.start)
        return before, after, factor, None

    def fetch_whole(self, specs: Sequence[Any], is_first: bool) -> list[Any]:
        """Every part has rows."""
        raise NotImplementedError
