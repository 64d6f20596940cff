"""Rows and steps of each worker, and the parts of its step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pybackend.job.report import PARTS
from pybackend.reporting.charts import Bar, Box, draw_bars, draw_boxes, show_number, show_seconds
from pybackend.reporting.html import Cell, make_charts, make_figure, make_table, make_text

Worker = Mapping[str, Any]
# Indices in the 21 quantiles of `StepTimes`: extremes, 5 %, 25 %, 50 %, 75 %, 95 %.
_BOX = (0, 1, 5, 10, 15, 19, 20)


def describe_workers(record: Mapping[str, Any]) -> Iterator[str]:
    """Return charts and tables of the workers of a record."""
    workers = record.get("workers") or []
    if not workers:
        return
    # Workers of an elastic training are named by their numbers, which never change.
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
    yield make_table("Work of each worker", _DONE, [_list_done(one) for one in workers], "workers")
    timed = [worker for worker in workers if worker.get("step_times")]
    if timed:
        caption = "Parts of the time of a step; the first steps are not timed"
        yield make_table(caption, _STEPS, [_list_times(one) for one in timed], "steps")


_DONE = ("worker", "host", "process", "rows", "steps", "time", "waited", "rows per second")
_STEPS = ("worker", "timed steps", *PARTS, "shortest", "median", "95th percentile", "longest")


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
        svg = draw_bars("rows per second of each worker", bars, _show_rate, "chart-rates")
        below = "Rows per second of the timed steps, including waiting"
        yield make_figure("Throughput", svg, below)
    bars = [Bar(_name(one), [("only", float(one["rows"]))]) for one in workers]
    svg = draw_bars("rows of each worker's shard", bars, show_number, "chart-rows")
    yield make_figure("Shard sizes", svg, "Rows of the data per worker")
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
        yield make_figure("Parts of the time of a step", svg, kinds=PARTS)
    boxed = [worker for worker in timed if worker["step_times"].get("quantiles")]
    if boxed:
        steps = sum(worker["step_times"]["steps"] for worker in boxed)
        boxes = [
            Box(_name(one), [one["step_times"]["quantiles"][place] for place in _BOX])
            for one in boxed
        ]
        svg = draw_boxes("distribution of step times by worker", boxes, show_seconds, "chart-steps")
        below = (
            f"{show_number(steps)} timed steps: box 25 % to 75 % with the median, line 5 % to "
            "95 %, dots the shortest and, unless far away, the longest"
        )
        yield make_figure("Step times", svg, below)


def _name(worker: Worker) -> str:
    return f"worker {worker['number']}"


def _show_rate(value: float) -> str:
    return show_number(float(f"{value:.4g}"))
