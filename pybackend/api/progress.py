"""Events of a job as lines in the user's console."""

from __future__ import annotations

import time

from pybackend.job.messages import Emit, EpochEnded, Event, Note, PrintedLine, Waits

# Workers that wait for the same one say so within seconds, and then not for a minute.
_RECENT_SECONDS = 20.0


def printer(verbose: int) -> Emit:
    """What prints the events of a job: 0 nothing, 1 epochs, 2 also the workers' own lines."""

    waits = _Waits()

    def show(event: Event) -> None:
        # All ranks report the same epochs and notes.
        if verbose >= 1 and event.rank == 0 and isinstance(event, EpochEnded):
            print(epoch_line(event), flush=True)
        elif verbose >= 1 and event.rank == 0 and isinstance(event, Note):
            print(f"note: {event.text}", flush=True)
        elif verbose >= 1 and isinstance(event, Waits):
            if text := waits.describe(event):
                print(f"note: {text}", flush=True)
        elif verbose >= 2 and isinstance(event, PrintedLine):
            print(f"[{event.rank}] {event.text}", flush=True)

    return show


def epoch_line(event: EpochEnded) -> str:
    """One line for an epoch, e.g. ``epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)``."""
    figures = "  ".join(
        f"{name} {value:.4f}" for name, value in event.logs.items() if isinstance(value, float)
    )
    return f"epoch {event.epoch}/{event.epochs}  {figures}  ({event.seconds:.1f} s)"


class _Waits:
    """Of the workers that wait for each other, the one for whom all wait."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._named: dict[int, float] = {}

    def describe(self, event: Waits) -> str | None:
        """What to say; None of a worker that waits for others itself, or was named just now."""
        now = time.monotonic()
        self._heard[event.rank] = now
        waits_too = now - self._heard.get(event.peer, -_RECENT_SECONDS) < _RECENT_SECONDS
        was_named = now - self._named.get(event.peer, -_RECENT_SECONDS) < _RECENT_SECONDS
        if not event.is_second or waits_too or was_named:
            return None
        self._named[event.peer] = now
        return (
            f"all wait for worker {event.peer}, for {event.seconds:.0f} s now: it reads, computes, "
            "or is in a callback"
        )
