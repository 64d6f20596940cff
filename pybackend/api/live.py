"""Progress that is updated in place, on a terminal or in a notebook."""

from __future__ import annotations

from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from pybackend.api.display import Lines
from pybackend.api.result_text import show_loss
from pybackend.job.arguments import counted
from pybackend.job.job import Job
from pybackend.job.messages import EpochEnded, StepEnded

# Number of reports over which the speed is measured; the very first step is slow.
_RECENT = 20


class Live(Lines):
    """Show a progress bar for the current epoch, below all lines."""

    shows_steps = True

    def __init__(self, shows_printed: bool, console: Console | None = None) -> None:
        super().__init__(shows_printed)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._speed = Speed()
        self._workers = ""
        self._task: TaskID | None = None

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._progress.stop()

    def begin(self, text: str, job: Job) -> None:
        """Show the bar."""
        self._workers = counted(job.workers, "worker")
        self.line(text)
        self._progress.start()
        self._task = self._progress.add_task(f"{self._workers}  starting", total=None, figures="")

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        # As text: rich would interpret brackets as markup, and colour numbers.
        self._progress.console.print(Text(text), highlight=False, soft_wrap=True)

    def step(self, event: StepEnded) -> None:
        """Update the bar after a step."""
        if self._task is None:
            return
        self._speed.note(event)
        loss = event.logs.get("loss")
        values = [
            f"step {event.step}/{event.steps}",
            f"loss {show_loss(loss)}" if isinstance(loss, float) else "",
            *self._speed.describe(event),
        ]
        self._progress.update(
            self._task,
            description=f"{self._workers}  epoch {event.epoch}/{event.epochs}",
            completed=event.step,
            total=event.steps,
            figures="  ".join(filter(None, values)),
            refresh=True,
        )

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Reset the bar for the next epoch, and print the line of this one."""
        self._speed.end_epoch()
        if self._task is not None:
            following = min(event.epoch + 1, event.epochs)
            self._progress.update(
                self._task,
                description=f"{self._workers}  epoch {following}/{event.epochs}",
                completed=0,
                figures="",
            )
        self.line(text)


class Speed:
    """Speed of the last reported steps."""

    def __init__(self) -> None:
        self._recent: deque[StepEnded] = deque(maxlen=_RECENT)

    def note(self, event: StepEnded) -> None:
        """Add a report."""
        self._recent.append(event)

    def end_epoch(self) -> None:
        """Forget the reports: each epoch counts its steps and rows from 0."""
        self._recent.clear()

    def describe(self, event: StepEnded) -> list[str]:
        """Return rows per second and the remaining time; nothing after only one report."""
        first = self._recent[0] if self._recent else event
        steps, seconds = event.step - first.step, event.seconds - first.seconds
        if steps <= 0 or seconds <= 0:
            return []
        left = event.steps - event.step + event.steps * (event.epochs - event.epoch)
        speed = (event.rows - first.rows) / seconds
        return [f"{speed:,.0f} rows/s", f"ETA {show_seconds(left * seconds / steps)}"]


def show_seconds(seconds: float) -> str:
    """Format a time, as ``1:05`` or ``2:01:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
