"""The complete pipeline on this machine: events, filter, features, TFRecord, training, plots."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from features import in_order, make_features, prepare
from generate import generate
from layout import CLASSES
from models import INPUTS
from reading import read_parquet
from scores import areas, mean_area
from spark_session import send_code, start_session

FILES_PER_WORKER = 4


@dataclass(frozen=True)
class Prepared:
    """Data for the training: TFRecord files of the training rows, and the test rows as Parquet."""

    files: tuple[str, ...]
    test: Path
    rows: int
    places: int


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main() -> None:
    """Run the pipeline, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--events", type=_positive, default=20_000, help="events to generate (default 20000)"
    )
    parser.add_argument("--epochs", type=_positive, default=12, help="training epochs (default 12)")
    parser.add_argument("--workers", type=_positive, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of events and training (default 1)"
    )
    parser.add_argument(
        "--places",
        type=int,
        default=0,
        help="slots for particles in a row (801 as published); the default and minimum is the "
        "largest number of particles in an event",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/particles"),
        metavar="FOLDER",
        help="folder for rows and plots (default build/particles)",
    )
    options = parser.parse_args()
    phases: dict[str, float] = {}
    with start_session(options.workers) as session:
        send_code(session)
        prepared = prepare_files(
            session,
            options.out,
            options.events,
            options.seed,
            phases,
            places=options.places,
            files=FILES_PER_WORKER * options.workers,
        )
    print(f"{prepared.rows} training rows, {prepared.places} places for particles in each")
    train_all(prepared, options, phases)
    for phase, seconds in phases.items():
        print(f"{phase:32}{seconds:8.1f} s")
    print(f"plots: {options.out / 'roc.png'}, {options.out / 'confusion.png'}")


def prepare_files(
    session: Any,
    out: Path,
    events: int,
    seed: int,
    phases: dict[str, float],
    places: int = 0,
    files: int = 8,
) -> Prepared:
    """Generate events, filter them, compute their features, and write training and test files."""
    import pybackend

    raw, test_path = str(out / "events.parquet"), out / "test.parquet"
    with timed("events to Parquet", phases):
        generate(session, events, seed).write.mode("overwrite").parquet(raw)
    with timed("filter and features", phases):
        features = make_features(session.read.parquet(raw)).cache()
        places = max(places, features.agg({"particles": "max"}).first()[0])
        train, test = prepare(features, seed, places)
        in_order(test, 1).write.mode("overwrite").parquet(str(test_path))
    with timed("TFRecord", phases):
        written = pybackend.write_tfrecords(
            in_order(train, files), out / "train.tfrecord", overwrite=True
        )
    features.unpersist()
    return Prepared(written.files, test_path, written.rows, places)


def train_all(prepared: Prepared, options: argparse.Namespace, phases: dict[str, float]) -> None:
    """Train the three classifiers, print their AUCs and draw their plots."""
    from plots import draw_confusion, draw_roc
    from training import Plan, predict, train

    plan = Plan(epochs=options.epochs, seed=options.seed)
    inputs, labels = read_parquet(prepared.test)
    scores = {}
    title = f"AUC on {len(labels)} test rows"
    print(f"{title:32}", *(f"{column:>8}" for column in (*CLASSES, "mean")))
    for name in INPUTS:
        with timed(f"training, {name}", phases):
            result = train(name, prepared.files, options.workers, plan)
        scores[name] = predict(name, result.model, inputs)
        values = [*areas(labels, scores[name]), mean_area(labels, scores[name])]
        print(f"{name:32}", *(f"{value:8.4f}" for value in values), flush=True)
    draw_roc(labels, scores, options.out / "roc.png")
    draw_confusion(labels, scores, options.out / "confusion.png")


@contextmanager
def timed(phase: str, phases: dict[str, float]) -> Iterator[None]:
    """Measure the time of a phase."""
    began = time.monotonic()
    yield
    phases[phase] = time.monotonic() - began


if __name__ == "__main__":
    main()
