"""Events of a job as lines in the user's console."""

from __future__ import annotations

from pybackend.job.messages import Emit, EpochEnded, Event, Note, PrintedLine


def printer(verbose: int) -> Emit:
    """What prints the events of a job: 0 nothing, 1 epochs, 2 also the workers' own lines."""

    def show(event: Event) -> None:
        # All ranks report the same epochs and notes.
        if verbose >= 1 and event.rank == 0 and isinstance(event, EpochEnded):
            print(epoch_line(event), flush=True)
        elif verbose >= 1 and event.rank == 0 and isinstance(event, Note):
            print(f"note: {event.text}", flush=True)
        elif verbose >= 2 and isinstance(event, PrintedLine):
            print(f"[{event.rank}] {event.text}", flush=True)

    return show


def epoch_line(event: EpochEnded) -> str:
    """One line for an epoch, e.g. ``epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)``."""
    figures = "  ".join(
        f"{name} {value:.4f}" for name, value in event.logs.items() if isinstance(value, float)
    )
    return f"epoch {event.epoch}/{event.epochs}  {figures}  ({event.seconds:.1f} s)"
