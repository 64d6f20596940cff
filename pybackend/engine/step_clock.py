"""Where the time of a worker's steps goes: data, computing, communication, waiting for others."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt

from pybackend.collective import Collective, Compression
from pybackend.engine.arrivals import Arrivals
from pybackend.job.report import PARTS, StepTimes

Array = npt.NDArray[Any]
_T = TypeVar("_T")

# The first steps are traced and fill caches; of the others the last so many are kept.
_WARM_UP = 3
_KEPT = 512
_STRETCHES = 10
_QUANTILES = 21


class StepClock(keras.callbacks.Callback):
    """First of the callbacks: times each step, without a call to the host of its own.

    A step lasts until the next one begins; the last of an epoch, until it has ended. It has waited
    for data if its batch came after it had begun. What an exchange held up is noted by `held`; all
    the rest is computing. Several steps per execution are timed together, and taken to be alike but
    for their waits for data.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._held = 0.0
        self._begun: tuple[int, float, float] | None = None
        self._left_out = 0.0
        self._last = 0, 0.0
        self._seen = 0
        # Of each execution: its steps, and seconds of all of it, for data, and held up.
        self._timed: deque[tuple[int, float, float, float]] = deque(maxlen=_KEPT)
        self.buffers: list[int] = []
        """Bytes of the buffers that a step exchanges."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """The step can do nothing else in this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._held += time.perf_counter() - began

    def watch(self, collective: Collective) -> Collective:
        """The same collective, whose calls hold up the step."""
        return _Watched(collective, self)

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
        """The step has ended: what comes in this context is none of its parts."""
        began, held = time.perf_counter(), self._held
        try:
            yield
        finally:
            self._held = held
            self._left_out += time.perf_counter() - began

    def agree(self, collective: Collective, costs: Sequence[float] | None) -> StepTimes | None:
        """What has been measured; all ranks call it together. None if the steps were too few.

        The rank that comes last to an exchange waits for nobody: so the least time that one of the
        ranks was held up in a step is communication, and what the others were held up longer they
        have waited.

        Parameters
        ----------
        costs
            Latency, seconds per byte and per added byte, as measured when the workers met.
        """
        timed = np.array(list(self._timed), np.float64).reshape(-1, 4)
        held = np.ascontiguousarray(timed[:, 3])
        everyone = collective.all_gather(held)
        common = min(len(one) for one in everyone)
        if common == 0:
            return None
        timed, held = timed[-common:], held[-common:]
        steps, whole, data = timed[:, 0], timed[:, 1], timed[:, 2]
        communication = np.min([one[-common:] for one in everyone], axis=0)
        data = np.minimum(data, whole - held)
        own = whole - held
        parts = np.stack([data, own - data, communication, held - communication], axis=1)
        stretches = [
            (part.sum(axis=0) / count.sum()).tolist()
            for part, count in zip(
                np.array_split(parts, min(_STRETCHES, common)),
                np.array_split(steps, min(_STRETCHES, common)),
                strict=True,
            )
        ]
        means = (parts.sum(axis=0) / steps.sum()).tolist()
        return StepTimes(
            steps=int(steps.sum()),
            **dict(zip(PARTS, means, strict=True)),
            jitter=float(np.log(np.maximum(own, 1e-9) / steps).std()),
            stretches=stretches,
            buffers=list(self.buffers),
            costs=None if costs is None else list(costs),
            cores=os.cpu_count() or 0,
            machine=_identify_machine(),
            quantiles=np.quantile(
                np.repeat(whole / steps, steps.astype(int)), np.linspace(0, 1, _QUANTILES)
            ).tolist(),
        )

    def _close(self, stop: int, now: float) -> None:
        """Note the execution that has ended where ``stop`` is the step after its last."""
        if self._begun is None or stop <= self._begun[0]:
            return
        first, began, held = self._begun
        steps = stop - first
        waited = _find_wait(began, now, steps, self._arrivals.take(steps))
        self._seen += 1
        if self._seen > _WARM_UP:
            self._timed.append((steps, now - began, waited, self._held - held))


def _find_wait(began: float, ended: float, steps: int, there: Sequence[float]) -> float:
    """How long steps in a row have waited for their batches, which were there at these times.

    From each moment at which one could begin, all that were left had at most the time to the end.
    """
    left = [(began, steps), *((at, steps - number) for number, at in enumerate(there))]
    longest = min((ended - at) / count for at, count in left)
    return ended - began - steps * max(longest, 0.0)


def _identify_machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class _Watched:
    """A collective of which each call holds up the step."""

    def __init__(self, collective: Collective, clock: StepClock) -> None:
        self._collective = collective
        self._clock = clock
        self.rank = collective.rank
        self.world_size = collective.world_size

    @property
    def waited(self) -> float:
        """See `Collective`."""
        return self._collective.waited

    def all_reduce(self, buffer: Array, codec: Compression | None = None) -> None:
        """See `Collective`."""
        self._time(lambda: self._collective.all_reduce(buffer, codec))

    def all_gather(self, part: Array) -> list[Array]:
        """See `Collective`."""
        return self._time(lambda: self._collective.all_gather(part))

    def gather(self, part: Array, root: int = 0) -> list[Array]:
        """See `Collective`."""
        return self._time(lambda: self._collective.gather(part, root))

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """See `Collective`."""
        self._time(lambda: self._collective.broadcast(buffer, root))

    def close(self) -> None:
        """See `Collective`."""
        self._collective.close()

    def _time(self, call: Callable[[], _T]) -> _T:
        with self._clock.held():
            return call()
