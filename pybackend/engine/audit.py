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

import json
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from pybackend.collective import all_sum, broadcast_bytes
from pybackend.data.arrays import nest
from pybackend.data.state_file import encode_state
from pybackend.engine.audit_rows import pack_rows
from pybackend.engine.exchange import GradientExchange
from pybackend.engine.host import Exchanged
from pybackend.engine.one_process import (
    OneProcess,
    StepState,
    Values,
    find_own_settings,
    find_unsynchronized,
    is_mixed,
    name_changed,
    set_own_settings,
)
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.replica import (
    Replica,
    count_neighbours,
    find_free_memory,
    read_memory,
    read_peak_memory,
)
from pybackend.engine.stand_ins import PLACES, Noise, stand_in_noise
from pybackend.engine.state import find_trained, uses_gpus
from pybackend.engine.step_clock import StepClock
from pybackend.engine.step_difference import is_another
from pybackend.engine.steps import count_accumulated_steps
from pybackend.engine.verdict import ABOUT_OWN_FAULT, Judge, describe_error
from pybackend.engine.watched_gradients import WatchedGradients, check_sums
from pybackend.errors import InputError
from pybackend.job.messages import Note
from pybackend.job.options import Exchange
from pybackend.job.report import Audit
from pybackend.model.layers import find_custom_parts, find_layers
from pybackend.words import setting

# Share of an epoch's time that audits may take, from the third epoch on.
_SHARE = 0.02
# Share of the free memory.
_SHARE_OF_MEMORY = 0.5
# With more workers, one process's step takes longer than many of theirs.
_MANY = 16
_MOST_STEPS = 128
# Audited steps except the first lie later in each epoch, by this part of the distance between two
# of them: never at the same positions again (the golden ratio).
_TURN = 0.618034
# Steps of a long first epoch that are also compared.
_ALSO = (1000, 10_000, 100_000)
_NO_MEMORY = "a worker has too little memory for the rows of all workers and a copy of the state"
_ABOUT_MANY = f"more than {_MOST_STEPS} steps are executed together"
_ABOUT_SKIPPING = (
    "a step of epoch {} could not be compared with one process, so it was not checked: {}"
)
_ABOUT_FIXED = (
    "random numbers are drawn with a fixed seed: each worker draws the same ones for its own rows, "
    "while one process draws different ones for each row of a batch. A "
    "`keras.random.SeedGenerator` gives each worker its own"
)
_ABOUT_TRACED = (
    "the traced step computes other gradients than its Python code does now: Python values that it "
    "reads have changed since it was traced, or the traced step is wrong"
)
_ABOUT_SUM = "the mean of the workers' gradients is not what was exchanged"
_ABOUT_UPDATE = "the optimizer has not made of the gradients what it makes of them again"
_ABOUT_WARNING = "; the training continues, because `audit` is 'warn'"


@dataclass
class _Window:
    """Steps compared as one: those whose gradients the optimizer adds up, or a single step.

    ``before`` has the values before the first step, ``memory`` the size of the process at that
    time, ``known`` the variables that existed, ``changed`` the numbers that callbacks changed
    before each step, ``digest`` a checksum of the variables that callbacks must not change in
    between, and ``exchanged`` the gradients.
    """

    before: Values
    memory: float
    known: set[int]
    steps: list[int] = field(default_factory=list)
    changed: list[Values] = field(default_factory=list)
    numbers: Values = field(default_factory=dict)
    digest: int = 0
    reason: str | None = None
    exchanged: list[Exchanged] = field(default_factory=list)


class Auditor:
    """Audit of a training run by two callbacks: `beginning` runs after all others, `ending` first.

    Parameters
    ----------
    others
        Variables of other callbacks, which the steps use.
    report
        Results so far.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: GradientExchange,
        clock: StepClock,
        others: Sequence[Any],
        report: Audit | None,
        class_weight: Any,
    ) -> None:
        model, feed, job = replica.model, replica.feed, replica.job
        self.report = Audit() if report is None else report
        """Results so far."""
        self._before = self.report.steps
        self.noise = Noise()
        """Records random draws for as long as the training lasts."""
        self._model = model
        self._collective = replica.collective
        self._feed = feed
        self._exchange = exchange
        self._only_warns = isinstance(job.exchange, Exchange) and job.exchange.audit == "warn"
        self._limit = job.resources.bytes
        self._emit = replica.emit
        self._state = StepState(model, others)
        self._process = OneProcess(model, class_weight)
        self._is_mixed = any(map(is_mixed, find_layers(model)))
        self._process.type = "float32" if self._is_mixed else None
        self._judge = Judge(model, exchange, self._state, self._process, feed.is_sharded)
        self._epoch = 0
        self._epochs = 0
        self._due: set[int] = set()
        self._window: _Window | None = None
        self._traced: Any = None
        self._compared = 0
        self._delays = 0
        self._spent = 0.0
        self._clock = clock
        self._own_memory = 0.0
        self._copies = 1
        self._has_gpus = False
        self._has_said_fixed = False
        self.waited = 0.0
        """Seconds in which this worker waited while others audited."""
        self._began = time.monotonic()
        self._epoch_began = self._began
        self.beginning = keras.callbacks.LambdaCallback(
            on_epoch_begin=self._plan, on_train_batch_begin=self._begin
        )
        self.ending = keras.callbacks.LambdaCallback(on_train_batch_end=self._end)

    def _plan(self, epoch: int, logs: Any = None) -> None:
        """Choose on rank 0 which steps of an epoch to audit, based on how long past audits took."""
        now = time.monotonic()
        spent, passed, last = self._spent, now - self._began, now - self._epoch_began
        self._epoch, self._epoch_began = epoch, now
        steps, done = self._feed.steps, self.report.steps - self._before
        chosen = [0]
        is_paid = self._epochs > 1 or self._collective.world_size > _MANY
        if self._epochs == 0 and not is_paid:
            totals = self._feed.total_rows
            chosen += [] if totals is None or totals[-1] == totals[0] else [steps - 1]
            chosen += [step for step in _ALSO if step < steps and totals is not None]
        elif self._epochs and is_paid:
            each = spent / max(1, done)
            affordable = int((_SHARE * (passed + last) - spent) / each) if each else 1
            # A pipeline retains only the first batch.
            most = 1 if isinstance(self._feed, PipelineFeed) else steps
            # If epochs take milliseconds: the third, fifth, ninth and so on.
            least = 2 if self._epochs & (self._epochs - 1) == 0 else 0
            count = min(max(least, affordable), most)
            turn = self._epochs * _TURN % 1
            chosen = [
                int(steps * (number + turn * bool(number)) / count) for number in range(count)
            ]
        if isinstance(self._feed, PipelineFeed) and self._feed.is_endless and self._epochs:
            chosen = []  # the first batch of a later epoch was read ahead with others
        if self._epochs == 0:
            self._has_gpus = uses_gpus(self._collective)
            self._copies = count_neighbours(self._collective)
        together = min(self._count_together(), _MOST_STEPS)
        copied = 2 * together * self._state.count_trained_bytes()
        needed = self._copies * (4 * self._state.count_bytes() + copied)
        is_short = self._is_true_anywhere(needed > self._find_room())
        if chosen and is_short:
            self._skip(_NO_MEMORY)
            chosen = []
        text = broadcast_bytes(self._collective, json.dumps(chosen).encode())
        self._due = set(json.loads(text))
        self._epochs += 1
        self._window = None
        self._exchange.take_exchanges()

    def _begin(self, batch: int, logs: Any = None) -> None:
        if self._window is None:
            if not self._due:  # most steps
                return
            last = batch + self._count_together() - 1
            is_due = any(step <= last for step in self._due)
            if not is_due or self._count_accumulated():
                return
            if last - batch >= _MOST_STEPS:  # their gradients would fill the memory
                self._due.clear()
                self._skip(_ABOUT_MANY)
                return
            began = time.monotonic()
            self._due = {step for step in self._due if step > last}
            known = set(self._state.find())
            self._window = _Window(self._state.read(), read_memory(), known)
            self._window.changed.append({})
            self._exchange.copy_exchanges()
            self._spent += time.monotonic() - began
        else:
            if self._window.digest != self._digest():
                self._window.reason = (
                    "a callback changes weights while gradients are being accumulated"
                )
            values = self._read_numbers()
            saved = self._window.numbers
            self._window.changed.append(
                {key: value for key, value in values.items() if value != saved.get(key)}
            )
        self._window.steps.append(batch)

    def _end(self, batch: int, logs: Any = None) -> None:
        if self._traced is None:
            self._traced = _read_traced(self._model)
        window = self._window
        if window is None:
            return
        last = min(batch, self._feed.steps - 1)
        # Several steps per execution run without a call between them.
        for step in range(window.steps[-1] + 1, last + 1):
            window.steps.append(step)
            window.changed.append({})
        if self._count_accumulated() and last < self._feed.steps - 1:
            window.numbers, window.digest = self._read_numbers(), self._digest()
            return
        self._window, window.exchanged = None, self._exchange.take_exchanges()
        began, waited = time.monotonic(), self._collective.waited
        record = self._exchange.record
        settling = nullcontext() if record is None else record.settling()
        with nullcontext() if self._clock is None else self._clock.leaving_out(), settling:
            self._audit(window)
        self._spent += time.monotonic() - began
        self.waited += self._collective.waited - waited

    def _count_accumulated(self) -> int:
        """Return the number of steps whose gradients the optimizer has not applied yet."""
        each = count_accumulated_steps(self._model.optimizer)
        return self._exchange.count_calls() % each if each > 1 else 0

    def _count_together(self) -> int:
        """Return the number of steps between two points at which a window can end."""
        model = self._model
        executed = 1 if model.run_eagerly else int(model.steps_per_execution)
        return max(executed, count_accumulated_steps(model.optimizer))

    def _digest(self) -> int:
        """Return a checksum of all variables except scalars, on rank 0, which compares them."""
        if self._collective.rank:
            return 0
        digest = 0
        for variable in self._state.variables.values():
            if len(variable.shape):
                digest = zlib.crc32(variable.numpy().tobytes(), digest)
        return digest

    def _is_repeated(self, is_random: bool) -> bool:
        """Return whether the workers repeat the step, as the single process does.

        On GPUs, rounding depends on the kernel, even with XLA: TF32 has only three digits. So does
        half precision.
        """
        return is_random or self._exchange.is_compressed or self._has_gpus or self._is_mixed

    def _read_numbers(self) -> Values:
        found = self._state.variables
        return self._state.read([key for key, one in found.items() if len(one.shape) == 0])

    def _audit(self, window: _Window) -> None:
        self._state.find()
        is_short = self._collective.rank == 0 and self._lacks_memory(window)
        has_made = self._has_made_variables(window)
        found = all_sum(self._collective, [self.noise.is_drawn, has_made, is_short])
        is_random, has_made, is_short = (bool(count) for count in found)
        self.noise.is_drawn = is_random
        if self.noise.is_stateless and not self.noise.has_seeds and not self._has_said_fixed:
            self._has_said_fixed = True
            self._emit(Note(_ABOUT_FIXED))
        if has_made:
            self._delay(window, "the step created variables")
            return
        reason = _NO_MEMORY if is_short else self._refuse(window, is_random)
        if reason is not None:
            self._skip(reason)
            return
        after = self._state.read()
        settings = find_own_settings(self._model)
        places: tuple[float, ...] = PLACES[:1]
        if is_random:  # in the first comparison all places, then each in turn
            count = self._compared
            places = PLACES[count % len(PLACES) :][:1] if count else PLACES
        is_repeated = self._is_repeated(is_random)
        has_learned = False
        for place in places:
            verdict = self._compare(window, after, place, is_repeated)
            name = name_changed(self._model, settings)
            set_own_settings(self._model, settings)
            if self._is_true_anywhere(name is not None) and "error" in verdict:
                # For example a loss that counts its calls: each run of its code is another step.
                name = name or "an attribute"
                verdict = {"skipped": f"the step changes {name}, and the traced step does not"}
            if "error" in verdict and not is_repeated:
                verdict = self._confirm(window, after, verdict)
            set_own_settings(self._model, settings)
            if verdict.get("has_learned", True):
                self._obey(verdict, is_new=not has_learned)
                has_learned = True
        if has_learned:
            self._compared += 1
            # Each rank's part of an optimizer is known to that rank alone.
            if (is_repeated or self._has_parts()) and "skipped" not in verdict:
                self._obey(self._compare_traced(window, after), is_new=False)
                set_own_settings(self._model, settings)
        else:
            self._delay(window, "no weight changed, or weights became NaN or infinite")

    def _compare(
        self, window: _Window, after: Values, place: float, is_repeated: bool
    ) -> dict[str, Any]:
        """Return rank 0's result on all ranks, with random numbers replaced by a constant."""
        found, exchanged, reason = after, window.exchanged, window.reason
        self._process.place = place
        with stand_in_noise(place):
            if is_repeated:
                found, exchanged, failed = self._repeat(window)
                reason = reason or failed
                self._state.write(after)
            packed = self._pack(window, found, exchanged)
            received = self._collective.gather(np.frombuffer(packed, np.uint8).copy())
            verdict: dict[str, Any] = {}
            if self._collective.rank == 0:
                try:
                    everyone = [part.tobytes() for part in received]
                    verdict = (
                        {"skipped": reason}
                        if reason
                        else self._judge.compare(
                            window.before,
                            dict(found),
                            window.changed,
                            everyone,
                            self._name(window),
                            exchanged,
                        )
                    )
                finally:
                    self._state.write(after)
        text = broadcast_bytes(self._collective, json.dumps(verdict).encode())
        return dict(json.loads(text))

    def _draws_others(self) -> bool:
        """Return whether a repeated step draws other random numbers than the step that trained.

        XLA has its own generator, and a global one is not restored.
        """
        noise = self.noise
        is_unknown = noise.is_unseeded or not noise.states <= set(self._state.variables)
        return noise.is_drawn and (is_unknown or self._exchange.is_split)

    def _has_parts(self) -> bool:
        """Return whether each rank can repeat the update of its own part of the weights.

        Not if the optimizer clips by the norm of all gradients, which a rank does not have.
        """
        return self._exchange.shards is not None and not self._model.optimizer.global_clipnorm

    def _compare_traced(self, window: _Window, after: Values) -> dict[str, Any]:
        """Compare the step that trained with each worker's own repetition of it.

        What `_compare` has judged is another step: with constants instead of random numbers, in
        another type, or without compression.
        """
        verdict: dict[str, Any] = {"steps": 0, "rows": 0, "weights": 0.0, "metrics": 0.0}
        where = self._name(window)
        if not self._exchange.adds_up:
            rounding = 2.0**-6 if self._exchange.is_compressed else 2.0**-17
            wrong = check_sums(window.exchanged, self._collective, rounding)
            if self._is_true_anywhere(bool(wrong)):
                return verdict | {"error": f"in {where}, {_ABOUT_SUM}. {ABOUT_OWN_FAULT}"}
        if self._is_true_anywhere(self._draws_others()):
            return verdict
        if not all(all(self._feed.rows_at(step)) for step in window.steps):
            return verdict  # a step without rows exchanges
        own = self._process.type
        self._process.type = None
        try:
            found = self._repeat_own(window, after)
        finally:
            self._process.type = own
            self._state.write(after)
        kinds = all_sum(self._collective, [kind == found for kind in ("gradients", "update")])
        if kinds[0]:
            return {"skipped": _ABOUT_TRACED}
        if kinds[1]:
            return verdict | {"error": f"in {where}, {_ABOUT_UPDATE}. {ABOUT_OWN_FAULT}"}
        return verdict

    def _name(self, window: _Window) -> str:
        return f"step {window.steps[-1] + 1} of epoch {self._epoch + 1}"

    def _read_batches(self, window: _Window) -> list[Any]:
        """Return this worker's rows of the steps."""
        return [nest(self._feed.read_step(step)[0]) for step in window.steps]

    def _repeat_own(self, window: _Window, after: Values) -> str | None:
        """Return what differs if this worker repeats the step and applies the same means."""
        state, exchange, model = self._state, self._exchange, self._model
        state.write(window.before)
        watch = WatchedGradients(model, exchange, window.exchanged, len(window.steps), is_own=True)
        with exchange.repeating(len(window.steps)), exchange.paused(), watch.install():
            for batch, changed in zip(self._read_batches(window), window.changed, strict=True):
                state.write(changed)
                self._process.take(model.train_step, batch)
        tolerance = 0.05 if self._is_mixed or self._has_gpus else 1e-3
        pairs = list(watch.pairs.values())
        if is_another([one for one, _ in pairs], [other for _, other in pairs], tolerance):
            return "gradients"
        now = state.read([id(v.value) for v in model.trainable_variables])
        left_out = {id(v.value) for v in exchange.variables_of_others}
        keys = [key for key in now if key in window.before and key not in left_out]
        moved = [after[key].astype(np.float64) - window.before[key] for key in keys]
        again = [now[key].astype(np.float64) - window.before[key] for key in keys]
        return "update" if is_another(moved, again) else None

    def _confirm(self, window: _Window, after: Values, verdict: dict[str, Any]) -> dict[str, Any]:
        """Withdraw an error if a worker's own gradients are no longer those that were traced.

        Its gradients before the exchange: what the exchange makes of them is compared.
        """
        if self._refuse(window, is_random=True) is not None:
            return verdict
        _, again, failed = self._repeat(window)
        self._state.write(after)
        own, now = (
            [part for each in one for part in each.own] for one in (window.exchanged, again)
        )
        is_other = failed is None and is_another(own, now)
        return {"skipped": _ABOUT_TRACED} if self._is_true_anywhere(is_other) else verdict

    def _delay(self, window: _Window, reason: str) -> None:
        """Audit a later step instead of this one, further ahead each time."""
        step = window.steps[-1] + 2**self._delays
        self._delays += 1
        if step < self._feed.steps:
            self._due.add(step)
        else:
            self._skip(reason)

    def _is_true_anywhere(self, value: bool) -> bool:
        return bool(all_sum(self._collective, [value])[0])

    def _refuse(self, window: _Window, is_random: bool) -> str | None:
        """Return why steps cannot be compared, or None; the same on all workers."""
        if isinstance(self._feed, PipelineFeed) and window.steps != [0]:
            return "if `data` is a function, only the first batch of an epoch is stored"
        if isinstance(self._feed, PipelineFeed) and self._feed.is_uneven:
            return (
                "arrays of a batch have different numbers of rows, and cannot be concatenated "
                "across the workers"
            )
        if len(window.steps) > _MOST_STEPS:
            return _ABOUT_MANY
        if len(window.steps) > 1 and self._exchange.needs_others_in_each_step:
            return "with `shard_optimizer`, steps that run together need the other workers' weights"
        model = self._model
        if self._is_true_anywhere(not model.run_eagerly and self._traced != _read_traced(model)):
            name = name_changed(model, self._traced[1]) or "which layers are trained"
            return f"{name} has changed since the step was traced, which still uses the old value"
        if model.run_eagerly and find_custom_parts(model):
            return (
                "custom layers, losses or train_steps that run eagerly may change Python attributes"
            )
        if not self._is_repeated(is_random):
            return None
        if not self._exchange.is_repeatable:
            return "the step would have to be repeated, which TensorFlow's collectives cannot do"
        # `rows_at` may communicate with the other workers.
        if self._exchange.is_split and not all(
            all(self._feed.rows_at(step)) for step in window.steps
        ):
            return "the step would have to be repeated, but has no rows on a worker that uses XLA"
        return None

    def _has_made_variables(self, window: _Window) -> bool:
        """Return whether there are new variables, except metrics; their old values are unknown."""
        made = set(self._state.variables) - window.known
        return bool(made - {id(v.value) for v in self._model.metrics_variables})

    def _repeat(self, window: _Window) -> tuple[Values, list[Exchanged], str | None]:
        """Let the workers repeat the steps.

        Returns the variables after them, their exchanges, and why they failed, if they did.
        """
        self._state.write(window.before)
        self._exchange.copy_exchanges()
        batches = self._read_batches(window)
        reason = None
        try:
            with self._exchange.repeating(len(window.steps)):
                for batch, changed in zip(batches, window.changed, strict=True):
                    self._state.write(changed)
                    self._process.take(self._model.train_step, batch)
        except Exception as error:  # operations that need a graph fail on all workers
            reason = (
                f"it has to be repeated, but fails outside of a graph ({describe_error(error)})"
            )
        if self._is_true_anywhere(reason is not None):
            reason = reason or "it has to be repeated, but fails on another worker"
        return self._state.read(), self._exchange.take_exchanges(), reason

    def _pack(self, window: _Window, found: Values, exchanged: Sequence[Exchanged]) -> bytes:
        """Return what rank 0 needs from this worker."""
        changes = {}
        for name, keys in (
            ("metrics", self._state.list_metrics(self._exchange.shared_variables)),
            ("statistics", self._state.list_statistics()),
        ):
            # Metrics that the step created have no value before.
            pairs = [(n, key) for n, key in enumerate(keys) if key in window.before]
            changes[name] = {
                n: found[key].astype(np.float64) - window.before[key]
                for n, key in pairs
                if not np.array_equal(found[key], window.before[key])
            }
        rows = [pack_rows(*self._feed.read_step(step)) for step in window.steps]
        parts = [
            {"needed": one.needed, "means": one.means[: len(one.needed)]}
            for one in (exchanged if self._exchange.shards is not None else [])
        ]
        return encode_state({"rows": rows, "parts": parts, **changes})

    def _lacks_memory(self, window: _Window) -> bool:
        """Return whether a step on the rows of all workers may exceed the available memory."""
        # The most that this worker's own rows have taken.
        self._own_memory = max(self._own_memory, read_peak_memory() - window.memory)
        needed = self._collective.world_size * self._own_memory + self._state.count_bytes()
        return needed > self._find_room()

    def _find_room(self) -> float:
        """Return how many bytes of memory an audit may use."""
        limit = np.inf if self._limit is None else max(0.0, self._limit - read_memory())
        return _SHARE_OF_MEMORY * min(find_free_memory(), limit)

    def _skip(self, reason: str) -> None:
        self.report.undecided += 1
        if reason not in self.report.skipped:
            self.report.skipped.append(reason)
            self._emit(Note(_ABOUT_SKIPPING.format(self._epoch + 1, reason)))

    def _list_left_out(self) -> list[str]:
        """Return what is not compared in any step, in words."""
        others = [] if self._has_parts() else self._exchange.variables_of_others
        left_out = {
            "moving statistics of normalization over each worker's rows": find_unsynchronized(
                self._model
            ),
            "updates of other workers' parts (`shard_optimizer`)": others,
            "random numbers of XLA or of a global generator": self._draws_others(),
            "the exchange of the accumulated gradients that were applied": self._exchange.adds_up
            and (self._is_repeated(self.noise.is_drawn) or self._has_parts()),
        }
        return [name for name, is_left_out in left_out.items() if is_left_out]

    def _obey(self, verdict: dict[str, Any], is_new: bool) -> None:
        """Record rank 0's result on all ranks."""
        report = self.report
        if "skipped" in verdict:
            self._skip(verdict["skipped"])
            return
        report.steps += verdict["steps"] if is_new else 0
        report.rows += verdict["rows"] if is_new else 0
        report.weights = max(report.weights, verdict["weights"])
        report.metrics = max(report.metrics, verdict["metrics"])
        report.zeros = max(report.zeros, verdict.get("zeros", 0.0))
        report.left_out = self._list_left_out()
        error = verdict.get("error")
        if error is None:
            return
        if not self._only_warns:
            raise InputError(
                f"{error}. With `{setting(audit='warn')}` in `exchange`, this is only a warning"
            )
        if not report.differences:
            self._emit(Note(error + _ABOUT_WARNING))
        report.differences.append(error)


def _read_traced(model: Any) -> Any:
    """Return the Python values of a model that a traced step has read."""
    return find_trained(model), find_own_settings(model)
