"""MNIST's test images classified by SQL, compared with ``model.predict`` on the same machine.

In each database, the images are in a table, as arrays of float32 (SQLite: JSON text); the
predictions are fetched. There are two PostgreSQL servers on separate sockets, from Debian's
packages and with pgvector, both without compiling queries (``jit = off``). R's orbital, if
installed, translates a small network of R's nnet to SQL: one of 784-100-10 exceeded 24 GB of
memory. m2cgen supports neither neural networks nor SQL.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rounds import median_seconds

import pybackend
from pybackend import deploy_model, to_sql

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
from databases import ARRAYS, open_duckdb, open_postgres

Table = dict[str, dict[str, float]]
# The slower databases classify only the first images.
IMAGES = {"DuckDB": 10_000, "PostgreSQL": 10_000, "pgvector": 10_000, "Spark": 1_000, "SQLite": 200}
# Inputs, hidden units and classes of a network that orbital can translate.
SMALL = (20, 8, 3)
_QUERY = "SELECT * FROM digits ORDER BY id"


def measure(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds, after one that warms up."""
    import keras

    data = pybackend.mnist()
    train, test = (images.astype("float32") / 255 for images in (data.x_train, data.x_test))
    layers = keras.layers
    keras.utils.set_random_seed(1)
    dense = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(100, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    convolutional = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    for model, images in ((dense, train.reshape(-1, 784)), (convolutional, train[..., None])):
        logits = model is convolutional
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
        model.compile("adam", loss)
        model.fit(images, data.y_train, epochs=1, batch_size=128, verbose=0)
    return {
        "MNIST's test images, 784-100-10, in databases": _compare(
            dense, test.reshape(-1, 784), list(IMAGES), rounds
        ),
        "MNIST's test images, the network of train_mnist, in DuckDB": _compare(
            convolutional, test[..., None], ["DuckDB"], rounds
        ),
        "784-100-10 as SQL": _write(dense),
        f"{'-'.join(map(str, SMALL))} as SQL": {**_write(_small()), **_write_by_orbital()},
    }


def _compare(model: Any, images: Any, kinds: list[str], rounds: int) -> Table:
    expected = model.predict(images, verbose=0)
    with ExitStack() as stack:
        cases: dict[str, Callable[[], Any]] = {
            "model.predict": lambda: model.predict(images, verbose=0)
        }
        counts = {"model.predict": len(images)}
        found: dict[str, Any] = {}
        for kind in kinds:
            rows = images[: IMAGES[kind]].reshape(-1, 784)
            ask = stack.enter_context(_OPENED[kind](model, rows))

            def classify(kind: str = kind, ask: Callable[[], Any] = ask) -> None:
                found[kind] = ask()

            cases[kind], counts[kind] = classify, len(rows)
        seconds = median_seconds(cases, rounds)
    each = {kind: 1000 * taken / counts[kind] for kind, taken in seconds.items()}
    table = {}
    for kind, milliseconds in each.items():
        got = _read_numbers(found[kind]) if kind in found else expected
        wanted = expected[: len(got)]
        table[kind] = {
            "images": float(len(got)),
            "ms_per_image": milliseconds,
            "times_keras": milliseconds / each["model.predict"],
            "same_class": float((got.argmax(1) == wanted.argmax(1)).mean()),
            "difference_1e-6": float(np.abs(got - wanted).max()) * 1e6,
        }
    return table


def _read_numbers(rows: Any) -> Any:
    """Return the predictions in rows of an id and ten columns, or an id and one array."""
    last = [row[-1] if isinstance(row[-1], list) else row[-10:] for row in rows]
    return np.array(last, np.float64)


@contextmanager
def _duckdb(model: Any, rows: Any) -> Iterator[Callable[[], Any]]:
    import pyarrow as pa

    with open_duckdb() as con:
        found = pa.table({"id": range(len(rows)), "image": pa.array(list(rows))})
        con.register("found", found)
        con.execute("CREATE TABLE images AS SELECT * FROM found")
        yield from _deployed(con, model, lambda: con.execute(_QUERY).fetchall())


@contextmanager
def _postgres(kind: str, model: Any, rows: Any) -> Iterator[Callable[[], Any]]:
    with open_postgres(kind) as con:
        con.execute("CREATE TABLE images (id integer PRIMARY KEY, image real[])")
        with con.cursor() as cursor, cursor.copy("COPY images FROM STDIN") as copy:
            for number, image in enumerate(rows):
                copy.write(f"{number}\t{{{','.join(map(repr, image.tolist()))}}}\n")
        con.execute("ANALYZE images")
        yield from _deployed(con, model, lambda: con.execute(_QUERY).fetchall())


@contextmanager
def _sqlite(model: Any, rows: Any) -> Iterator[Callable[[], Any]]:
    con = sqlite3.connect(":memory:")
    con.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, image TEXT)")
    listed = ((number, str(image.tolist())) for number, image in enumerate(rows))
    con.executemany("INSERT INTO images VALUES (?, ?)", listed)
    con.commit()
    yield from _deployed(con, model, lambda: con.execute(_QUERY).fetchall())
    con.close()


@contextmanager
def _spark(model: Any, rows: Any) -> Iterator[Callable[[], Any]]:
    from conftest import spark_session

    with (
        tempfile.TemporaryDirectory() as folder,
        spark_session("local[2]", spark__sql__warehouse__dir=folder) as session,
    ):
        frame = session.createDataFrame(
            [(number, image.tolist()) for number, image in enumerate(rows)],
            "id int, image array<float>",
        )
        frame.repartition(4).write.saveAsTable("images")
        yield from _deployed(session, model, lambda: session.sql(_QUERY).collect())


def _deployed(con: Any, model: Any, ask: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    kind = "raw" if model.loss.from_logits else "prob"
    deploy_model(con, model, "digits", table="images", key="id", features="image", type=kind)
    yield ask


_OPENED: dict[str, Callable[[Any, Any], Any]] = {
    "DuckDB": _duckdb,
    "PostgreSQL": lambda model, rows: _postgres("postgresql", model, rows),
    "pgvector": lambda model, rows: _postgres("pgvector", model, rows),
    "SQLite": _sqlite,
    "Spark": _spark,
}


def _small() -> Any:
    import keras

    inputs, hidden, classes = SMALL
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(hidden, activation="sigmoid"),
            layers.Dense(classes, activation="softmax"),
        ]
    )


def _write_by_orbital() -> Table:
    """Measure orbital with a network of the same sizes; return nothing if it is not installed."""
    script = Path(__file__).with_name("sql_orbital.R")
    asked = ["Rscript", "-e", "stopifnot(requireNamespace('orbital', quietly = TRUE))"]
    if subprocess.run(asked, capture_output=True).returncode:
        return {}
    command = ["Rscript", str(script), *map(str, SMALL)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {"orbital": {"seconds": found["seconds"], "query_kb": found["bytes"] / 1000}}


def _write(model: Any) -> Table:
    """Measure the time to write the SQL, and its size."""
    table = {}
    for dialect in ARRAYS:
        began = time.perf_counter()
        made = to_sql(model, dialect, table="images", key="id", features="image")
        table[dialect] = {
            "seconds": time.perf_counter() - began,
            "query_kb": len(made.query.encode()) / 1000,
            "weights_kb": sum(part.numbers.size for part in made.parts) * 4 / 1000,
        }
    return table
