"""Duration of a worker's steps, split into data, computing, communication and waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, cast

import keras
import numpy as np
import numpy.typing as npt

from pybackend.core.collective import Collective, CostModel
from pybackend.core.job.report import PARTS, StepTimes
from pybackend.core.machine import read_boot
from pybackend.core.machine.capacity import count_cores

# More are not read ahead; the times of an evaluation are never taken.
_MOST = 4096


class Arrivals:
    """Times at which an epoch's batches were ready; they are often read ahead of time."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, float]] = deque(maxlen=_MOST)

    def clear(self) -> None:
        """Begin an epoch: batches that were read ahead are discarded."""
        self._noted.clear()

    def note(self, steps: int) -> None:
        self._noted.append((steps, time.perf_counter()))

    def take(self, steps: int) -> list[float]:
        """Return when each of the next batches was ready; fewer if the time of some is unknown."""
        found: list[float] = []
        while len(found) < steps and self._noted:
            there, at = self._noted.popleft()
            taken = min(there, steps - len(found))
            found += [at] * taken
            if there > taken:
                self._noted.appendleft((there - taken, at))
        return found


Array = npt.NDArray[Any]

# The first steps are traced and fill caches; the last steps of the others are stored.
_WARM_UP = 3
_KEPT = 512
_STRETCHES = 10
_QUANTILES = 21


class StepClock(keras.callbacks.Callback):
    """First of the callbacks: times each step, without an extra call to the host.

    A step lasts until the next one begins; the last step of an epoch lasts until its own end. A
    step has waited for data if its batch arrived after the step began. `held` records how long an
    exchange delayed the step; the rest of its time is computing. Several steps per execution are
    timed together, and are assumed to be equal except for how long they waited for data.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._held, self._left_out = 0.0, 0.0
        self._begun: tuple[int, float, float] | None = None
        self._last = 0, 0.0
        self._seen = 0
        # For each execution: its steps, and seconds in total, for data, and in exchanges.
        self._timed: deque[tuple[int, float, float, float]] = deque(maxlen=_KEPT)
        self.buffers: list[int] = []
        """Bytes of the buffers that a step exchanges."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Time an exchange that the step waits for within this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._held += time.perf_counter() - began

    def watch(self, collective: Collective) -> Collective:
        """Wrap a collective so that its calls count as exchanges of the step."""
        return cast(Collective, _Watched(collective, self))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        self._close(batch, now - self._left_out)
        self._begun, self._left_out = (batch, now, self._held), 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last = batch + 1, time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._close(*self._last)
        self._begun, self._left_out = None, 0.0

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Exclude the time spent within this context from the step, which has ended."""
        began, held = time.perf_counter(), self._held
        try:
            yield
        finally:
            self._held = held
            self._left_out += time.perf_counter() - began

    def agree(self, collective: Collective, costs: CostModel | None) -> StepTimes | None:
        """Return the measured times, or None after too few steps; all ranks must call it together.

        The last rank to reach an exchange does not wait. So the shortest time of an exchange on any
        rank is communication, and the additional time on the other ranks is waiting. ``costs`` were
        measured when the workers connected.
        """
        timed = np.array(list(self._timed), np.float64).reshape(-1, 4)
        everyone = collective.all_gather(np.ascontiguousarray(timed[:, 3]))
        common = min(len(one) for one in everyone)
        if common == 0:
            return None
        steps, whole, data, held = timed[-common:].T
        communication = np.min([one[-common:] for one in everyone], axis=0)
        own = whole - held
        data = np.minimum(data, own)
        parts = np.stack([data, own - data, communication, held - communication], axis=1)
        stretches = [
            (parts[rows].sum(axis=0) / steps[rows].sum()).tolist()
            for rows in np.array_split(np.arange(common), min(_STRETCHES, common))
        ]
        means = (parts.sum(axis=0) / steps.sum()).tolist()
        each = np.repeat(whole / steps, steps.astype(int))
        return StepTimes(
            steps=int(steps.sum()),
            **dict(zip(PARTS, means, strict=True)),
            jitter=float(np.log(np.maximum(own, 1e-9) / steps).std()),
            stretches=stretches,
            buffers=list(self.buffers),
            costs=None if costs is None else list(astuple(costs)),
            cores=count_cores(),
            machine=read_boot(),
            quantiles=np.quantile(each, np.linspace(0, 1, _QUANTILES)).tolist(),
        )

    def _close(self, stop: int, now: float) -> None:
        """Record the execution that has ended; ``stop`` is the step after its last."""
        if self._begun is None or stop <= self._begun[0]:
            return
        first, began, held = self._begun
        steps = stop - first
        waited = _find_wait(began, now, steps, self._arrivals.take(steps))
        self._seen += 1
        if self._seen > _WARM_UP:
            self._timed.append((steps, now - began, waited, self._held - held))


def _find_wait(began: float, ended: float, steps: int, there: Sequence[float]) -> float:
    """Return how long consecutive steps waited, given when their batches were ready.

    From each time at which a step could begin, the remaining steps took at most the time until the
    end.
    """
    left = [(began, steps), *((at, steps - number) for number, at in enumerate(there))]
    longest = min((ended - at) / count for at, count in left)
    return ended - began - steps * max(longest, 0.0)


# Of these, a rank waits for the others.
_TIMED = {"all_reduce", "reduce_scatter", "gather_parts", "all_gather", "gather", "broadcast"}


class _Watched:
    """Collective whose calls are timed as exchanges of the step."""

    def __init__(self, collective: Collective, clock: StepClock) -> None:
        self._collective = collective
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._collective, name)
        if name not in _TIMED:
            return found

        def timed(*args: Any, **options: Any) -> Any:
            with self._clock.held():
                return found(*args, **options)

        return timed
