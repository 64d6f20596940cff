"""Events of a job as lines in the user's console."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def printer(verbose: int) -> Callable[[dict[str, Any]], None]:
    """What prints the events of a job: 0 nothing, 1 epochs, 2 also the workers' own lines."""

    def show(event: dict[str, Any]) -> None:
        # All ranks tell the same epochs and notes.
        if verbose >= 1 and event["event"] == "epoch" and event["rank"] == 0:
            print(epoch_line(event), flush=True)
        elif verbose >= 1 and event["event"] == "note" and event["rank"] == 0:
            print(f"note: {event['text']}", flush=True)
        elif verbose >= 2 and event["event"] == "line":
            print(f"[{event['rank']}] {event['text']}", flush=True)

    return show


def epoch_line(event: dict[str, Any]) -> str:
    """One line for an epoch, e.g. ``epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)``."""
    figures = "  ".join(
        f"{name} {value:.4f}" for name, value in event["logs"].items() if isinstance(value, float)
    )
    return f"epoch {event['epoch']}/{event['epochs']}  {figures}  ({event['seconds']:.1f} s)"
