"""The result of a training."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pybackend.api.plots import plot_history
from pybackend.data.files import read_file
from pybackend.errors import InputError, SerializationError
from pybackend.job.report import Gang, WorkerReport, count_by_epoch

# Of a training's seconds: workers wait for each other a little all the time.
_SHARE_OF_NOTE = 0.05


@dataclass(frozen=True)
class TrainResult:
    """A trained model and how its training went.

    Attributes
    ----------
    model_base64
        The trained model file as base64 text; empty if it was written to ``model_uri``.
    model_format
        ``"h5"``, or ``"keras"`` if the model cannot be written as HDF5; ``"weights.h5"``, weights
        alone for ``model.load_weights()``, if Keras can write no whole file of it.
    model_sha256
        SHA-256 of the model file, hexadecimal.
    history
        Per metric one float per epoch of `epochs_of`, over the rows of all workers; ``val_`` names
        are those of validation data.
    workers
        One `WorkerReport` per rank.
    seconds
        Wall time of the whole call.
    seed
        The seed that reproduces this training.
    epochs
        Number of epochs that were run.
    initial_epoch, validation_freq
        As in `barrier_train`.
    metrics
        Further figures, e.g. the test accuracy of `train_mnist`.
    model_uri
        Where the model file was written, if the call said so.
    tensors, categories, encode
        As in `DataOptions`, of the feature columns: for each that was encoded, its values and how.
    feature_names
        What the numbers of each input are called, in their order, if each comes from a column:
        a list, or a list by each input's name. One-hot columns have the names ``column_value``.
    levels
        The values of the label whose codes are 0, 1, 2, ..., if its column has categories.
    features
        The columns that were the inputs: a list, or a list by each input's name.
    gangs
        With ``min_workers``, who trained from which epoch on: a `Gang`, and a further one each time
        when workers have left or joined.
    """

    model_base64: str = field(repr=False)
    model_format: str
    model_sha256: str
    history: dict[str, list[Any]]
    workers: list[WorkerReport] = field(repr=False)
    seconds: float
    seed: int
    epochs: int
    initial_epoch: int = 0
    validation_freq: int | tuple[int, ...] = 1
    metrics: dict[str, float] = field(default_factory=dict)
    model_uri: str | None = None
    levels: list[Any] | None = None
    features: list[str] | dict[str, list[str]] | None = None
    tensors: dict[str, Any] | None = field(default=None, repr=False)
    categories: dict[str, Any] | None = field(default=None, repr=False)
    encode: dict[str, str] | None = field(default=None, repr=False)
    feature_names: list[str] | dict[str, list[str] | None] | None = field(default=None, repr=False)
    gangs: list[Gang] = field(default_factory=list, repr=False)
    decode: Callable[[bytes], Any] | None = field(default=None, repr=False, compare=False)
    fetch: Callable[[str], bytes] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def model(self) -> Any:
        """The trained, compiled Keras model, decoded when first asked for."""
        if self.decode is None:
            raise InputError("this result has no decoder: use `model_from_base64(model_base64)`")
        return self.decode(self.model_bytes())

    def model_bytes(self) -> bytes:
        """The trained model file, read from ``model_uri`` if it was written there."""
        if self.model_uri is None:
            return base64.b64decode(self.model_base64)
        if self.fetch is None:
            raise InputError(f"this result does not know how to read {self.model_uri!r}")
        return self.fetch(self.model_uri)

    def save(self, path: str | Path) -> Path:
        """Write the model file, e.g. ``result.save("model.h5")``.

        Raises
        ------
        InputError
            The file name does not end in `model_format`.
        """
        path = Path(path)
        if not path.name.endswith(f".{self.model_format}"):
            alone = self.model_format == "weights.h5"
            raise InputError(
                f"this model is in {self.model_format!r} format"
                f"{', weights alone for model.load_weights()' if alone else ''}: name the file "
                f"{path.with_suffix('.' + self.model_format).name!r}, not {path.name!r}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.model_bytes())
        return path

    def epochs_of(self, name: str) -> list[int]:
        """The epochs, counted from 1, that have a figure of this name in the history."""
        last = self.initial_epoch + self.epochs
        epochs = list(range(self.initial_epoch + 1, last + 1))
        if not name.startswith("val_"):
            return epochs
        chosen = self.validation_freq
        return [e for e in epochs if (e % chosen == 0 if isinstance(chosen, int) else e in chosen)]

    @property
    def workers_by_epoch(self) -> list[int]:
        """How many workers each epoch had that was run."""
        if not self.gangs:
            return [len(self.workers)] * self.epochs
        return count_by_epoch(self.gangs, self.initial_epoch + self.epochs)

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The rank for which the others waited, and for how many seconds each; None if for none.

        The worker that all wait for waits least itself: what is shown is by how much.
        """
        waits = [worker.waited for worker in self.workers if worker.waited is not None]
        if len(waits) < max(2, len(self.workers)):
            return None
        least = min(waits)
        rank = waits.index(least)
        excess = median(waits[:rank] + waits[rank + 1 :]) - least
        is_worth_a_word = excess >= max(1.0, _SHARE_OF_NOTE * self.workers[rank].seconds)
        return (self.workers[rank].rank, excess) if is_worth_a_word else None

    def plot(self) -> Any:
        """The history as a figure, a panel per metric; needs the extra ``plots``.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        InputError
            matplotlib is missing, or there is no history.
        """
        if not self.history:
            raise InputError("there is no history to plot: no epoch was run")
        return plot_history(self.history, self.epochs_of)

    def summary(self) -> str:
        """A few lines of text: figures of the last epoch and what each worker did."""
        rows = sum(w.rows for w in self.workers)
        lines = [
            f"{len(self.workers)} worker{'s' if len(self.workers) != 1 else ''}, {rows} rows, "
            f"{self.epochs} epoch{'s' if self.epochs != 1 else ''}, {self.seconds:.1f} s, "
            f"seed {self.seed}"
        ]
        if self.history:
            last = ", ".join(f"{k} {_figure(v[-1])}" for k, v in self.history.items() if v)
            lines.append(f"last epoch: {last}")
        if self.metrics:
            lines.append(", ".join(f"{k} {_figure(v)}" for k, v in self.metrics.items()))
        lines += [
            f"  worker {self._number(w.rank)} on {w.host} (pid {w.pid}): {w.rows} rows, "
            f"{w.steps} steps, {w.seconds:.1f} s"
            + ("" if w.waited is None else f", {w.waited:.1f} s of them waiting")
            for w in self.workers
        ]
        for gang in self.gangs[1:]:
            gone = [f"worker {number} had gone ({why})" for number, why in gang.left.items()]
            came = [f"worker {number} had joined" for number in gang.joined]
            lines.append(f"from epoch {gang.epoch} on: {', '.join([*gone, *came])}")
        if self.straggler is not None:
            rank, seconds = self.straggler
            lines.append(f"the others waited {seconds:.1f} s for worker {self._number(rank)}")
        return "\n".join(lines)

    def _number(self, rank: int) -> int:
        """What a worker is called: its rank, unless ranks have changed since it was started."""
        return self.gangs[-1].workers[rank] if len(self.gangs) > 1 else rank

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, as the R package reads them."""
        return {
            "history": self.history,
            "model_base64": self.model_base64,
            "model_format": self.model_format,
            "model_sha256": self.model_sha256,
            "workers": [{**asdict(w), "ok": w.ok} for w in self.workers],
            "seconds": self.seconds,
            "seed": self.seed,
            "epochs": self.epochs,
            "epochs_of": {name: self.epochs_of(name) for name in self.history},
            "straggler": list(self.straggler) if self.straggler else None,
            "metrics": self.metrics,
            "model_uri": self.model_uri,
            "levels": self.levels,
            "features": self.features,
            "categories": self.categories,
            "encode": self.encode,
            "feature_names": self.feature_names,
            "workers_by_epoch": self.workers_by_epoch,
            "gangs": [asdict(gang) for gang in self.gangs],
        }


def read_model_file(uri: str) -> bytes:
    """The model that a training wrote to ``model_uri``.

    Raises
    ------
    SerializationError
        It is not there, or cannot be read.
    """
    try:
        return read_file(uri)
    except OSError as error:
        raise SerializationError(f"the model at {uri} cannot be read: {error}") from error


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
