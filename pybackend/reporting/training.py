"""The page of a completed training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pybackend.reporting.charts import Line, draw_lines, show_number, show_seconds
from pybackend.reporting.html import (
    make_charts,
    make_code,
    make_figure,
    make_header,
    make_page,
    make_pairs,
    make_section,
    make_table,
    make_text,
    make_tiles,
)
from pybackend.reporting.workers import describe_workers

Record = Mapping[str, Any]
# Shown elsewhere on the page.
_NOT_SETTINGS = {"versions"}
_TITLES = {"tfdist": "tfdist", "python": "Python", "tensorflow": "TensorFlow", "keras": "Keras"}


def make_training_page(record: Record, title: str, summary: str | None) -> str:
    """Return the page of a training.

    Parameters
    ----------
    record
        A record of `encode_record`, or a part of it; the page lists missing parts.
    summary
        Keras's summary of the model; None if the model cannot be loaded.
    """
    absent = list(_find_absent(record, summary))
    body = [
        make_header(title, f"Trained by tfdist. Written {time.strftime('%Y-%m-%d %H:%M %Z')}"),
        make_tiles(list(_find_tiles(record))),
        make_section("Training curves", *_describe_history(record)),
        make_section("Workers", *describe_workers(record)),
        make_section("Failures and restarts", *_describe_losses(record)),
        make_section("Model", *_describe_model(record, summary)),
        make_section("Settings and versions", *_describe_settings(record)),
        make_section(
            "Not available", make_text(f"This result does not include: {', '.join(absent)}.")
        )
        if absent
        else "",
    ]
    return make_page(title, body, {**record, "model_summary": summary})


def to_float(value: Any) -> float:
    """Return a number of a record, where infinity is text."""
    return float("nan") if value is None else float(value)


def list_figures(record: Record) -> dict[str, tuple[list[int], list[float]]]:
    """Return epochs and values of each metric; one entry per value of a metric with several."""
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
    for name, (_, values) in list(list_figures(record).items())[:6]:
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
    audit = record.get("audit")
    if audit and audit["steps"]:
        largest = max(to_float(audit["weights"]), to_float(audit["metrics"]))
        yield f"{largest:.1g}", f"largest difference from one process, {audit['steps']} steps"
    rates = [worker.get("rows_per_second") for worker in workers]
    if rates and all(rate is not None for rate in rates):
        yield show_number(float(round(sum(rates)))), "rows per second, all workers"


def _describe_history(record: Record) -> Iterator[str]:
    figures = list_figures(record)
    if not figures:
        yield make_text("No epoch was run.")
        return
    charts: list[str] = []
    for name in (name for name in figures if not name.startswith("val_")):
        shown = {"training": name, "validation": f"val_{name}"}
        lines = [Line(kind, kind, *figures[own]) for kind, own in shown.items() if own in figures]
        kinds = [line.kind for line in lines] if len(lines) > 1 else []
        ends = "; ".join(f"{line.name} ends at {show_number(line.y[-1])}" for line in lines)
        svg = draw_lines(f"{name} by epoch: {ends}", lines, f"curve-{len(charts)}")
        charts.append(make_figure(name.replace("_", " "), svg, kinds=kinds))
    yield make_charts(charts)
    by_epoch = {name: dict(zip(*one, strict=False)) for name, one in figures.items()}
    epochs = sorted({epoch for values in by_epoch.values() for epoch in values})
    rows = [[epoch, *(values.get(epoch) for values in by_epoch.values())] for epoch in epochs]
    yield make_table(
        "Metrics by epoch, over the rows of all workers", ["epoch", *figures], rows, "history"
    )


def _describe_losses(record: Record) -> Iterator[str]:
    restarts, gangs = record.get("restarts"), record.get("gangs")
    if restarts:
        rows = [
            [
                number,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"])),
                one["lost"],
                one["checkpoint"] or "the beginning",
            ]
            for number, one in enumerate(restarts, start=1)
        ]
        columns = ["restart", "when", "cause", "resumed from"]
        yield make_table("Restarts of the workers", columns, rows, "restarts")
    elif restarts is not None:
        yield (
            make_text("No restart: the same workers trained from beginning to end.")
            if not (gangs and len(gangs) > 1)
            else make_text("No restart.")
        )
    if gangs:
        rows = [
            [
                gang["epoch"],
                len(gang["workers"]),
                _join(gang["workers"]),
                _join(gang["joined"]),
                "; ".join(f"{number}: {why}" for number, why in gang["left"].items()),
            ]
            for gang in gangs
        ]
        columns = ["from epoch", "workers", "their numbers", "joined", "left"]
        yield make_table("Workers by epoch", columns, rows, "gangs")


def _describe_model(record: Record, summary: str | None) -> Iterator[str]:
    size = record.get("model_bytes")
    pairs = {
        "format": record.get("model_format"),
        "size": None if size is None else f"{size:,} bytes",
        "file": record.get("model_uri"),
        "SHA-256 of the file": record.get("model_sha256"),
        "SHA-256 of the weights": next(
            (w["weights_sha256"] for w in record.get("workers") or [] if w.get("weights_sha256")),
            None,
        ),
        "features": _show(record["features"]) if record.get("features") else None,
        "classes": _show(record["levels"]) if record.get("levels") else None,
        "for TensorBoard": record.get("tensorboard"),
    }
    yield make_pairs([(name, str(text)) for name, text in pairs.items() if text], "model")
    if summary is not None:
        yield make_code(summary)


def _describe_settings(record: Record) -> Iterator[str]:
    settings = dict(record.get("settings") or {})
    versions = settings.get("versions") or record.get("versions") or {}
    hosts = sorted({worker["host"] for worker in record.get("workers") or []})
    pairs = [
        (_TITLES.get(name, name), str(version)) for name, version in versions.items() if version
    ]
    pairs.append(("hosts of workers", ", ".join(hosts)))
    if record.get("seed") is not None:
        settings = {"seed": record["seed"], **settings}
    pairs += [
        (name, _show(value))
        for name, value in settings.items()
        if name not in _NOT_SETTINGS and value is not None
    ]
    yield make_pairs(pairs, "settings")


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


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name}: {_show(item)}" for name, item in value.items() if item is not None
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_show, value))
    return str(value)


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
