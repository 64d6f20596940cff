"""Repeat some steps in one process, and compare all variables.

The rows of all workers go to rank 0. It restores the variables from before the step, takes Keras's
own step on the global batch, and compares every change with that of the workers; then the state
after the step is restored, bit for bit. This assumes nothing about the losses, the layers or the
train_step, because a single process runs them, too, and only the results are compared.

The gradients that the optimizer gets are compared, and all variables; `step_difference` tells
rounding from a difference. If the step draws random numbers, all workers repeat it with constants
instead, and that result is compared; on GPUs, and in half precision, they repeat it in float32.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from pybackend.core.collective import all_sum, broadcast_value, gather_values, is_true_anywhere
from pybackend.core.engine.audit.audited_rows import UnequalRows, pack_rows
from pybackend.core.engine.audit.audited_steps import (
    OWN_FAULT,
    AuditPlan,
    Values,
    Window,
    describe_error,
)
from pybackend.core.engine.audit.merges import EpochMerge, Merges
from pybackend.core.engine.audit.one_process import OneProcess, OwnSettings, StepState, count_bytes
from pybackend.core.engine.audit.stand_ins import POSITIONS, Noise, stand_in_noise
from pybackend.core.engine.audit.traced_step import TracedStep
from pybackend.core.engine.audit.verdict import Judge
from pybackend.core.engine.equal_state import find_differing, find_trained, uses_gpus
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.replica import Replica, count_neighbours
from pybackend.core.engine.row_batches import PipelineBatches
from pybackend.core.engine.step_changes import count_accumulated_steps
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.job.messages import Note
from pybackend.core.job.report import Audit
from pybackend.core.job.worker_options import Exchange
from pybackend.core.machine.capacity import read_free_memory
from pybackend.core.machine.processes import measure_memory, measure_peak
from pybackend.core.words import setting, show, term

# Share of the free memory.
_SHARE_OF_MEMORY = 0.5
# With more workers, one process's step takes longer than many of theirs.
_MANY = 16
_MOST_STEPS = 128
# The first step that may be audited lies later in each epoch, by this part of the epoch: never at
# the same positions again (the golden ratio).
_TURN = 0.618034
_NO_MEMORY = "a worker has too little memory for the rows of all workers and a copy of the state"
_ABOUT_MANY = f"more than {_MOST_STEPS} steps are executed together"
_ABOUT_ACCUMULATED = "a callback changes weights while gradients are being accumulated"
_ABOUT_SKIPPING = (
    "a step of epoch {} could not be compared with one process, so it was not checked: {}"
)
_ABOUT_FIXED = (
    "random numbers are drawn with a fixed seed: each worker draws the same ones for its own rows, "
    "while one process draws different ones for each row of a batch. A `{}` gives each worker its "
    "own"
)
_ABOUT_ROWS = (
    "{} of epoch {}, the first is step {}, trained on other rows than those that `replay_batches` "
    "lists"
)
_ABOUT_JUDGE = "tfdist failed to compare it ({}): please report it"
_ABOUT_WARNING = "; the training continues, because `audit` is {}"


class Auditor:
    """Audit of a training run by two callbacks: `beginning` runs after all others, `ending` first.

    ``others`` are variables of other callbacks that the steps use; the results are added to
    ``report``.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: GradientExchange,
        sync: EpochMerge,
        clock: StepClock,
        others: Sequence[Any],
        report: Audit,
        class_weight: Any,
    ) -> None:
        view, job = replica.view, replica.job
        self.report = report
        self.noise = Noise()  # records random draws for as long as the training lasts
        self._collective, self._feed = own = replica.collective, replica.batches
        self._model, self._exchange = view.model, exchange
        self._clock, self._emit = clock, replica.emit
        self._only_warns = isinstance(job.exchange, Exchange) and job.exchange.audit == "warn"
        self._limit = job.resources.bytes
        self._state = state = StepState(view, others)
        self._process = process = OneProcess(state, class_weight)
        self._is_mixed, self._is_half = view.has_mixed_layers, view.has_half_layers
        # What half precision computes is repeated in float32, which has fewer rounding errors.
        self._process.type = "float32" if self._is_mixed else None
        self._step = TracedStep(*own, exchange, process, self.noise)
        self._settings = OwnSettings(view)
        self._merges = Merges(*own, exchange, state, sync)
        self._plan = AuditPlan()
        self._epoch = self._epochs = self._compared = self._delays = 0
        self._window: Window | None = None
        self._small: Values = {}
        # First step that this worker group took in the epoch, and the step after its last one.
        self._taken = (0, 0)
        self._traced: Any = None
        self._own_memory, self._copies = 0.0, 1
        self._has_gpus = self._has_said_fixed = False
        self.waited = 0.0  # seconds in which this worker waited while others audited
        call = keras.callbacks.LambdaCallback
        self.beginning = call(on_epoch_begin=self._begin_epoch, on_train_batch_begin=self._begin)
        self.ending = call(on_train_batch_end=self._end, on_epoch_end=self._end_epoch)

    def _begin_epoch(self, epoch: int, logs: Any = None) -> None:
        """Choose the steps of an epoch that are audited in any case, and the first that may be."""
        feed, totals, steps = self._feed, self._feed.total_rows, self._feed.steps
        self._epoch, self._window, self._taken = epoch, None, (0, 0)
        self._exchange.take_exchanges()
        is_first, is_second = self._epochs == 0, self._epochs == 1
        first: int | None = 0 if is_second else int(self._epochs * _TURN % 1 * steps)
        musts: set[int] = set()
        if is_first:
            self._has_gpus = uses_gpus(self._collective)
            self._copies = count_neighbours(self._collective)
            is_uneven = totals is not None and totals[-1] != totals[0]
            # The last step may have fewer rows.
            musts = {0, steps - 1 if is_uneven and self._collective.world_size <= _MANY else 0}
        if isinstance(feed, PipelineBatches):  # it retains only the first batch
            steps, first = 1, 0
            if feed.is_endless and self._epochs:  # that of a later epoch was read ahead
                first, musts = None, set()
        together = min(self._count_together(), _MOST_STEPS)
        copied = 2 * together * count_bytes(self._model.trainable_variables)
        needed = self._copies * (4 * self._state.count_bytes() + copied)
        small = self._state.read_small() if self._small else {}
        has_changed = not _are_equal(self._small, small) or self._is_outdated()
        counts = all_sum(self._collective, [needed > self._find_room(), has_changed])
        if counts[1] and first is not None:  # a callback has changed what a loss may use
            musts = {0}
        if counts[0] and first is not None:
            self._skip(_NO_MEMORY)
            first, musts = None, set()
        self._plan.begin_epoch(steps, 0 if musts else first, musts, is_second)
        self._epochs += 1

    def _begin(self, batch: int, logs: Any = None) -> None:
        if self._taken == (0, 0):
            self._taken = batch, batch
        if self._window is not None:
            if self._window.digest != self._digest():
                self._window.reason = _ABOUT_ACCUMULATED
            values, saved = self._read_numbers(), self._window.numbers
            changed = {key: value for key, value in values.items() if value != saved.get(key)}
            self._window.changed[batch] = changed
            return
        last = batch + self._count_together() - 1
        if not self._plan.is_due(last) or self._count_accumulated():
            return  # most steps
        if not self._plan.is_must(last):
            chosen = self._plan.choose(last) if self._collective.rank == 0 else 0
            chosen = int(all_sum(self._collective, [chosen])[0])
            self._plan.postpone(chosen)
            if chosen > last:
                return
        if last - batch >= _MOST_STEPS:  # their gradients would fill the memory
            self._plan.begin_epoch(self._feed.steps, None)
            self._skip(_ABOUT_MANY)
            return
        began = time.monotonic()
        self._plan.begin(batch, last)
        self._state.find()
        self._window = Window(self._state.read(), measure_memory(os.getpid()), {batch: {}})
        self._exchange.copy_exchanges()
        self._plan.spent += time.monotonic() - began

    def _end(self, batch: int, logs: Any = None) -> None:
        if self._traced is None:
            self._traced = self._read_traced()
        window, last = self._window, min(batch, self._feed.steps - 1)
        self._taken = self._taken[0], last + 1
        if window is None:
            return
        # Several steps per execution run without a call between them.
        window.changed |= {step: {} for step in range(window.steps[-1] + 1, last + 1)}
        if self._count_accumulated() and last < self._feed.steps - 1:
            window.numbers, window.digest = self._read_numbers(), self._digest()
            return
        self._window, window.exchanged = None, self._exchange.take_exchanges()
        began, waited = time.monotonic(), self._collective.waited
        record = self._exchange.record
        with self._clock.leaving_out(), record.settling() if record else nullcontext():
            self._audit(window, logs)
        self._plan.end(time.monotonic() - began)
        self.waited += self._collective.waited - waited

    def _count_accumulated(self) -> int:
        # Steps whose gradients the optimizer has not applied yet.
        each = count_accumulated_steps(self._model.optimizer)
        return self._exchange.count_calls() % each if each > 1 else 0

    def _count_together(self) -> int:
        """Return the number of steps between two points at which a window can end."""
        model = self._model
        executed = 1 if model.run_eagerly else int(model.steps_per_execution)
        return max(executed, count_accumulated_steps(model.optimizer))

    def _digest(self) -> int:
        """Return a checksum of all variables except scalars; only rank 0 compares them."""
        digest = 0
        for variable in () if self._collective.rank else self._state.variables.values():
            if len(variable.shape):  # callbacks may change scalars, such as the learning rate
                digest = zlib.crc32(variable.numpy().tobytes(), digest)
        return digest

    def _is_repeated(self, is_random: bool) -> bool:
        """Return whether the workers repeat the step, as the single process does.

        On GPUs, rounding depends on the kernel, even with XLA: TF32 has only three digits. So does
        half precision.
        """
        return is_random or self._exchange.is_compressed or self._has_gpus or self._is_mixed

    def _read_traced(self) -> Any:
        return find_trained(self._model), self._settings.read()

    def _is_outdated(self) -> bool:
        """Return whether Python values have changed since the traced step read them."""
        traced = None if self._model.run_eagerly else self._traced
        return traced is not None and traced != self._read_traced()

    def _read_numbers(self) -> Values:
        found = self._state.variables
        return self._state.read([key for key, one in found.items() if len(one.shape) == 0])

    def _end_epoch(self, epoch: int, logs: Any = None) -> None:
        self._small = self._state.read_small()
        steps = self._feed.find_misread(*self._taken, self._collective)
        if steps:
            error = _ABOUT_ROWS.format(counted(len(steps), "step"), epoch + 1, steps[0] + 1)
            self._obey({"error": f"{error}. {OWN_FAULT}"})

    def _audit(self, window: Window, logs: Any) -> None:
        # There may be new variables, except metrics, whose old values are unknown.
        made = self._state.find().keys() - window.before.keys()
        has_made = bool(made - {id(v.value) for v in self._model.metrics_variables})
        is_short = self._collective.rank == 0 and self._lacks_memory(window)
        found = all_sum(self._collective, [self.noise.is_drawn, has_made, is_short])
        is_random, has_made, is_short = (bool(count) for count in found)
        self.noise.is_drawn = is_random
        if self.noise.is_stateless and not self.noise.has_seeds and not self._has_said_fixed:
            self._has_said_fixed = True
            self._emit(Note(_ABOUT_FIXED.format(term("keras.random.SeedGenerator"))))
        if has_made:
            self._delay(window, "the step created variables")
            return
        reason = _NO_MEMORY if is_short else self._refuse(window, is_random)
        if reason is not None:
            self._skip(reason)
            return
        after, where = self._state.read(), self._name(window)
        settings = self._settings.read()
        # With random numbers, in the first comparison all of them, then each in turn.
        turn = self._compared % len(POSITIONS) if is_random else 0
        positions = POSITIONS if is_random and not self._compared else POSITIONS[turn : turn + 1]
        is_repeated = self._is_repeated(is_random)
        is_rough = self._is_half or self._has_gpus
        has_learned = False
        for position in positions:
            verdict = self._compare(window, after, position, is_repeated)
            name = self._settings.restore(settings)
            if is_true_anywhere(self._collective, name is not None) and "error" in verdict:
                # For example a loss that counts its calls: each run of its code is another step.
                name = name or "an attribute"
                verdict = {"skipped": f"the step changes {name}, and the traced step does not"}
            if "error" in verdict and not is_repeated and not self._refuse(window, True):
                verdict = self._step.confirm(window, after, verdict, is_rough)
            self._settings.restore(settings)
            verdict = self._name_culprit(window, after, verdict)
            if verdict.get("has_learned", True):
                self._obey(verdict, is_new=not has_learned)
                has_learned = True
        if not has_learned:
            self._delay(window, "no weight changed, or weights became NaN or infinite")
            return
        self._compared += 1
        # Each rank's part of an optimizer is known to that rank alone.
        if (is_repeated or self._step.has_parts) and "skipped" not in verdict:
            verdict = self._step.compare(window, after, where, is_rough)
            self._obey(self._name_culprit(window, after, verdict))
            self._settings.restore(settings)
        if window.steps[0] == 0:
            self._obey(self._merges.compare(after, window.steps, logs, where))
            self._state.write(after)

    def _name_culprit(
        self, window: Window, after: Values, verdict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the error that weights differed before the step, if this explains a verdict's."""
        if "error" not in verdict:
            return verdict
        optimizers = self._state.view.optimizer_variables if self._exchange.shards is None else ()
        variables = [*self._model.trainable_variables, *optimizers]
        self._state.write(window.before)
        differing = find_differing(variables, self._collective)[0]
        self._state.write(after)
        if differing:
            ranks, name = ", ".join(map(str, differing)), show(min(differing.values()))
            verdict["error"] = (
                f"before {self._name(window)}, the variable {name} of worker {ranks} differed from "
                "that of worker 0: a callback, a layer or a custom train_step changed it on only "
                "one worker"
            )
        return verdict

    def _compare(
        self, window: Window, after: Values, position: float, is_repeated: bool
    ) -> dict[str, Any]:
        """Return rank 0's verdict on all ranks, with random numbers replaced by a constant."""
        found, reason = after, window.reason
        self._process.position = position
        with stand_in_noise(position):
            if is_repeated:
                found, exchanged, failed = self._step.repeat(window)
                window, reason = replace(window, exchanged=exchanged), reason or failed
                self._state.write(after)
            received = gather_values(self._collective, self._pack(window, found))
            verdict: dict[str, Any] = {"skipped": reason}
            if self._collective.rank == 0 and reason is None:
                try:
                    own = self._exchange, self._process, window, found
                    judge = Judge(*own, received, self._feed.is_sharded)
                    verdict = judge.judge(self._name(window))
                except UnequalRows as error:
                    verdict = {"skipped": str(error)}
                except Exception as error:  # it must not end a training that may be right
                    verdict = {"skipped": _ABOUT_JUDGE.format(describe_error(error))}
                finally:
                    self._state.write(after)
        return dict(broadcast_value(self._collective, verdict))

    def _name(self, window: Window) -> str:
        return f"step {window.steps[-1] + 1} of epoch {self._epoch + 1}"

    def _delay(self, window: Window, reason: str) -> None:
        """Audit a later step instead of this one, further ahead each time."""
        step = window.steps[-1] + 2**self._delays
        self._delays += 1
        if step < self._plan.steps:
            self._plan.musts.add(step)
            self._plan.postpone(step)
        else:
            self._skip(reason)

    def _refuse(self, window: Window, is_random: bool) -> str | None:
        """Return why steps cannot be compared, or None; the same on all workers."""
        steps = window.steps
        if isinstance(self._feed, PipelineBatches) and steps != [0]:
            return "if `data` is a function, only the first batch of an epoch is stored"
        if self._feed.is_uneven:
            return (
                "arrays of a batch have different numbers of rows, and cannot be concatenated "
                "across the workers"
            )
        if len(steps) > _MOST_STEPS:
            return _ABOUT_MANY
        if len(steps) > 1 and self._exchange.needs_others_in_each_step:
            return "with `shard_optimizer`, steps that run together need the other workers' weights"
        model = self._model
        if is_true_anywhere(self._collective, self._is_outdated()):
            name = self._settings.find_changed(self._traced[1]) or "which layers are trained"
            return f"{name} has changed since the step was traced, which still uses the old value"
        if model.run_eagerly and self._state.view.custom_parts:
            return (
                "custom layers, losses or train_steps that run eagerly may change Python attributes"
            )
        if not self._is_repeated(is_random):
            return None
        if not self._exchange.is_repeatable:
            return "the step would have to be repeated, which TensorFlow's collectives cannot do"
        # `rows_at` may communicate with the other workers.
        if self._exchange.is_split and not all(all(self._feed.rows_at(step)) for step in steps):
            return "the step would have to be repeated, but has no rows on a worker that uses XLA"
        return None

    def _pack(self, window: Window, found: Values) -> dict[str, Any]:
        """Return what rank 0 needs from this worker."""
        before, state = window.before, self._state
        metrics = state.list_metrics(self._exchange.shared_variables)
        changes = {
            name: {
                n: found[key].astype(np.float64) - before[key]
                for n, key in enumerate(keys)
                # Metrics that the step created have no value before.
                if key in before and not np.array_equal(found[key], before[key])
            }
            for name, keys in (("metrics", metrics), ("statistics", state.list_statistics()))
        }
        rows = [pack_rows(*self._feed.read_step(step)) for step in window.steps]
        sharded = window.exchanged if self._exchange.shards is not None else []
        parts = [{"needed": x.needed, "means": x.means[: len(x.needed)]} for x in sharded]
        return {"rows": rows, "parts": parts, **changes}

    def _lacks_memory(self, window: Window) -> bool:
        """Return whether a step on the rows of all workers may exceed the available memory."""
        # The most that this worker's own rows have taken.
        self._own_memory = max(self._own_memory, measure_peak() - window.memory)
        needed = self._collective.world_size * self._own_memory + self._state.count_bytes()
        return needed > self._find_room()

    def _find_room(self) -> float:
        used = measure_memory(os.getpid())
        limit = np.inf if self._limit is None else max(0.0, self._limit - used)
        return _SHARE_OF_MEMORY * min(read_free_memory(), limit)

    def _skip(self, reason: str, is_new: bool = True) -> None:
        self.report.undecided += is_new
        if reason not in self.report.skipped:
            self.report.skipped.append(reason)
            self._emit(Note(_ABOUT_SKIPPING.format(self._epoch + 1, reason)))

    def _list_left_out(self) -> list[str]:
        """Return what is not compared in any step, in words."""
        others = [] if self._step.has_parts else self._exchange.variables_of_others
        normalizing = self._state.view.unsynchronized
        left_out = {
            "moving statistics of normalization over each worker's rows": normalizing,
            "updates of other workers' parts (`shard_optimizer`)": others,
            "random numbers of XLA or of a global generator": self._step.draws_others,
            "the exchange of the accumulated gradients that were applied": self._exchange.adds_up
            and (self._is_repeated(self.noise.is_drawn) or self._step.has_parts),
        }
        return [name for name, is_left_out in left_out.items() if is_left_out]

    def _obey(self, verdict: dict[str, Any], is_new: bool = False) -> None:
        """Record rank 0's verdict on all ranks, and raise its error unless the audit only warns."""
        report = self.report
        if "skipped" in verdict:
            self._skip(verdict["skipped"], is_new)
            return
        if is_new:
            report.steps += verdict["steps"]
            report.rows += verdict["rows"]
            for name in ("weights", "metrics", "zeros"):
                setattr(report, name, max(getattr(report, name), verdict[name]))
        report.left_out = self._list_left_out()
        error = verdict.get("error")
        if error is None:
            return
        if not self._only_warns:
            raise InputError(
                f"{error}. With `{setting(audit='warn')}` in `exchange`, this is only a warning"
            )
        if not report.differences:
            self._emit(Note(error + _ABOUT_WARNING.format(show("warn"))))
        report.differences.append(error)


def _are_equal(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
