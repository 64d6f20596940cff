"""Measure how training scales."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pybackend.core.api.calls import explain_arguments
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import check_choice, check_whole_number, counted
from pybackend.core.launchers import without_fork_server
from pybackend.core.words import kind_of, setting, show
from pybackend.scaling import measured
from pybackend.scaling.scaling_result import ScalingResult
from pybackend.scaling.script_hook import ScaleOrder, read_scale, write_order

_STDERR = 2  # a file descriptor: a notebook's sys.stderr has none
_BATCH_SIZE = 32  # the default of `barrier_train`


@dataclass(frozen=True)
class FunctionRun:
    """Callable that runs ``train(workers=..., batch_size=...)``, which returns a `TrainResult`.

    The workers share one batch, or have one batch each.
    """

    train: Callable[..., Any]
    batch_size: int

    def __call__(self, workers: int, is_shared: bool) -> measured.ScaledTraining:
        own = measured.share_batch(self.batch_size, workers) if is_shared else self.batch_size
        result = self.train(workers=workers, batch_size=own)
        if not isinstance(result, TrainResult):
            raise InputError(
                f"`train` must return the result of barrier_train(), not {kind_of(result)}"
            )
        if len(result.workers) != workers:
            raise InputError(
                f"`train` was called with {setting(workers=workers)}, but {len(result.workers)} "
                "workers trained: pass its argument `workers` on to barrier_train()"
            )
        rows = measured.count_rows(result, own)
        return measured.ScaledTraining(rows, self.batch_size, result.workers)


@dataclass(frozen=True)
class ScaledScript:
    """As `FunctionRun`, for a script in its own process; its output goes to standard error."""

    command: tuple[str, ...]
    batch_size: int | None
    steps: int | None

    def __call__(self, workers: int, is_shared: bool) -> measured.ScaledTraining:
        with _ending_with_exit(), tempfile.TemporaryDirectory(prefix="tfdist-scale-") as folder:
            order = ScaleOrder(workers, is_shared, self.batch_size, self.steps, folder)
            environment = write_order(order)
            ended = subprocess.run(self.command, env=environment, stdout=_STDERR, check=False)
            found = read_scale(folder)
        shown = " ".join(self.command[1:])
        if ended.returncode:
            raise ClusterError(
                f"{shown} exited with status {ended.returncode} in the run with "
                f"{counted(workers, 'worker')}: see its output above"
            )
        if found is None:
            raise InputError(f"{shown} did not call barrier_train(), or exited before it ended")
        return found


@contextmanager
def _ending_with_exit() -> Iterator[None]:
    """Make SIGTERM raise `SystemExit`, so that the script does not outlive this process."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_run(
    train: Any, arguments: Sequence[str], batch_size: int | None, steps: int | None
) -> FunctionRun | ScaledScript:
    """Return a callable that runs a function, or the Python or R script at a path."""
    if isinstance(train, (str, os.PathLike)):
        return ScaledScript(_read_command(os.fspath(train), arguments), batch_size, steps)
    if not callable(train) or hasattr(train, "fit"):  # a model is callable, too
        raise InputError(
            "`train` must be a function that calls barrier_train(), or the path of a script, not "
            f"{type(train).__name__}"
        )
    if arguments:
        raise InputError("`arguments` can only be passed to a script: a function takes none")
    if steps is not None:
        raise InputError(
            "`steps` only applies to a script: a function sets its own number of steps"
        )
    try:
        inspect.signature(train).bind(workers=1, batch_size=1)
    except TypeError as error:
        raise InputError(
            f"`train` is called as train({setting(workers=...)}, {setting(batch_size=...)}), which "
            f"fails: {error}"
        ) from None
    return FunctionRun(train, batch_size or _BATCH_SIZE)


def _read_command(path: str, arguments: Sequence[str]) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InputError(f"the script {path} cannot be read: {error.strerror}") from error
    if path.lower().endswith(".r"):
        rscript = shutil.which("Rscript")
        if rscript is None:
            raise InputError(f"{path} needs R, but Rscript is not on the PATH")
        return (rscript, path, *arguments)
    if not path.endswith(".py"):
        raise InputError(f"the script must be a .py or a .R file, not {path}")
    try:
        compile(content, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"the script {path} is not Python: {error}") from error
    return (sys.executable, path, *arguments)


_MOST = 100_000


@explain_arguments
def bench_scale(
    train: Callable[..., Any] | str | os.PathLike[str],
    workers: Sequence[int] = (1, 2, 4),
    *,
    mode: measured.Mode | Literal["both"] = "both",
    batch_size: int | None = None,
    steps: int | None = None,
    repeats: int = 1,
    arguments: Sequence[str] = (),
    verbose: int = 1,
) -> ScalingResult:
    """Train with different numbers of workers, and compare their step times.

    Parameters
    ----------
    train
        A function, called as ``train(workers=..., batch_size=...)``, that passes both to
        `barrier_train` and returns its result; or the path of a script that calls `barrier_train`.
        A script runs in its own process, where `barrier_train` uses the number of workers and the
        batch size given here instead of the script's, and does not save checkpoints. If it is
        called several times, the last call counts. A training run should take at least 50 steps:
        the first three are not measured.
    workers
        The numbers of workers.
    mode
        ``"strong"``: the workers share one batch. ``"weak"``: each has its own batch. ``"both"``.
    batch_size
        Number of rows in that batch. For strong scaling, it must be divisible by every number of
        workers. None: 32, or the script's value.
    steps
        Number of steps in a script's training run, which then takes one epoch. None: as in the
        script.
    repeats
        Number of runs of each configuration, interleaved.
    arguments
        Arguments of the script.
    verbose
        1 prints one line per training run, 0 nothing.

    Returns
    -------
    ScalingResult
        For each mode and number of workers, its ``rows`` have the seconds per step, divided into
        data, computing, communication and waiting for others; and rows per second, speed-up and
        efficiency. ``print()`` shows them as a table.

    Raises
    ------
    InputError
        An argument is invalid, and nothing was started; or the training run cannot be measured.
    ClusterError
        The script failed.
    """
    counts = _check_workers(workers)
    chosen = check_choice("mode", mode, choices=[*measured.MODES, "both"])
    modes = [one for one in measured.MODES if chosen in (one, "both")]
    repeats = check_whole_number("repeats", repeats, least=1)
    if batch_size is not None:
        batch_size = check_whole_number("batch_size", batch_size, least=1)
    verbose = check_whole_number("verbose", verbose, least=0, most=1)
    if steps is not None:
        steps = check_whole_number("steps", steps, least=5)
    run = make_run(train, [str(word) for word in arguments], batch_size, steps)
    if run.batch_size is not None and "strong" in modes:
        for count in counts:
            measured.share_batch(run.batch_size, count)
    # With one worker, strong and weak scaling are the same training.
    order = list(dict.fromkeys((n, m == "strong" and n > 1) for m in modes for n in counts))
    found: dict[tuple[int, bool], list[measured.ScaledTraining]] = {key: [] for key in order}
    with without_fork_server():
        # Interleaved: a machine that slows down meanwhile slows all of them.
        for count, is_shared in order * repeats:
            training = run(count, is_shared)
            found[count, is_shared].append(training)
            if verbose:
                print(_describe(training, is_shared), flush=True)
    rows = [measured.make_row(m, found[n, m == "strong" and n > 1]) for m in modes for n in counts]
    everyone = [report for runs in found.values() for one in runs for report in one.reports]
    return ScalingResult(measured.compare_rows(rows), sorted({report.host for report in everyone}))


def _check_workers(workers: Any) -> list[int]:
    if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence) or not workers:
        raise InputError(
            f"`workers` must list numbers of workers, such as (1, 2, 4), not {show(workers)}"
        )
    counts = [check_whole_number("workers", one, least=1, most=_MOST) for one in workers]
    if len(set(counts)) < len(counts):
        raise InputError(f"`workers` contains a number twice: {counts}")
    return sorted(counts)


def _describe(training: measured.ScaledTraining, is_shared: bool) -> str:
    row = measured.make_row("strong" if is_shared else "weak", [training])
    return (
        f"{counted(row.workers, 'worker')}, {row.batch_size:g} rows each: "
        f"{row.seconds * 1e3:.2f} ms a step, {row.rows_per_second:.0f} rows per second"
    )
