"""Show how training scales on this machine's GPUs: three models, audited, on 1, 2, 4, ... GPUs."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import pybackend
from pybackend.core.api.markup import PAGE, Line, draw_lines
from pybackend.core.api.observer import Observer
from pybackend.core.api.train import barrier_train
from pybackend.core.errors import InputError
from pybackend.core.job.context import WorkerContext
from pybackend.core.job.report import Audit
from pybackend.core.job.worker_options import Exchange, Resources
from pybackend.core.machine.capacity import keep_usable, list_gpus
from pybackend.core.words import setting
from pybackend.reporting.page import make_header, make_page, make_section

# The first epoch traces the step; the others are timed.
_EPOCHS = 4
_WORDS, _LENGTH = 8192, 128
# An efficiency below it is reported as one that does not pay.
_PAYS = 0.6


def build_dense() -> Any:
    """Return a model whose gradients are large for its work: 11 million weights."""
    import keras

    hidden = [keras.layers.Dense(2048, "relu") for _ in range(3)]
    return _compile([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def build_convolutional() -> Any:
    """Return a network of convolutions for images of 32 x 32 pixels."""
    import keras

    blocks = [
        layer
        for filters in (64, 128, 256, 512)
        for layer in (
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
        )
    ]
    pooling = keras.layers.GlobalAveragePooling2D()
    return _compile([keras.Input((32, 32, 3)), *blocks, pooling, keras.layers.Dense(10)])


def build_transformer() -> Any:
    """Return a transformer encoder for texts of 128 words."""
    import keras
    from keras import layers

    words = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_WORDS, 256)(words)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(8, 32)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(256)(layers.Dense(1024, "gelu")(x)))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return _compile(keras.Model(words, outputs))


def _compile(model: Any) -> Any:
    import keras

    model = keras.Sequential(model) if isinstance(model, list) else model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model


def _draw_dense(rng: np.random.Generator, rows: int) -> Any:
    return rng.random((rows, 784), dtype="float32")


def _draw_images(rng: np.random.Generator, rows: int) -> Any:
    return rng.random((rows, 32, 32, 3), dtype="float32")


def _draw_texts(rng: np.random.Generator, rows: int) -> Any:
    return rng.integers(0, _WORDS, (rows, _LENGTH), dtype="int32")


# By name: the model, its rows, and how many of them a worker has in a step.
_CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], int]] = {
    "dense": (build_dense, _draw_dense, 1024),
    "convolutional": (build_convolutional, _draw_images, 256),
    "transformer": (build_transformer, _draw_texts, 128),
}


@dataclass(frozen=True)
class GpuRow:
    """Speed of one model with one number of workers, each with a batch of its own.

    Attributes
    ----------
    model, workers, batch_size
        Name of the model, number of workers, and rows per step and worker.
    seconds
        Seconds per step: the median over the epochs after the first one.
    rows_per_second, speedup, efficiency
        Rows of all workers; relative to the smallest number of workers, times that number; and the
        speed-up per worker, which is 1 if scaling is linear.
    audited, difference
        Number of steps that the audit compared with one process, and the largest difference.
    """

    model: str
    workers: int
    batch_size: int
    seconds: float
    rows_per_second: float
    speedup: float
    efficiency: float
    audited: int
    difference: float


@dataclass(frozen=True)
class GpuScaling:
    """Result of `bench_gpus`: one `GpuRow` per model and number of workers.

    ``devices`` is the number of GPUs; 0: the workers ran on the cores of the CPU.
    """

    rows: list[GpuRow]
    devices: int
    host: str

    def describe(self) -> Iterator[str]:
        """Yield a sentence per model: how much faster the most workers are, and if that pays."""
        kind = "GPUs" if self.devices else "workers"
        for last in {row.model: row for row in self.rows}.values():
            text = f"{last.model}: {last.workers} {kind} are {last.speedup:.2f} times as fast as 1"
            pays = last.workers == 1 or last.efficiency >= _PAYS
            yield text if pays else f"{text}: distributing this model does not pay here"

    def to_json(self) -> str:
        return json.dumps({"tfdist": pybackend.__version__, **asdict(self)}, indent=2) + "\n"

    def to_page(self) -> str:
        """Return an HTML page, which needs no other file."""
        title = f"Scaling on {self.host}"
        charts = [
            PAGE.figure(name, draw_lines(f"{name}: speed-up by workers", self._lines(name), name))
            for name in dict.fromkeys(row.model for row in self.rows)
        ]
        body = [
            make_header(title, "Each worker has a batch of its own."),
            make_section("Result", *map(PAGE.text, self.describe()), PAGE.charts(charts)),
            make_section(
                "Measured",
                PAGE.table(_COLUMNS, list(map(_list_cells, self.rows)), "", "scaling"),
            ),
        ]
        return make_page(title, body, json.loads(self.to_json()))

    def _lines(self, name: str) -> list[Line]:
        own = [row for row in self.rows if row.model == name]
        counts = [row.workers for row in own]
        return [
            Line("measured", "training", counts, [row.speedup for row in own]),
            Line("linear", "validation", counts, list(map(float, counts))),
        ]

    def __str__(self) -> str:
        widths = [max(14, len(name) + 2) for name in _COLUMNS]
        lines = [_COLUMNS, *(list(map(str, _list_cells(row))) for row in self.rows)]
        table = [
            "".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([*table, *self.describe()])


_COLUMNS = (
    *("model", "workers", "rows each", "ms per step", "rows per second"),
    *("speed-up", "efficiency", "audited steps", "difference"),
)


def _list_cells(row: GpuRow) -> list[Any]:
    return [
        *(row.model, row.workers, row.batch_size, f"{row.seconds * 1e3:.2f}"),
        *(f"{row.rows_per_second:.0f}", f"{row.speedup:.2f}", f"{row.efficiency:.2f}"),
        *(row.audited, f"{row.difference:.1e}"),
    ]


def bench_gpus(
    workers: Sequence[int] | None = None,
    *,
    batch_size: int | None = None,
    steps: int = 50,
    show: Callable[[str], object] = print,
) -> GpuScaling:
    """Train three models on this machine with different numbers of workers, one GPU for each.

    Parameters
    ----------
    workers
        Numbers of workers. None: 1, 2, 4, ..., and all GPUs. On a machine without GPUs they must be
        given, and run on the cores of the CPU.
    batch_size
        Rows per step and worker. None: 1024, 256 and 128, by model.
    steps
        Steps of an epoch. There are four epochs, of which the first is not timed.
    show
        Called with a line for each training run.

    Raises
    ------
    InputError
        There are fewer GPUs than workers, or none and no ``workers``.
    """
    devices = len(keep_usable(list_gpus()))
    counts = _choose_counts(workers, devices)
    rows = []
    for name in _CASES:
        first: GpuRow | None = None
        for count in counts:
            row = _measure(name, count, batch_size, steps, devices > 0)
            first = first or row
            speedup = row.rows_per_second / first.rows_per_second * first.workers
            rows.append(replace(row, speedup=speedup, efficiency=speedup / count))
            show(
                f"{name}, {count} worker{'s' if count > 1 else ''}: {row.seconds * 1e3:.2f} ms a "
                f"step, {row.rows_per_second:.0f} rows per second"
            )
    return GpuScaling(rows, devices, platform.node())


def _choose_counts(workers: Sequence[int] | None, devices: int) -> list[int]:
    if workers is None:
        if not devices:
            raise InputError(
                "TensorFlow has no GPU to use on this machine: start this on a machine with GPUs, "
                f"or pass {setting(workers=(1, 2))} to measure its cores"
            )
        return sorted({2**k for k in range(devices.bit_length()) if 2**k <= devices} | {devices})
    if devices and max(workers) > devices:
        raise InputError(f"{max(workers)} workers need a GPU each, but there are {devices}")
    return sorted(set(workers))


def _measure(name: str, workers: int, batch_size: int | None, steps: int, has_gpus: bool) -> GpuRow:
    build, draw, usual = _CASES[name]
    rows = batch_size or usual
    ends: list[float] = []

    def on_epoch_end(epoch: int, logs: Mapping[str, Any]) -> None:
        ends.append(time.perf_counter())

    # The rows stay the same, so that only the GPUs and their exchange are measured.
    def data(context: WorkerContext) -> Any:
        import tensorflow as tf

        rng = np.random.default_rng(context.rank)
        return tf.data.Dataset.from_tensors((draw(rng, rows), rng.integers(0, 10, rows))).repeat()

    result = barrier_train(
        "local",
        build,
        data,
        workers=workers,
        epochs=_EPOCHS,
        steps_per_epoch=steps,
        callbacks=[Observer(on_epoch_end)],
        exchange=Exchange(transport="tf" if has_gpus and workers > 1 else "tcp"),
        resources=Resources(gpus=1 if has_gpus else None),
        seed=1,
        verbose=0,
    )
    seconds = float(np.median(np.diff(ends))) / steps
    audit = next((one.audit for one in result.workers if one.audit), None) or Audit()
    difference = max(audit.weights, audit.metrics)
    speed = workers * rows / seconds
    compared = float("nan"), float("nan")  # with the other rows, later
    return GpuRow(name, workers, rows, seconds, speed, *compared, audit.steps, difference)


def write(scaling: GpuScaling, page: str | None, json_file: str | None) -> None:
    """Write the files that were asked for."""
    if page:
        Path(page).write_text(scaling.to_page(), encoding="utf-8")
    if json_file:
        Path(json_file).write_text(scaling.to_json(), encoding="utf-8")
