"""The page of a training run: its frame, its charts and tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pybackend.core.api.markup import PAGE, Bar, Box, Cell, Line, draw_bars, draw_boxes, draw_lines
from pybackend.core.job.arguments import counted
from pybackend.core.job.report import PARTS
from pybackend.core.words import show_number, show_seconds, show_time, show_value

# The page makes no request and runs no script, so it may be opened and sent by mail as it is
# (test_it_needs_nothing_else).
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def make_page(title: str, body: Sequence[str], data: Mapping[str, Any]) -> str:
    """Return the page, with its data for programs in the element ``tfdist-run``."""
    style = Path(__file__).with_name("page.css").read_text()
    # Names of metrics and hosts are not ours. Only this character could end the script element
    # (test_what_comes_from_users_is_text).
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + '\n</main>\n<script type="application/json" id="tfdist-run">'
        + embedded
        + "</script>\n</body>\n</html>\n"
    )


def make_header(title: str, below: str) -> str:
    return PAGE.element("header", PAGE.text(title, tag="h1"), PAGE.text(below, "soft"))


def make_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Return tiles of pairs: a value and its name."""
    made = (
        PAGE.element("div", PAGE.text(value, tag="b"), PAGE.text(name, tag="span"), kind="tile")
        for value, name in tiles
    )
    return PAGE.element("div", *made, kind="tiles")


def make_section(title: str, *parts: str) -> str:
    """Return a section of the page; an empty string if it has no parts."""
    shown = "".join(parts)
    return PAGE.element("section", PAGE.text(title, tag="h2"), shown) if shown else ""


Worker = Mapping[str, Any]
# Indices in the 21 quantiles of `StepTimes`: extremes, 5 %, 25 %, 50 %, 75 %, 95 %.
_BOX = (0, 1, 5, 10, 15, 19, 20)


def describe_workers(record: Mapping[str, Any]) -> Iterator[str]:
    workers = record.get("workers") or []
    if not workers:
        return
    # Workers of an elastic training are named by their numbers, which never change.
    generations = record.get("generations") or []
    numbers = generations[-1]["workers"] if len(generations) > 1 else range(len(workers))
    workers = [{**worker, "number": numbers[worker["rank"]]} for worker in workers]
    if straggler := record.get("straggler"):
        rank, waited = straggler[0], show_seconds(straggler[1])
        yield PAGE.text(f"The others waited {waited} for worker {numbers[rank]}.", "bad")
    yield PAGE.charts(_draw(workers))
    yield PAGE.table(_DONE, [_list_done(one) for one in workers], "Work of each worker", "workers")
    timed = [worker for worker in workers if worker.get("step_times")]
    if timed:
        caption = "Breakdown of step time; the first steps are not timed"
        if route := timed[0]["step_times"].get("route"):
            caption += f"; the workers communicated through {route}"
        yield PAGE.table(_STEPS, [_list_times(one) for one in timed], caption, "steps")


_DONE = ("worker", "host", "process", "rows", "steps", "time", "waited", "rows per second")
_STEPS = ("worker", "timed steps", *PARTS, "shortest", "median", "95th percentile", "longest")


def _list_done(worker: Worker) -> list[Any]:
    rate = worker.get("rows_per_second")
    return [
        *(worker["number"], worker["host"], str(worker["pid"]), worker["rows"], worker["steps"]),
        _seconds(worker["seconds"]),
        _seconds(worker.get("waited")),
        Cell(rate, "–" if rate is None else _show_rate(rate)),
    ]


def _list_times(worker: Worker) -> list[Any]:
    times = worker["step_times"]
    quantiles = times.get("quantiles") or [None] * 21
    return [
        worker["number"],
        times["steps"],
        *(_seconds(times[part]) for part in PARTS),
        *(_seconds(quantiles[index]) for index in (0, 10, 19, 20)),
    ]


def _seconds(value: float | None) -> Cell:
    return Cell(value, show_seconds(value))


def _draw(workers: Sequence[Worker]) -> Iterator[str]:
    if all(worker.get("rows_per_second") is not None for worker in workers):
        bars = [Bar(_name(one), [("only", one["rows_per_second"])]) for one in workers]
        svg = draw_bars("rows per second of each worker", bars, _show_rate, "chart-rates")
        below = "Rows per second of the timed steps, including waiting"
        yield PAGE.figure("Throughput", svg, below)
    bars = [Bar(_name(one), [("only", float(one["rows"]))]) for one in workers]
    svg = draw_bars("rows of each worker's shard", bars, show_number, "chart-rows")
    yield PAGE.figure("Shard sizes", svg, "Data rows per worker")
    if all(worker.get("waited") is not None for worker in workers):
        bars = [Bar(_name(one), [("waiting", one["waited"])]) for one in workers]
        svg = draw_bars("seconds that each worker waited", bars, show_seconds, "chart-waited")
        yield PAGE.figure("Waiting", svg, "Time spent waiting for other workers")
    timed = [worker for worker in workers if worker.get("step_times")]
    if timed:
        parts = ([(part, one["step_times"][part]) for part in PARTS] for one in timed)
        bars = [Bar(_name(one), values) for one, values in zip(timed, parts, strict=True)]
        about = "step time by worker in seconds, in four parts"
        svg = draw_bars(about, bars, show_seconds, "chart-parts")
        yield PAGE.figure("Breakdown of step time", svg, kinds=PARTS)
    boxed = [worker for worker in timed if worker["step_times"].get("quantiles")]
    if boxed:
        steps = sum(worker["step_times"]["steps"] for worker in boxed)
        quantiles = ([one["step_times"]["quantiles"][index] for index in _BOX] for one in boxed)
        boxes = [Box(_name(one), values) for one, values in zip(boxed, quantiles, strict=True)]
        svg = draw_boxes("distribution of step times by worker", boxes, show_seconds, "chart-steps")
        below = (
            f"{show_number(steps)} timed steps: box 25 % to 75 % with the median, line 5 % to "
            "95 %, dots the shortest and, unless far away, the longest"
        )
        yield PAGE.figure("Step times", svg, below)


def _name(worker: Worker) -> str:
    return f"worker {worker['number']}"


def _show_rate(value: float) -> str:
    return show_number(float(f"{value:.4g}"))


Record = Mapping[str, Any]
_TITLES = {"tfdist": "tfdist", "python": "Python", "tensorflow": "TensorFlow", "keras": "Keras"}


def make_training_page(record: Record, title: str, summary: str | None) -> str:
    """Return the page for a `TrainResult.record`, or a part of it: the page lists missing parts.
    ``summary`` is Keras's summary of the model; None if the model cannot be loaded.
    """
    absent = ", ".join(_find_absent(record, summary))
    missing = [PAGE.text(f"This result does not include: {absent}.")] if absent else []
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    body = [
        make_header(title, f"Trained with tfdist. Report written {written}"),
        make_tiles(list(_find_tiles(record))),
        make_section("Training curves", *_describe_history(record)),
        make_section("Workers", *describe_workers(record)),
        make_section("Failures and restarts", *_describe_losses(record)),
        make_section("Model", *_describe_model(record, summary)),
        make_section("Settings and versions", *_describe_settings(record)),
        make_section("Not available", *missing),
    ]
    return make_page(title, body, {**record, "model_summary": summary})


def to_float(value: Any) -> float:
    """Convert a number in a record; None is NaN, and infinity is text, because JSON has neither."""
    return float("nan") if value is None else float(value)


def list_metrics(record: Record) -> dict[str, tuple[list[int], list[float]]]:
    """Return epochs and values of each metric; one entry per value if it has several."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for name, values in (record.get("history") or {}).items():
        epochs = (record.get("epochs_of") or {}).get(name) or list(range(1, len(values) + 1))
        if values and isinstance(values[0], list):
            for number in range(len(values[0])):
                found[f"{name}_{number + 1}"] = epochs, [to_float(v[number]) for v in values]
        elif values:
            found[name] = list(epochs), [to_float(value) for value in values]
    return found


def _find_tiles(record: Record) -> Iterator[tuple[str, str]]:
    for name, value in (record.get("metrics") or {}).items():
        yield show_number(to_float(value)), name.replace("_", " ")
    for name, (_, values) in list(list_metrics(record).items())[:6]:
        shown = name.removeprefix("val_").replace("_", " ")
        where = "validation" if name.startswith("val_") else "training"
        yield show_number(values[-1]), f"{shown}, {where}, last epoch"
    workers = record.get("workers") or []
    yield show_number(len(workers)), "workers" if len(workers) != 1 else "worker"
    if record.get("epochs") is not None:
        yield show_number(record["epochs"]), "epochs" if record["epochs"] != 1 else "epoch"
    yield show_number(sum(worker["rows"] for worker in workers)), "rows"
    if record.get("seconds") is not None:
        yield show_seconds(record["seconds"]), "for the whole call"
    if "epochs" in (parts := record.get("parts") or {}):
        yield show_seconds(parts["prepare"] + parts["start"]), "until the first epoch"
        yield show_seconds(parts["finish"]), "after the last epoch"
    audit = record.get("audit")
    if audit and audit["steps"]:
        largest = max(to_float(audit["weights"]), to_float(audit["metrics"]))
        steps = counted(audit["steps"], "step")
        yield f"{largest:.1g}", f"largest difference from one process, {steps}"
    rates = [worker.get("rows_per_second") for worker in workers]
    if rates and all(rate is not None for rate in rates):
        yield show_number(float(round(sum(rates)))), "rows per second, all workers"


def _describe_history(record: Record) -> Iterator[str]:
    metrics = list_metrics(record)
    if not metrics:
        yield PAGE.text("No epochs were run.")
        return
    charts: list[str] = []
    for name in (name for name in metrics if not name.startswith("val_")):
        shown = {"training": name, "validation": f"val_{name}"}
        lines = [Line(kind, kind, *metrics[own]) for kind, own in shown.items() if own in metrics]
        kinds = [line.kind for line in lines] if len(lines) > 1 else []
        ends = "; ".join(f"{line.name} ends at {show_number(line.y[-1])}" for line in lines)
        svg = draw_lines(f"{name} by epoch: {ends}", lines, f"curve-{len(charts)}")
        charts.append(PAGE.figure(name.replace("_", " "), svg, kinds=kinds))
    yield PAGE.charts(charts)
    by_epoch = {name: dict(zip(*one, strict=False)) for name, one in metrics.items()}
    epochs = sorted({epoch for values in by_epoch.values() for epoch in values})
    rows = [[epoch, *(values.get(epoch) for values in by_epoch.values())] for epoch in epochs]
    caption = "Metrics by epoch, over the rows of all workers"
    yield PAGE.table(["epoch", *metrics], rows, caption, "history")


def _describe_losses(record: Record) -> Iterator[str]:
    restarts, generations = record.get("restarts"), record.get("generations")
    if restarts:
        rows = [
            [number, show_time(one["time"]), one["lost"], one["checkpoint"] or "the beginning"]
            for number, one in enumerate(restarts, start=1)
        ]
        columns = ["restart", "when", "cause", "resumed from"]
        yield PAGE.table(columns, rows, "Restarts of the workers", "restarts")
    elif restarts is not None:
        # Elastic workers leave and join without a restart.
        is_same = not generations or len(generations) == 1
        rest = "s: the same workers trained from start to finish." if is_same else "."
        yield PAGE.text(f"No restart{rest}")
    if timeline := record.get("timeline"):
        yield make_timeline(timeline)
    if generations:
        rows = [
            [
                *(one["epoch"], one.get("step", 1), len(one["workers"])),
                *(_join(one["workers"]), _join(one["joined"])),
                "; ".join(f"{number}: {why}" for number, why in one["left"].items()),
            ]
            for one in generations
        ]
        columns = ["from epoch", "from step", "workers", "their numbers", "joined", "left"]
        yield PAGE.table(columns, rows, "Workers by epoch", "generations")


def make_timeline(timeline: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what each worker did and when; each row has the fields of `Moment`."""
    columns = ["worker", "host", "when", "state", "reason"]
    rows = [
        [one["rank"], one["host"], show_time(one["time"]), one["state"], one["reason"]]
        for one in timeline
    ]
    caption = "Timeline of each worker, on the clock of its host"
    return PAGE.table(columns, rows, caption, "timeline")


def _describe_model(record: Record, summary: str | None) -> Iterator[str]:
    size = record.get("model_bytes")
    digests = (worker.get("weights_sha256") for worker in record.get("workers") or [])
    pairs = {
        "format": record.get("model_format"),
        "size": None if size is None else f"{size:,} bytes",
        "file": record.get("model_uri"),
        "SHA-256 of the file": record.get("model_sha256"),
        "SHA-256 of the weights": next(filter(None, digests), None),
        "features": show_value(record["features"]) if record.get("features") else None,
        "classes": show_value(record["levels"]) if record.get("levels") else None,
        "for TensorBoard": record.get("tensorboard"),
    }
    yield PAGE.pairs([(name, str(text)) for name, text in pairs.items() if text], "model")
    if summary is not None:
        yield PAGE.code(summary)


def _describe_settings(record: Record) -> Iterator[str]:
    settings = dict(record.get("settings") or {})
    versions = settings.get("versions") or record.get("versions") or {}
    hosts = sorted({worker["host"] for worker in record.get("workers") or []})
    pairs = [(_TITLES.get(name, name), str(found)) for name, found in versions.items() if found]
    pairs.append(("hosts of workers", ", ".join(hosts)))
    settings = {"seed": record.get("seed"), **settings, "versions": None}
    pairs += [(name, show_value(one)) for name, one in settings.items() if one is not None]
    yield PAGE.pairs(pairs, "settings")


def _find_absent(record: Record, summary: str | None) -> Iterator[str]:
    workers = record.get("workers") or []
    if record.get("restarts") is None:
        yield "restarts"
    if not any(worker.get("step_times") for worker in workers):
        yield "step times (too few steps, or gradients exchanged by TensorFlow itself)"
    if not record.get("settings"):
        yield "the settings of the call"
    if summary is None:
        yield "the model's layers"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
