"""What each worker did: its rows, its steps, and where the time of these went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pybackend.job.report import PARTS
from pybackend.reporting.charts import Bar, Box, draw_bars, draw_boxes, show_number, show_seconds
from pybackend.reporting.html import Cell, make_charts, make_figure, make_table, make_text

Worker = Mapping[str, Any]
# Of the 21 quantiles of `StepTimes`: the extremes, 5 %, 25 %, 50 %, 75 %, 95 %.
_BOX = (0, 1, 5, 10, 15, 19, 20)


def describe_workers(record: Mapping[str, Any]) -> Iterator[str]:
    """Charts and a table of the workers of a record."""
    workers = record.get("workers") or []
    if not workers:
        return
    # As everywhere, workers of an elastic training are called by their numbers, which they keep.
    gangs = record.get("gangs") or []
    numbers = gangs[-1]["workers"] if len(gangs) > 1 else range(len(workers))
    workers = [{**worker, "number": numbers[worker["rank"]]} for worker in workers]
    straggler = record.get("straggler")
    if straggler:
        rank, seconds = straggler
        yield make_text(
            f"The others waited {show_seconds(seconds)} for worker {numbers[rank]}.", "bad"
        )
    yield make_charts(list(_draw(workers)))
    yield make_table("What each worker did", _DONE, [_list_done(one) for one in workers], "workers")
    timed = [worker for worker in workers if worker.get("step_times")]
    if timed:
        caption = "Where the time of a step goes; the first steps are not timed"
        yield make_table(caption, _STEPS, [_list_times(one) for one in timed], "steps")


_DONE = ("worker", "host", "process", "rows", "steps", "time", "waited", "rows a second")
_STEPS = ("worker", "timed steps", *PARTS, "shortest", "median", "95 % are below", "longest")


def _list_done(worker: Worker) -> list[Any]:
    return [
        worker["number"],
        worker["host"],
        str(worker["pid"]),
        worker["rows"],
        worker["steps"],
        _seconds(worker["seconds"]),
        _seconds(worker.get("waited")),
        _rate(worker.get("rows_per_second")),
    ]


def _list_times(worker: Worker) -> list[Any]:
    times = worker["step_times"]
    quantiles = times.get("quantiles") or [None] * 21
    return [
        worker["number"],
        times["steps"],
        *(_seconds(times[part]) for part in PARTS),
        *(_seconds(quantiles[place]) for place in (0, 10, 19, 20)),
    ]


def _seconds(value: float | None) -> Cell:
    return Cell(value, show_seconds(value))


def _rate(value: float | None) -> Cell:
    return Cell(value, "–" if value is None else show_number(float(f"{value:.4g}")))


def _draw(workers: Sequence[Worker]) -> Iterator[str]:
    if all(worker.get("rows_per_second") is not None for worker in workers):
        bars = [Bar(_name(one), [("only", one["rows_per_second"])]) for one in workers]
        svg = draw_bars("rows a second of each worker", bars, _show_rate, "chart-rates")
        below = "Rows trained on in a second of the timed steps, waiting included"
        yield make_figure("Throughput", svg, below)
    bars = [Bar(_name(one), [("only", float(one["rows"]))]) for one in workers]
    svg = draw_bars("rows of each worker's shard", bars, show_number, "chart-rows")
    yield make_figure("Shard sizes", svg, "Rows that each worker has of the data")
    if all(worker.get("waited") is not None for worker in workers):
        bars = [Bar(_name(one), [("waiting", one["waited"])]) for one in workers]
        svg = draw_bars("seconds that each worker waited", bars, show_seconds, "chart-waited")
        yield make_figure("Waiting", svg, "Time spent waiting for other workers")
    timed = [worker for worker in workers if worker.get("step_times")]
    if timed:
        bars = [
            Bar(_name(one), [(part, one["step_times"][part]) for part in PARTS]) for one in timed
        ]
        svg = draw_bars(
            "seconds of a step by worker, in four parts", bars, show_seconds, "chart-parts"
        )
        yield make_figure("Where the time of a step goes", svg, kinds=PARTS)
    boxed = [worker for worker in timed if worker["step_times"].get("quantiles")]
    if boxed:
        steps = sum(worker["step_times"]["steps"] for worker in boxed)
        boxes = [
            Box(_name(one), [one["step_times"]["quantiles"][place] for place in _BOX])
            for one in boxed
        ]
        svg = draw_boxes("distribution of step times by worker", boxes, show_seconds, "chart-steps")
        below = (
            f"Of {show_number(steps)} timed steps: half are in the box, nine in ten between the "
            "ends of the line; dots are the shortest and, unless far away, the longest"
        )
        yield make_figure("Step times", svg, below)


def _name(worker: Worker) -> str:
    return f"worker {worker['number']}"


def _show_rate(value: float) -> str:
    return show_number(float(f"{value:.4g}"))
