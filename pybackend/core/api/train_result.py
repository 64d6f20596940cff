"""Result of a training run."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pybackend.core.api import rendering
from pybackend.core.api.calls import EvaluationCall, PredictionCall, TrainedModel
from pybackend.core.data.columns import as_plain
from pybackend.core.errors import InputError, Moment
from pybackend.core.job import report
from pybackend.core.job.call_options import Features, OnMissing, PredictionType
from pybackend.core.job.storage_options import ColumnEncoding, DataOptions
from pybackend.core.words import show

# What `to_dict` returns unchanged.
_PLAIN = (
    *("history", "model_format", "model_sha256", "seconds", "parts", "seed", "epochs"),
    *("initial_epoch", "validation_freq", "metrics", "model_uri", "features", "settings"),
    *("tensors", "categories", "inputs", "encode", "feature_names", "workers_by_epoch"),
    "tensorboard",
)


@dataclass(frozen=True)
class TrainResult(TrainedModel):
    """A trained model, its history and a report of each worker.

    Attributes
    ----------
    content
        The trained model file; empty if it was written to a URI.
    model_format
        ``"h5"``; ``"keras"`` if the model cannot be written as HDF5; or ``"weights.h5"``, a file
        for ``model.load_weights()`` with only the weights, if Keras cannot write the whole model to
        a file.
    model_sha256
        Hexadecimal SHA-256 digest of the model file.
    history
        Maps each metric to its values, one float for each epoch of `epochs_of`, over the rows of
        all workers. Names that begin with ``val_`` refer to validation data.
    workers
        One `WorkerReport` per rank.
    seconds
        Wall time of the whole call.
    parts
        Seconds of the call's parts, in order: ``prepare`` (the arguments are checked, the model and
        the rows encoded), ``start`` (the workers start, and receive the model and the rows),
        ``epochs`` (from the beginning of the first epoch to the end of the last one, with all
        restarts) and ``finish`` (the model is saved, returned and checked).
    seed
        The seed that reproduces this training run.
    epochs
        Number of epochs run.
    initial_epoch, validation_freq
        As in `barrier_train`.
    metrics
        Further values, such as the test accuracy of `train_mnist`.
    model_uri
        Path or URI of the model file, if `ModelOptions` had one.
    tensors, categories, encode
        As in `DataOptions`, for the feature columns: the values and the encoding of each encoded
        column.
    feature_names
        Names of the numbers in each input, in order, if each comes from a column: a list, or a list
        by input name. One-hot columns are named ``column_value``.
    levels
        Values of the label whose codes are 0, 1, 2, ..., if its column has categories. With several
        labels, see `categories`.
    features
        The columns that were the inputs: a list, or a list by input name.
    generations
        With `Elastic`, the worker groups: a `Generation` for the first epoch, and another for
        each time that workers left or joined. After a resume, also those of the calls before,
        elastic or not.
    restarts
        One `Restart` for each time the workers were restarted.
    timeline
        What the workers did and when, by rank: a `Moment` for each change, with those of workers
        that were lost.
    tensorboard
        Location of the event files, if `track_tensorboard` was used: a folder on this machine (with
        processes that `join`, on the machine of the first one), or a URI.
    settings
        Settings of the training as plain data: ``launcher`` (described in words), ``workers``,
        ``elastic`` (a dict of ``min`` and ``max``), ``epochs``, ``initial_epoch``, ``batch_size``
        (rows per worker and step), ``steps_per_epoch``, ``shuffle``, ``seed``, ``class_weight``,
        ``validation_split``, ``optimizer`` (a dict of its class, ``kind``, and its arguments that
        are plain values; None if only the workers build the model),
        ``exchange`` (a dict of its options, with ``kind``: ``"Exchange"``, ``"LocalSteps"`` or
        ``"ParameterServer"``), ``scale_lr``, ``roles``, ``resources``, ``in_memory``,
        ``checkpoint``, ``restarts``, ``model_uri``, ``timeout`` (seconds), and ``versions`` of
        tfdist, python, tensorflow, keras and numpy in the calling process, and, with Spark, of
        pyspark. None: not used. Numbers that JSON cannot represent are text: ``"inf"``.
    inputs
        Shape and dtype of each input of a row, nested as in the model. They are used to build a
        model that has no weights before its first call.
    """

    content: bytes = field(repr=False)
    model_format: str
    model_sha256: str
    history: dict[str, list[Any]]
    workers: list[report.WorkerReport] = field(repr=False)
    seconds: float
    seed: int
    epochs: int
    initial_epoch: int = 0
    validation_freq: int | tuple[int, ...] = 1
    metrics: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict, repr=False)
    model_uri: str | None = None
    levels: list[Any] | None = None
    features: list[str] | dict[str, list[str]] | None = None
    tensors: dict[str, Any] | None = field(default=None, repr=False)
    categories: dict[str, Any] | None = field(default=None, repr=False)
    encode: dict[str, ColumnEncoding] | None = field(default=None, repr=False)
    feature_names: list[str] | dict[str, list[str] | None] | None = field(default=None, repr=False)
    generations: list[report.Generation] = field(default_factory=list, repr=False)
    restarts: list[report.Restart] = field(default_factory=list, repr=False)
    timeline: list[Moment] = field(default_factory=list, repr=False)
    tensorboard: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    inputs: Any = field(default=None, repr=False, compare=False)
    decode: Callable[[bytes], Any] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # Without the model: the decoder rebuilds it.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def model(self) -> Any:
        """The trained, compiled Keras model, decoded on first use."""
        if self.decode is None:
            raise InputError("this result has no decoder: use `model_from_base64(model_base64)`")
        return self.decode(self.model_bytes())

    @property
    def model_base64(self) -> str:
        """`content` as base64 text, which each access encodes."""
        return base64.b64encode(self.content).decode("ascii")

    def model_bytes(self) -> bytes:
        """Return the trained model file, read from its URI if it was written there."""
        from pybackend.core.api.result_files import read_model_file

        return self.content if self.model_uri is None else read_model_file(self.model_uri)

    def save(self, path: str | Path) -> Path:
        """Write the model to a file, e.g. ``result.save("model.h5")``, and return its path.

        The name ends with ``.h5`` or ``.keras``. If this is not the `model_format`, Keras converts
        the model, with the optimizer's state. If that is ``"weights.h5"``, a name with this ending
        gives a file for ``model.load_weights``. A ``*.json`` holds the whole result, for `load` and
        R's ``read_fit()``. The file is either complete or absent.

        Raises
        ------
        InputError
            The name has a different ending, or the file cannot be written.
        SerializationError
            Keras cannot write the model in that format.
        """
        from pybackend.core.api import result_files

        path = result_files.check_path(path, f"a file, such as {show('model.h5')}")
        if path.suffix == ".json":
            return result_files.write_result(self.record, self.model_base64, path)
        return result_files.save_file(path, self.model_format, self.model_bytes, lambda: self.model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> TrainResult:
        """Read a result from a ``*.json`` file that `save`, or R's ``write_model()``, wrote.

        Parameters
        ----------
        custom_objects, safe_mode
            As in `barrier_train`, for its model.

        Raises
        ------
        InputError
            The file cannot be read.
        SerializationError
            The file is not a result, or is damaged.
        """
        from pybackend.core.api import result_files

        return result_files.read_result(cls, Path(path), custom_objects, safe_mode)[0]

    def export(self, path: str | Path) -> Path:
        """Write the model as a SavedModel or an ONNX file, without the training state.

        This is Keras's ``model.export``. A SavedModel, for TensorFlow Serving and other readers of
        the format, has the signature ``"serving_default"`` with the model's inputs and outputs.
        Read it with ``tf.saved_model.load(path)``, not with `load_model`.

        An ONNX file accepts any number of rows. Before it is written, ONNX Runtime predicts random
        rows with it, and the results must equal Keras's up to rounding (1e-4 of the largest
        value). It needs the extra ``onnx``. Functional and Sequential models can be exported,
        except with text inputs and layers that look up or hash values.

        Parameters
        ----------
        path
            ``*.onnx`` for an ONNX file, which replaces an existing one; otherwise a new folder. It
            is either complete or absent.

        Raises
        ------
        InputError
            The folder already exists, or cannot be written; or the model cannot be an ONNX file, or
            a package is missing.
        SerializationError
            Keras cannot export the model, or the ONNX file computes other numbers. The message
            names the output and the difference.
        """
        from pybackend.core.api import result_files

        path = result_files.check_path(
            path, f"a new folder, such as {show('exported')}, or a file *.onnx"
        )
        if path.suffix == ".onnx":
            from pybackend.core.model.onnx import check_onnx_installed, write_onnx

            check_onnx_installed()
            write_onnx(self.model, path)
            return path
        result_files.check_new_folder(path)
        return result_files.export_model(self.model, path)

    def evaluate(
        self,
        data: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        features: Features | None = None,
        label: str | Mapping[str, str] | None = "label",
        weight: str | None = None,
        data_options: DataOptions | None = None,
        verbose: Any = 0,
    ) -> dict[str, Any]:
        """Evaluate the model on other rows, in this process.

        The values equal those of ``model.evaluate``. For more rows than one process can handle,
        pass this result to `barrier_evaluate`.

        Parameters
        ----------
        data
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, a data frame, the path or URI
            of Parquet or TFRecord files, or a TensorFlow or Keras data set of batches.
        y, sample_weight
            Labels and weights, if ``data`` has only x.
        batch_size
            Rows per step. A data set has its own batches.
        features, label, weight, data_options
            As in `barrier_evaluate`: ``label`` and ``weight`` are not taken from the result.
        verbose
            As in Keras; 0 (default): silent.

        Returns
        -------
        dict
            ``loss`` and each metric by its name: a float, or a list of them.

        Raises
        ------
        InputError
            An argument is invalid, or the rows do not fit the model.
        """
        from pybackend.core.api.in_process import evaluate_here

        if y is not None or sample_weight is not None:
            data = (data, y) if sample_weight is None else (data, y, sample_weight)
        options: Any = {"batch_size": batch_size, "features": features, "label": label}
        options |= {"weight": weight, "data_options": data_options, "verbose": verbose}
        call = EvaluationCall(model=self, options=options)
        return evaluate_here(call, data)

    def predict(
        self,
        x: Any,
        *,
        batch_size: int = 32,
        type: PredictionType | None = None,
        levels: Sequence[Any] | None = None,
        on_missing: OnMissing = "null",
        verbose: Any = 0,
    ) -> Any:
        """Predict with the model, in this process.

        The numbers equal those of ``model.predict``. For more rows than one process can handle,
        pass this result to `barrier_predict` or `predict_spark`.

        Parameters
        ----------
        x
            Inputs: an array with one entry per row, a list or dict of arrays, a data frame, the
            path or URI of files, or a TensorFlow or Keras data set of batches. Columns of tables
            are read as in training: `features`, `tensors` and `categories`.
        batch_size
            Number of rows to predict at a time. A data set has its own batches.
        type
            ``"raw"``: the model's unchanged outputs. ``"class"`` or ``"prob"``: the columns
            ``.pred_class``, or ``.pred_<level>`` for each class, as in `predict_spark`. None
            (default): for a data frame the default of `predict_spark`, for other inputs ``"raw"``.
        levels
            Names of the classes 0, 1, 2, ... None (default): `levels`, or else numbers.
        on_missing
            Treatment of a data frame's row that has a null, a NaN, an infinite number or a value
            outside its column's categories. ``"null"`` (default): its predictions are null (NaN in
            arrays). ``"error"``: as in training, a null or an unknown category raises an error, and
            other values are passed to the model.
        verbose
            As in Keras; 0 (default): silent.

        Returns
        -------
        pandas.DataFrame
            If ``type`` is ``"class"`` or ``"prob"``, and by default if ``x`` is a data frame. It
            has the index of that data frame.
        numpy array, or a list or dict of arrays if the model has several outputs
            In all other cases: one entry per row, in row order. For a text label, the numbers of
            its output are in the order of its `categories`.

        Raises
        ------
        InputError
            An argument is invalid, or the rows do not fit the model.
        """
        from pybackend.core.api.in_process import predict_here

        options: Any = {"batch_size": batch_size, "type": type, "levels": levels}
        options |= {"on_missing": on_missing, "verbose": verbose}
        call = PredictionCall(model=self, options=options)
        return predict_here(call, x)

    @property
    def audit(self) -> report.Audit | None:
        """Result of the audit, which repeats some steps in one process.

        ``skipped`` gives the reason if no step was compared. None for results of functions.
        `Exchange` has the option ``audit``.
        """
        return next((one.audit for one in self.workers if one.audit is not None), None)

    def epochs_of(self, name: str) -> list[int]:
        """Return the epochs, counted from 1, for which the history has values of this metric."""
        last = self.initial_epoch + self.epochs
        epochs = list(range(self.initial_epoch + 1, last + 1))
        if not name.startswith("val_"):
            return epochs
        chosen = self.validation_freq
        return [e for e in epochs if (e % chosen == 0 if isinstance(chosen, int) else e in chosen)]

    @property
    def workers_by_epoch(self) -> list[int]:
        """Number of workers at the end of each epoch that was run."""
        if not self.generations:
            return [len(self.workers)] * self.epochs
        return report.count_by_epoch(self.generations, self.initial_epoch + self.epochs)

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Rank that the others waited for, and how many seconds each waited; None if none did."""
        return report.find_straggler(self.workers)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        metrics: str | Sequence[str] | None = None,
        smooth: float = 0.0,
    ) -> Any:
        """Plot the history, a panel per metric. Needs the extra ``plots``.

        A notebook shows the figure if it is a cell's last value. In a script, pass ``path``.

        Parameters
        ----------
        path
            File to write: .png, .pdf or .svg.
        metrics
            One metric or several, in order, each with its validation values. None (default): all.
        smooth
            Weight of the running mean in the next point: at least 0 (default) and less than 1. The
            original values are drawn faintly behind the smoothed line.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        InputError
            matplotlib is missing or does not support the file's type; or the history is empty, or
            has no such metric.
        """
        if not self.history:
            raise InputError("there is no history to plot: no epochs were run")
        panels = rendering.find_panels(self.history, self.epochs_of, metrics)
        weight = rendering.check_smoothing(smooth)
        rendering.check_figure(path)
        figure = rendering.plot_panels(panels, weight)
        if path is not None:
            rendering.save_figure(figure, path)
        return figure

    def summary(self) -> str:
        """Return a few lines of text: the metrics of the last epoch and what each worker did."""
        return "\n".join(rendering.summarize(self))

    __str__ = summary

    def _repr_html_(self) -> str:
        return rendering.show_in_notebook(self)

    def to_dict(self, *, model: bool = True) -> dict[str, Any]:
        """Return the result as lists, dicts, strings, numbers and None, for ``json.dumps``.

        The keys are the names of the attributes. ``workers`` is a list of dicts with the fields of
        `WorkerReport` and ``ok``; ``generations``, ``restarts`` and ``timeline`` are lists of dicts
        with the fields of `Generation`, `Restart` and `Moment`. ``epochs_of`` has the epochs for
        each name in ``history``. ``straggler`` is a list of rank and seconds, or None. NaN and
        infinite values are unchanged, so ``json.dumps(..., allow_nan=False)`` raises an error for
        them.

        Parameters
        ----------
        model
            False leaves out ``model_base64``, the whole model.
        """
        return {
            **({"model_base64": self.model_base64} if model else {}),
            **{name: getattr(self, name) for name in _PLAIN},
            "workers": [{**asdict(w), "ok": w.ok} for w in self.workers],
            "epochs_of": {name: self.epochs_of(name) for name in self.history},
            "straggler": list(self.straggler) if self.straggler else None,
            "audit": asdict(self.audit) if self.audit else None,
            "levels": None if self.levels is None else as_plain(self.levels),
            "generations": [*map(asdict, self.generations)],
            "restarts": [*map(asdict, self.restarts)],
            "timeline": [*map(asdict, self.timeline)],
        }

    @property
    def record(self) -> str:
        """JSON text of all values without the model file; `report` is written from it.

        The content of `to_dict`, with ``rows_per_second`` for each worker. Numbers that JSON cannot
        represent are text: ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
        """
        from pybackend.core.api import result_files

        record = self.to_dict(model=False)
        record["model_bytes"] = len(self.content) or None
        record["workers"] = [result_files.describe_worker(one, record) for one in record["workers"]]
        return json.dumps(result_files.make_plain(record))
