"""Repeats some steps as one process takes them, and compares what became of all variables.

The rows of all workers go to rank 0. It puts back the variables as they were before the step, takes
Keras's own step on the global batch, and compares every change with what the workers have made of
it; then the state after the step is put back, bit for bit. Nothing is assumed about losses, layers
or a train_step: whatever they do, one process has done it, too.

A difference is explained by rounding if one process shows such a one itself when its weights and
rows are moved by as much as their type rounds them (Adam divides a gradient that is nothing but
rounding errors by its own size). If the step draws random numbers, noise is switched off, all
workers take the step once more, and what they make of it is compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective, broadcast_bytes
from pybackend.data.arrays import nest
from pybackend.data.state_file import decode_state, encode_state
from pybackend.engine.audit_rows import pack_rows
from pybackend.engine.exchange import GradientExchange, count_accumulated_steps
from pybackend.engine.feed import Feed
from pybackend.engine.one_process import (
    OneProcess,
    StepState,
    Values,
    switch_off_noise,
)
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.row_memory import find_free_memory, read_memory, read_peak_memory
from pybackend.engine.verdict import Judge
from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.options import Exchange
from pybackend.job.report import Audit

# Of the time of an epoch that audits may take, from the third epoch on.
_SHARE = 0.02
# Of the memory that is free.
_SHARE_OF_MEMORY = 0.5
# With more workers the step of one process takes longer than many of theirs.
_MANY = 16
_NO_MEMORY = "worker 0 has too little memory for the rows of all workers and a copy of the state"
_ABOUT_WARNING = "; the training goes on, as `audit` is 'warn'"


@dataclass
class _Window:
    """Steps that are compared as one: those whose gradients the optimizer adds up, or a single one.

    ``before`` has the values before the first of them, ``memory`` the bytes of the process then,
    ``changed`` what callbacks have changed before each.
    """

    before: Values
    memory: float
    steps: list[int] = field(default_factory=list)
    changed: list[Values] = field(default_factory=list)
    numbers: Values = field(default_factory=dict)


class Auditor:
    """Audits a training by two callbacks: `beginning` is the last of all, `ending` before others.

    Parameters
    ----------
    others
        Variables of other callbacks that the steps use.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        feed: Feed | PipelineFeed,
        exchange: GradientExchange,
        job: Job,
        emit: Emit,
        others: Sequence[Any] = (),
        class_weight: Any = None,
    ) -> None:
        self.report = Audit()
        """What was found so far; on rank 0."""
        self._model = model
        self._collective = collective
        self._feed = feed
        self._exchange = exchange
        self._only_warns = isinstance(job.exchange, Exchange) and job.exchange.audit == "warn"
        self._limit = job.resources.bytes
        self._emit = emit
        self._state = StepState(model, others)
        self._class_weight = class_weight
        self._judge = Judge(model, exchange, self._state, feed.is_dealt, class_weight)
        self._epoch = 0
        self._epochs = 0
        self._due: set[int] = set()
        self._window: _Window | None = None
        self._spent = 0.0
        self._began = time.monotonic()
        self._epoch_began = self._began
        self._said: set[str] = set()
        self.beginning = keras.callbacks.LambdaCallback(
            on_epoch_begin=self._plan, on_train_batch_begin=self._begin
        )
        self.ending = keras.callbacks.LambdaCallback(on_train_batch_end=self._end)

    def _plan(self, epoch: int, logs: Any = None) -> None:
        """Choose the steps of an epoch; rank 0 does, by the time that audits have taken."""
        now = time.monotonic()
        spent, passed, last = self._spent, now - self._began, now - self._epoch_began
        self._epoch, self._epoch_began = epoch, now
        steps, done = self._feed.steps, self.report.steps
        chosen = [0]
        is_paid = self._epochs > 1 or self._collective.world_size > _MANY
        if self._epochs == 0 and not is_paid:
            totals = self._feed.total_rows
            chosen += [] if totals is None or totals[-1] == totals[0] else [steps - 1]
        elif self._epochs and is_paid:
            each = spent / max(1, done)
            affordable = int((_SHARE * (passed + last) - spent) / each) if each else 1
            # Of a pipeline the first batch is kept alone.
            most = 1 if isinstance(self._feed, PipelineFeed) else steps
            count = max(0, min(affordable, most))
            chosen = [steps * number // count for number in range(count)]
        if chosen and 3 * self._state.count_bytes() > self._find_room():
            self._skip(_NO_MEMORY)
            chosen = []
        text = broadcast_bytes(self._collective, json.dumps(chosen).encode())
        self._due = set(json.loads(text))
        self._epochs += 1
        self._window = None

    def _begin(self, batch: int, logs: Any = None) -> None:
        if self._window is None:
            is_due = any(step <= batch for step in self._due)
            if not is_due or self._count_accumulated():
                return
            began = time.monotonic()
            self._due = {step for step in self._due if step > batch}
            self._window = _Window(self._state.read(self._list_kept()), read_memory())
            self._window.changed.append({})
            self._spent += time.monotonic() - began
        else:
            values = self._read_numbers()
            kept = self._window.numbers
            self._window.changed.append(
                {key: value for key, value in values.items() if value != kept.get(key)}
            )
        self._window.steps.append(batch)

    def _end(self, batch: int, logs: Any = None) -> None:
        window = self._window
        if window is None:
            return
        last = min(batch, self._feed.steps - 1)
        # Several steps per execution come without a call between them.
        for step in range(window.steps[-1] + 1, last + 1):
            window.steps.append(step)
            window.changed.append({})
        if self._count_accumulated() and last < self._feed.steps - 1:
            window.numbers = self._read_numbers()
            return
        self._window = None
        began = time.monotonic()
        self._audit(window)
        self._spent += time.monotonic() - began

    def _count_accumulated(self) -> int:
        """Steps whose gradients the optimizer has not applied yet."""
        each = count_accumulated_steps(self._model.optimizer)
        return self._exchange.count_calls() % each if each > 1 else 0

    def _list_kept(self) -> list[int] | None:
        """What this worker needs to remember: all, unless rank 0 alone repeats the step."""
        if self._collective.rank == 0 or self._state.list_generators():
            return None
        metrics = self._state.list_metrics(self._exchange.shared_variables)
        return [*metrics, *self._state.list_statistics()]

    def _read_numbers(self) -> Values:
        found = self._state.list_variables()
        return self._state.read([key for key, one in found.items() if len(one.shape) == 0])

    def _audit(self, window: _Window) -> None:
        after = self._state.read(self._list_kept())
        found, reason = after, None
        drawn = [key for key in self._state.list_generators() if key in window.before]
        is_random = any(not np.array_equal(window.before[k], after[k]) for k in drawn)
        with ExitStack() as stack:
            if self._state.list_generators() and self._ask(is_random):
                reason = self._refuse_repetition(window)
                if reason is None:
                    stack.enter_context(switch_off_noise(self._model))
                    found = self._repeat(window)
                    if any(not np.array_equal(window.before[k], found[k]) for k in drawn):
                        reason = "a layer draws random numbers that cannot be switched off"
                self._state.write(after)
            packed = self._pack(window, found)
            received = self._collective.gather(np.frombuffer(packed, np.uint8).copy())
            verdict: dict[str, Any] = {}
            if self._collective.rank == 0:
                try:
                    everyone = [decode_state(part.tobytes()) for part in received]
                    if reason is None and self._lacks_memory(window):
                        reason = _NO_MEMORY
                    place = f"step {window.steps[-1] + 1} of epoch {self._epoch + 1}"
                    verdict = (
                        {"skipped": reason}
                        if reason
                        else self._judge.compare(
                            window.before, dict(found), window.changed, everyone, place
                        )
                    )
                finally:
                    self._state.write(after)
        verdict = json.loads(broadcast_bytes(self._collective, json.dumps(verdict).encode()))
        self._obey(verdict)

    def _ask(self, is_random: bool) -> bool:
        """Whether the step has drawn random numbers on rank 0."""
        answer = broadcast_bytes(self._collective, json.dumps(is_random).encode())
        return bool(json.loads(answer))

    def _refuse_repetition(self, window: _Window) -> str | None:
        """Why the workers cannot take a step a second time; None if they can."""
        if len(window.steps) > 1:
            return "random layers, and several steps at once"
        if not self._exchange.is_repeatable:
            return "random layers, and an exchange by XLA or TensorFlow"
        if not all(self._feed.rows_at(window.steps[0])):
            return "random layers, and a worker without rows"
        return None

    def _repeat(self, window: _Window) -> Values:
        """What becomes of the variables if the workers take the step again."""
        self._state.write(window.before)
        step = window.steps[0]
        process = OneProcess(self._model, self._model.train_step, self._class_weight)
        with self._exchange.repeating():
            process.take(nest(self._feed.read_step(step)[0]))
        return self._state.read(self._list_kept())

    def _pack(self, window: _Window, found: Values) -> bytes:
        """What rank 0 needs of this worker."""
        changes = {}
        for name, keys in (
            ("metrics", self._state.list_metrics(self._exchange.shared_variables)),
            ("statistics", self._state.list_statistics()),
        ):
            # Metrics that the step has made are not known before.
            pairs = [(n, key) for n, key in enumerate(keys) if key in window.before]
            changes[name] = {
                n: found[key].astype(np.float64) - window.before[key]
                for n, key in pairs
                if not np.array_equal(found[key], window.before[key])
            }
        rows = []
        for step in window.steps:
            rows.append(pack_rows(*self._feed.read_step(step)))
        return encode_state({"rows": rows, **changes})

    def _lacks_memory(self, window: _Window) -> bool:
        """Whether a step with the rows of all workers may need more than there is."""
        # What this worker's own rows have taken at most.
        own = max(0.0, read_peak_memory() - window.memory)
        needed = self._collective.world_size * own + self._state.count_bytes()
        return needed > self._find_room()

    def _find_room(self) -> float:
        """Bytes that an audit may take."""
        limit = np.inf if self._limit is None else max(0.0, self._limit - read_memory())
        return _SHARE_OF_MEMORY * min(find_free_memory(), limit)

    def _skip(self, reason: str) -> None:
        if reason not in self.report.skipped:
            self.report.skipped.append(reason)

    def _obey(self, verdict: dict[str, Any]) -> None:
        """Note what rank 0 has found; on all ranks."""
        report = self.report
        if "skipped" in verdict:
            self._skip(verdict["skipped"])
            return
        report.steps += verdict["steps"]
        report.rows += verdict["rows"]
        report.weights = max(report.weights, verdict["weights"])
        report.metrics = max(report.metrics, verdict["metrics"])
        error = verdict.get("error")
        if error is None:
            return
        if not self._only_warns:
            raise InputError(f"{error}. `audit='warn'` of `exchange` only warns")
        report.differences.append(error)
        if not self._said:
            self._emit(Note(error + _ABOUT_WARNING))
            self._said.add(error)
