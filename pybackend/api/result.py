"""The result of a training."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pybackend.api.calls import EvaluationCall, Features, OnMissing, PredictionCall, PredictionType
from pybackend.api.curves import check_smoothing, find_panels
from pybackend.api.figure_file import check_figure, save_figure
from pybackend.api.result_html import describe_training
from pybackend.api.result_text import list_audit, list_events, list_figures, list_workers
from pybackend.data.columns import as_plain
from pybackend.errors import InputError
from pybackend.job.arguments import counted
from pybackend.job.options import ColumnEncoding, DataOptions
from pybackend.job.report import Audit, Gang, Restart, WorkerReport, count_by_epoch, find_straggler

# Large, or of no use without the session.
_LEFT_OUT = {"model_base64"}
_LEFT_OUT_OF_WORKERS = {"value", "inputs", "failure"}


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
        The values of the label whose codes are 0, 1, 2, ..., if its column has categories. Those of
        several labels are among the `categories`.
    features
        The columns that were the inputs: a list, or a list by each input's name.
    gangs
        With ``min_workers``, who trained from which epoch on: a `Gang`, and a further one each time
        when workers have left or joined.
    restarts
        A `Restart` for each time that the workers were started again.
    tensorboard
        Where the event files lie, if ``tensorboard`` was given: a folder of this machine (of that
        of the first of several processes that `join`), or a URI.
    settings
        What the training was asked to do, as plain data: ``launcher`` (in words), ``workers``,
        ``min_workers``, ``max_workers``, ``epochs``, ``initial_epoch``, ``batch_size`` (rows per
        worker and step), ``steps_per_epoch``, ``shuffle``, ``seed``, ``class_weight``,
        ``exchange`` (a dict: ``kind`` is ``"Exchange"`` or ``"LocalSteps"``, beside its options),
        ``scale_lr``, ``strategy``, ``roles``, ``resources``, ``in_memory``, ``checkpoint``,
        ``restarts``, ``model_uri``, ``timeout`` (seconds), and ``versions`` of tfdist, python,
        tensorflow, keras and numpy in the process that called, with Spark also of pyspark. None:
        not used. What has no number in JSON is text: ``"inf"``.
    inputs
        Shape and type of each input of a row, nested as the model has them: what builds one that
        has no weights before it is called.
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
    encode: dict[str, ColumnEncoding] | None = field(default=None, repr=False)
    feature_names: list[str] | dict[str, list[str] | None] | None = field(default=None, repr=False)
    gangs: list[Gang] = field(default_factory=list, repr=False)
    restarts: list[Restart] = field(default_factory=list, repr=False)
    tensorboard: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    inputs: Any = field(default=None, repr=False, compare=False)
    decode: Callable[[bytes], Any] | None = field(default=None, repr=False, compare=False)
    fetch: Callable[[str], bytes] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # Without the model: the decoder makes it again.
        return {one.name: getattr(self, one.name) for one in fields(self)}

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
        """Write the model to a file, e.g. ``result.save("model.h5")``; returns its path.

        ``*.h5`` or ``*.keras``, whichever `model_format` is: if the other one is asked for, Keras
        converts it, with the optimizer's state. A ``*.json`` holds all of the result: `load` and
        R's ``read_fit()`` read it. The file appears complete or not at all.

        Raises
        ------
        InputError
            The name ends otherwise, or the weights alone have come: they are a ``*.weights.h5``.
        SerializationError
            Keras cannot write the model in that format.
        """
        from pybackend.api.saving import save_file

        if not isinstance(path, (str, os.PathLike)) or not Path(path).name:
            raise InputError(f"`path` must name a file, such as 'model.h5', not {path!r}")
        if Path(path).suffix == ".json":
            from pybackend.api.result_file import write_result

            return write_result(self.record, self.model_base64, Path(path))
        return save_file(Path(path), self.model_format, self.model_bytes, lambda: self.model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> TrainResult:
        """Read a result from a file that `save`, or R's ``write_model()``, wrote as ``*.json``.

        Parameters
        ----------
        custom_objects, safe_mode
            As in `barrier_train`, for its model.

        Raises
        ------
        InputError
            The file cannot be read.
        SerializationError
            It is not the file of a result, or is damaged.
        """
        from pybackend.api.result_file import read_result

        return read_result(cls, Path(path), custom_objects, safe_mode)[0]

    def export(self, path: str | Path) -> Path:
        """Write the model as a SavedModel, for TensorFlow Serving and what else reads these.

        By Keras's ``model.export``: without the training, and with the signature
        ``"serving_default"`` that takes and gives what the model does. Read it by
        ``tf.saved_model.load(path)``, not by `load_model`.

        Parameters
        ----------
        path
            A new folder; it appears complete or not at all.

        Raises
        ------
        InputError
            There is something at the path already.
        SerializationError
            Keras cannot export the model.
        """
        from pybackend.api.saving import check_new_folder, export_model

        path = Path(path)
        check_new_folder(path)
        return export_model(self.model, path)

    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int = 32,
        features: Features | None = None,
        label: str | Mapping[str, str] | None = "label",
        weight: str | None = None,
        data_options: DataOptions | None = None,
    ) -> dict[str, Any]:
        """Evaluate the model on other rows, in this process.

        The figures are those of ``model.evaluate``. For rows that are too many for one process
        there is `barrier_evaluate`, which takes this result as its model.

        Parameters
        ----------
        data
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, a data frame, the path
            or URI of Parquet or TFRecord files, or a data set of batches of TensorFlow or Keras.
        batch_size
            Rows of a step; a data set has its own.
        features, label, weight, data_options
            As in `barrier_evaluate`: ``label`` and ``weight`` are not remembered.

        Returns
        -------
        dict
            ``loss`` and each metric by its name: a float, or a list of them.

        Raises
        ------
        InputError
            An argument is wrong, or the rows do not fit the model.
        """
        from pybackend.api.in_process import evaluate_here

        call = EvaluationCall(
            model=self,
            batch_size=batch_size,
            features=features,
            label=label,
            weight=weight,
            data_options=data_options,
        )
        return evaluate_here(lambda: self.model, self, data, call)

    def predict(
        self,
        x: Any,
        *,
        batch_size: int = 32,
        type: PredictionType | None = None,
        levels: Sequence[Any] | None = None,
        on_missing: OnMissing = "null",
    ) -> Any:
        """Predict with the model, in this process.

        The numbers are those of ``model.predict``. `barrier_predict` and `predict_spark` take this
        result, too, for rows that are too many for one process.

        Parameters
        ----------
        x
            Inputs: an array with one entry per row, a list or dict of arrays, a data frame,
            the path or URI of files, or a data set of batches of TensorFlow or Keras. Of tables,
            the columns of the training are read as they were there: `features`, `tensors` and
            `categories`.
        batch_size
            Rows that are computed at once; a data set has its own.
        type
            ``"raw"``: the model's outputs, as they are. ``"class"``, ``"prob"``: the columns
            ``.pred_class``, or ``.pred_<level>`` for each class, as in `predict_spark`. None: for
            a data frame what `predict_spark` gives by default, for anything else ``"raw"``.
        levels
            Names of the classes 0, 1, 2, ...; None: `levels`, or else numbers.
        on_missing
            What becomes of a row of a data frame with a null, a NaN or a value that is
            none of its column's categories: ``"null"`` for its predictions (NaN in
            arrays), or an ``"error"``, as in a training, where a NaN is left to the
            model.

        Returns
        -------
        pandas.DataFrame
            With ``"class"`` and ``"prob"``, and by default for a data frame, whose index it has.
        numpy array, or a list or dict of arrays if the model has several outputs
            Otherwise. One entry per row, in their order; the numbers of each output are in the
            order of its label's `categories`, if it had text.

        Raises
        ------
        InputError
            An argument is wrong, or the rows do not fit the model.
        """
        from pybackend.api.in_process import predict_here

        call = PredictionCall(
            model=self, batch_size=batch_size, type=type, levels=levels, on_missing=on_missing
        )
        return predict_here(lambda: self.model, self, x, call)

    @property
    def audit(self) -> Audit | None:
        """Result of the audit, in which some steps are repeated in one process.

        None if the training was not audited: see `Exchange`.
        """
        return self.workers[0].audit if self.workers else None

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
        """The rank for which the others waited, and for how many seconds each; None if for none."""
        return find_straggler(self.workers)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        metrics: str | Sequence[str] | None = None,
        smooth: float = 0.0,
    ) -> Any:
        """The history as a figure, a panel per metric; needs the extra ``plots``.

        A notebook shows the figure that is a cell's last value; a script gives a ``path``.

        Parameters
        ----------
        path
            Where the figure is written, as matplotlib writes it: .png, .pdf or .svg.
        metrics
            The metric to show, or several of them, in order; each with its validation. None: all.
        smooth
            From 0 to below 1: how much of the mean so far goes into the next point. With 0.6, say,
            the figures themselves are faint behind the smoothed line.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        InputError
            matplotlib is missing, or does not know the file's type; there is no history, or it has
            no such metric.
        """
        if not self.history:
            raise InputError("there is no history to plot: no epoch was run")
        panels = find_panels(self.history, self.epochs_of, metrics)
        weight = check_smoothing(smooth)
        check_figure(path)
        from pybackend.api.plots import plot_panels

        figure = plot_panels(panels, weight)
        if path is not None:
            save_figure(figure, path)
        return figure

    def summary(self) -> str:
        """A few lines of text: figures of the last epoch and what each worker did."""
        lines = [*self._facts, *list_workers(self._numbered), *self._events]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show: figures of the last epoch, curves, workers and settings."""
        panels = find_panels(self.history, self.epochs_of)
        return describe_training(self._facts, self._events, panels, self._numbered, self.settings)

    @property
    def _facts(self) -> list[str]:
        count, rows = len(self.workers), sum(worker.rows for worker in self.workers)
        first = (
            f"{counted(count, 'worker')}, {counted(rows, 'row')}, "
            f"{counted(self.epochs, 'epoch')}, {self.seconds:.1f} s, seed {self.seed}"
        )
        return [first, *list_figures(self.history, self.metrics), *list_audit(self.workers)]

    @property
    def _events(self) -> list[str]:
        found = self.straggler
        return list_events(self.gangs, found and (self._number(found[0]), found[1]))

    @property
    def _numbered(self) -> dict[int, WorkerReport]:
        return {self._number(worker.rank): worker for worker in self.workers}

    def _number(self, rank: int) -> int:
        """What a worker is called: its rank, unless ranks have changed since it was started."""
        return self.gangs[-1].workers[rank] if len(self.gangs) > 1 else rank

    def to_dict(self, *, model: bool = True) -> dict[str, Any]:
        """All of it as lists, dicts, strings, numbers and None, which ``json.dumps`` takes.

        The keys are the attributes' names. ``workers`` and ``gangs`` are lists of dicts with the
        fields of `WorkerReport`, and ``ok``, and of `Gang`; ``epochs_of`` has the epochs of each
        name in ``history``, ``straggler`` is a list of rank and seconds or None. Figures that are
        not finite stay as they are, which ``json.dumps(..., allow_nan=False)`` refuses.

        Parameters
        ----------
        model
            Whether ``model_base64``, the whole model, is among them.
        """
        found = {
            "history": self.history,
            "model_base64": self.model_base64,
            "model_format": self.model_format,
            "model_sha256": self.model_sha256,
            "workers": [{**asdict(w), "ok": w.ok} for w in self.workers],
            "seconds": self.seconds,
            "seed": self.seed,
            "epochs": self.epochs,
            "initial_epoch": self.initial_epoch,
            "validation_freq": self.validation_freq,
            "epochs_of": {name: self.epochs_of(name) for name in self.history},
            "straggler": list(self.straggler) if self.straggler else None,
            "audit": asdict(self.audit) if self.audit else None,
            "metrics": self.metrics,
            "model_uri": self.model_uri,
            "levels": None if self.levels is None else as_plain(self.levels),
            "features": self.features,
            "settings": self.settings,
            "tensors": self.tensors,
            "categories": self.categories,
            "inputs": self.inputs,
            "encode": self.encode,
            "feature_names": self.feature_names,
            "workers_by_epoch": self.workers_by_epoch,
            "gangs": [asdict(gang) for gang in self.gangs],
            "restarts": [asdict(restart) for restart in self.restarts],
            "tensorboard": self.tensorboard,
        }
        return found if model else {n: v for n, v in found.items() if n != "model_base64"}

    @property
    def record(self) -> str:
        """JSON text of all figures, without the model's file, from which `report` is written.

        As `to_dict`, with ``rows_per_second`` of each worker. What is no number in JSON is text:
        ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
        """
        return encode_record(self.to_dict())


def encode_record(fields: Mapping[str, Any]) -> str:
    """JSON text of what `TrainResult.to_dict` gives, but for the model's file.

    Each worker has ``rows_per_second`` as well. What is no number in JSON is text: ``"NaN"``,
    ``"Infinity"``, ``"-Infinity"``, as Python's ``float()`` reads them.
    """
    record = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    record["model_bytes"] = _count_bytes(fields["model_base64"]) or None
    record["workers"] = [_describe_worker(worker, fields) for worker in fields["workers"]]
    return json.dumps(_make_plain(record))


def _count_bytes(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _describe_worker(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in worker.items() if name not in _LEFT_OUT_OF_WORKERS}
    return {**kept, "rows_per_second": _find_throughput(worker, fields)}


def _find_throughput(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> float | None:
    """Rows that a worker trains on in a second of its steps, waiting included.

    None if it is not known how long steps took, or if the number of workers has changed.
    """
    times, steps = worker["step_times"], worker["steps"]
    if not times or not steps or len(set(fields["workers_by_epoch"])) > 1:
        return None
    seconds = sum(times[part] for part in ("data", "compute", "communication", "waiting"))
    rows = worker["rows"] * fields["epochs"] / steps
    # With `steps_per_epoch` an epoch does not use all rows.
    most = (fields.get("settings") or {}).get("batch_size")
    return min(rows, most or math.inf) / seconds if seconds > 0 else None


def _make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _make_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
