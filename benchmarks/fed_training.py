"""Seconds from the call to the trained model, for rows of a Spark DataFrame.

A script for TensorFlowOnSpark (`tfos_script`) is run by TensorFlowOnSpark 2.2.5 and by
`pybackend.tfos`, and compared with the same loop in a function of `barrier_run`, and with
`barrier_train`. All train one small model in single steps of the same size, and return it to the
session.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import feed
import numpy as np
import tfos_script
from rounds import interleaved
from standalone_session import WORKERS, standalone_session
from tfos_script import BATCH

import pybackend

Table = dict[str, dict[str, float]]
ROWS, FEW = 60_000, WORKERS * BATCH
ORIGINAL = "TensorFlowOnSpark 2.2.5"


def measure(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds, after one that warms up."""
    with standalone_session() as session:
        many, few = (feed.cached(session, "array<float>", rows) for rows in (ROWS, FEW))
        trained = _trainers(session)
        cases = {(name, "many"): partial(_timed, work, many) for name, work in trained.items()}
        cases |= {(name, "few"): partial(_timed, work, few) for name, work in trained.items()}
        empty, fail = _others(session, few)
        cases |= {(name, "launch"): partial(_timed, work) for name, work in empty.items()}
        cases |= {(name, "error"): work for name, work in fail.items()}
        named = {f"{name}|{what}": case for (name, what), case in cases.items()}
        found = interleaved(named, rounds)
    middle = {tuple(name.split("|")): float(np.median(times)) for name, times in found.items()}
    return {
        f"{ROWS} rows of 784 floats, to a trained model, {WORKERS} workers": _compare(
            list(trained), middle
        ),
        f"a function that does nothing, and one that fails, {WORKERS} workers": {
            name: {
                "up_and_down_s": middle[name, "launch"],
                "until_its_error_s": middle[name, "error"],
            }
            for name in empty
        },
    }


def _compare(names: list[str], middle: dict[Any, float]) -> Table:
    """Compare whole calls, and the cost of each additional row, with the original."""
    whole = {name: middle[name, "many"] for name in names}
    rates = {name: (ROWS - FEW) / (whole[name] - middle[name, "few"]) for name in names}
    return {
        name: {
            "seconds": whole[name],
            f"with_{FEW}_rows_s": middle[name, "few"],
            "more_rows_per_s": rates[name],
            "call_faster": whole[ORIGINAL] / whole[name],
            "feed_faster": rates[name] / rates[ORIGINAL],
        }
        for name in names
    }


def _trainers(session: Any) -> dict[str, Callable[[Any], Any]]:
    """Return functions that train the model on a DataFrame and return it."""
    ours = partial(tfos_script.train, session, package="pybackend.tfos")
    return {
        ORIGINAL: lambda frame: tfos_script.train(session, frame.rdd),
        "the same script, pybackend.tfos": lambda frame: ours(frame.rdd),
        "the same script, pybackend.tfos, train(df)": ours,
        "barrier_run(data=df), context.feed()": lambda frame: pybackend.barrier_run(
            session, _train_fed, workers=WORKERS, data=frame, verbose=0
        )[0],
        "barrier_train(df)": lambda frame: (
            pybackend.barrier_train(
                session,
                tfos_script.dense_model(),
                frame,
                label="label",
                workers=WORKERS,
                epochs=1,
                batch_size=BATCH,
                verbose=0,
            ).model
        ),
    }


def _others(
    session: Any, few: Any
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Return calls with an empty function, and calls that return the delay of an error."""
    names = {ORIGINAL: "tensorflowonspark", "pybackend.tfos": "pybackend.tfos"}
    empty: dict[str, Callable[[], Any]] = {
        name: partial(tfos_script.start_and_end, session, package)
        for name, package in names.items()
    }
    fail: dict[str, Callable[[], Any]] = {
        name: partial(tfos_script.seconds_to_error, session, few.rdd, package)
        for name, package in names.items()
    }
    run = partial(pybackend.barrier_run, session, workers=WORKERS, verbose=0)
    empty["barrier_run()"] = partial(run, _do_nothing)
    fail["barrier_run()"] = partial(_seconds_to_error, run)
    return empty, fail


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def _train_fed(context: Any) -> Any:
    """Run the loop of the script in a function of `barrier_run`."""
    model = tfos_script.dense_model()
    for batch in context.feed(batch_size=BATCH):
        model.train_on_batch(batch["image"], batch["label"])
    return model if context.rank == 0 else None


def _do_nothing(context: Any) -> None:
    pass


def _seconds_to_error(run: Callable[..., Any]) -> float:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            run(_fail, folder)
        except pybackend.WorkerFailedError:
            return time.time() - float(Path(folder, "failed").read_text())
    raise AssertionError("the function did not fail")


def _fail(context: Any, folder: str) -> None:
    context.barrier()
    if context.rank == 1:
        Path(folder, "failed").write_text(str(time.time()))
        raise ValueError("no such luck")
    time.sleep(600)
