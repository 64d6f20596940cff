"""Measure how a training scales."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pybackend.api.scaled import ScaledTraining, share_batch
from pybackend.api.signatures import explain_arguments
from pybackend.errors import InputError
from pybackend.job.arguments import check_choice, check_whole_number
from pybackend.scaling.result import ScalingResult
from pybackend.scaling.rows import Mode, compare_rows, make_row
from pybackend.scaling.runs import make_run

_MODES: dict[str, tuple[Mode, ...]] = {
    "strong": ("strong",),
    "weak": ("weak",),
    "both": ("strong", "weak"),
}
_MOST = 100_000


@explain_arguments
def bench_scale(
    train: Callable[..., Any] | str | os.PathLike[str],
    workers: Sequence[int] = (1, 2, 4),
    *,
    mode: Mode | Literal["both"] = "both",
    batch_size: int | None = None,
    steps: int | None = None,
    repeats: int = 1,
    arguments: Sequence[str] = (),
    verbose: int = 1,
) -> ScalingResult:
    """Train with several numbers of workers, and compare the times of their steps.

    Parameters
    ----------
    train
        A function, called as ``train(workers=..., batch_size=...)``, that passes both to
        `barrier_train` and returns its result; or the path of a script that calls `barrier_train`.
        A script runs in its own process, where `barrier_train` uses the workers and the batch size
        from here instead of the script's, and saves no checkpoint. If it is called several times,
        the last call counts. A training should take at least 50 steps: the first three are not
        measured.
    workers
        The numbers of workers.
    mode
        ``"strong"``: the workers share one batch. ``"weak"``: each has its own batch. ``"both"``.
    batch_size
        Rows of that batch. For strong scaling, every number of workers must divide it. None: 32, or
        the script's value.
    steps
        Steps of a script's training, which then takes one epoch. None: the script's number.
    repeats
        Number of runs of each training, in turns.
    arguments
        Arguments of the script.
    verbose
        1 prints a line per training, 0 nothing.

    Returns
    -------
    ScalingResult
        Its ``rows`` have, per mode and number of workers, the seconds of a step, divided into data,
        computing, communication and waiting for others; rows per second, speed-up and efficiency.
        ``print()`` shows them as a table.

    Raises
    ------
    InputError
        An argument is invalid, and nothing was started; or the training cannot be measured.
    ClusterError
        The script failed.
    """
    counts = _check_workers(workers)
    modes = _MODES[check_choice("mode", mode, choices=list(_MODES))]
    repeats = check_whole_number("repeats", repeats, least=1)
    if batch_size is not None:
        batch_size = check_whole_number("batch_size", batch_size, least=1)
    verbose = check_whole_number("verbose", verbose, least=0, most=1)
    if steps is not None:
        steps = check_whole_number("steps", steps, least=5)
    run = make_run(train, [str(word) for word in arguments], batch_size, steps)
    known = getattr(run, "batch_size", None)
    if known is not None and "strong" in modes:
        for count in counts:
            share_batch(known, count)
    # With one worker, strong and weak scaling are the same training.
    order = list(dict.fromkeys((n, m == "strong" and n > 1) for m in modes for n in counts))
    found: dict[tuple[int, bool], list[ScaledTraining]] = {key: [] for key in order}
    for _ in range(repeats):
        for count, is_shared in order:
            training = run(count, is_shared)
            found[count, is_shared].append(training)
            if verbose:
                print(_describe(training, is_shared), flush=True)
    rows = [make_row(m, found[n, m == "strong" and n > 1]) for m in modes for n in counts]
    everyone = [report for runs in found.values() for one in runs for report in one.reports]
    return ScalingResult(compare_rows(rows), sorted({report.host for report in everyone}))


def _check_workers(workers: Any) -> list[int]:
    if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence) or not workers:
        raise InputError(
            f"`workers` must list numbers of workers, such as (1, 2, 4), not {workers!r}"
        )
    counts = [check_whole_number("workers", one, least=1, most=_MOST) for one in workers]
    if len(set(counts)) < len(counts):
        raise InputError(f"`workers` names a number twice: {counts}")
    return sorted(counts)


def _describe(training: ScaledTraining, is_shared: bool) -> str:
    row = make_row("strong" if is_shared else "weak", [training])
    plural = "s" if row.workers > 1 else ""
    return (
        f"{row.workers} worker{plural}, {row.batch_size:g} rows each: "
        f"{row.seconds * 1e3:.2f} ms a step, {row.rows_per_second:.0f} rows per second"
    )
