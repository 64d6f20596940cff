"""A Keras model as a Spark ML pipeline stage that adds predictions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyspark.ml import Model

from pybackend.core.api.scoring import check_model, predict_spark
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.predictions import Output
from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job.codec import read_fields
from pybackend.core.job.storage_options import ModelOptions
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.words import show, term
from pybackend.ml.params import PredictionParams
from pybackend.ml.persistence import SavedStage, Trained, encode, flatten_stages


class KerasModel(Model, PredictionParams, SavedStage):
    """Add the predictions of a Keras model to the rows of a DataFrame.

    Created by `KerasEstimator.fit`, by `KerasModel.load`, or from a trained model:
    ``KerasModel(model, featuresCol="x")``. A model with a number for each class, or with one
    probability and one of Keras's binary losses, adds ``rawPredictionCol``, ``probabilityCol`` (ML
    vectors) and ``predictionCol``, the class as a double. If the loss is ``from_logits``, the
    probabilities are the softmax or sigmoid of the numbers. Any other model adds ``predictionCol``:
    a double, a vector, or nested arrays; for several outputs ``<predictionCol>_<output>`` for each.

    Parameters
    ----------
    model
        A Keras model, or the `TrainResult` of `barrier_train`.
    customObjects, safeMode
        As ``custom_objects`` and ``safe_mode`` of `ModelOptions`. They are not saved; after
        loading, set them with `setCustomObjects` and `setSafeMode`.
    params
        Params by name: ``featuresCol`` or ``features``, ``predictionCol``, ...

    Raises
    ------
    InputError
        ``model`` has another type.
    """

    def __init__(
        self,
        model: Any,
        *,
        customObjects: Mapping[str, Any] | None = None,
        safeMode: bool = True,
        trained: Trained | None = None,
        uid: str | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, bytes):  # as after loading
            check_model(model)
        self._source = model
        self._decoded: Any = None
        self._lock = threading.Lock()
        self.trained = _read_trained(model) if trained is None else trained
        self._set_up(customObjects, safeMode, uid, params)

    @property
    def model(self) -> Any:
        """The Keras model, decoded on first use.

        Raises
        ------
        SerializationError
            A saved model was damaged, needs `setCustomObjects`, or contains Python code.
        """
        if isinstance(self._source, TrainResult):
            return self._source.model
        if not isinstance(self._source, bytes):
            return self._source
        with self._lock:
            if self._decoded is None:
                self._decoded = model_from_bytes(
                    self._source, custom_objects=self.customObjects, safe_mode=self.safeMode
                )
            return self._decoded

    @property
    def result(self) -> TrainResult | None:
        """Result of training; None after loading."""
        return self._source if isinstance(self._source, TrainResult) else None

    @property
    def history(self) -> Mapping[str, Any]:
        """History as in `TrainResult`. It is saved with the model."""
        return self.trained.history

    @property
    def levels(self) -> Sequence[str] | None:
        """Names of the classes 0, 1, 2, ..., if the label had any."""
        return self.trained.levels

    def setCustomObjects(self, value: Mapping[str, Any] | None) -> KerasModel:
        """Set the custom classes and functions of a saved model, and return this stage."""
        self.customObjects = value
        return self

    def setSafeMode(self, value: bool) -> KerasModel:
        """Set the safe mode for a saved model, and return this stage.

        False allows the model to run Python code that it contains: use it only for files that you
        trust.
        """
        self.safeMode = value
        return self

    def _transform(self, dataset: Any) -> Any:
        from pybackend.core.model import inputs_outputs as outputs

        model = self.model
        frame = predict_spark(
            model,
            dataset,
            features=self._chosen_features(),
            tensors=self.trained.tensors,
            categories=self.trained.categories,
            encode=self.trained.encode,
            type="raw",
            on_missing="error",  # like pyspark's own stages: ML vectors cannot be null
            batch_size=self.getPredictBatchSize(),
            model_options=ModelOptions(custom_objects=self.customObjects, safe_mode=self.safeMode),
        )
        found = outputs.list_outputs(model)
        are_logits = outputs.has_logits(model, found)
        count = outputs.count_classes(model, found) if outputs.is_classifier(model, found) else 0
        count = max(2, count) if are_logits else count
        levels = self.levels if self.levels and len(self.levels) == count else None
        names = self.getPredictionCol(), self.getProbabilityCol(), self.getRawPredictionCol()
        classes = _Classes(count, are_logits, levels)
        return _add_columns(frame, dataset.columns, found, classes, *names)

    def _chosen_features(self) -> Any:
        if self.isDefined("features"):
            return self.getFeatures()
        if self.isSet("featuresCol") or self.trained.features is None:
            return [self.getFeaturesCol()]
        return self.trained.features

    def pack(self) -> tuple[bytes, dict[str, Any], None]:
        """Return the model's file and further metadata; an error if a Keras file would not preserve
        the whole model.
        """
        is_read = isinstance(self._source, bytes)
        content = self._source if is_read else encode(self.model, self.customObjects, "predict")
        return content, {"trained": asdict(self.trained)}, None

    @classmethod
    def unpack(cls, path: str, content: bytes, metadata: Any, **options: Any) -> KerasModel:
        try:
            trained = read_fields(Trained, metadata.get("trained"))
        except (ValueError, TypeError) as error:
            raise SerializationError(f"the metadata of {show(path)} is damaged: {error}") from error
        return cls(content, trained=trained, uid=metadata["uid"], **options)


def _read_trained(model: Any) -> Trained:
    if not isinstance(model, TrainResult):
        return Trained()
    levels = None if model.levels is None else [str(level) for level in model.levels]
    columns = (model.features, model.tensors, model.categories, model.encode)
    return Trained(model.history, levels, *columns)


def find_keras(stages: Sequence[Any]) -> KerasModel | None:
    """Return the last Keras model among fitted stages, including those of pipelines."""
    parts = [part for stage in stages for part in flatten_stages(stage)]
    found = [part for part in parts if isinstance(part, KerasModel)]
    return found[-1] if found else None


# Columns of pyspark's classifiers and regressors, made of a model's outputs. This uses plain Spark
# SQL, so that nothing runs before Spark needs the rows.

# Names of the columns with the model's outputs. SQL never contains the user's names, because Spark
# replaces ``${...}`` in SQL.
_GIVEN = ".given"
_DOUBLES = f"CAST(`{_GIVEN}0` AS array<double>)"


@dataclass(frozen=True)
class _Classes:
    """Classes that a model's only output represents."""

    count: int  # 0: the output does not represent classes
    are_logits: bool  # a softmax or sigmoid converts the numbers to probabilities
    levels: Sequence[str] | None  # their names, if known


def _add_columns(
    frame: Any, kept: Sequence[str], outputs: Sequence[Output], classes: _Classes, *names: str
) -> Any:
    """Replace the columns of the model's outputs with the columns of a pipeline.

    ``frame`` has the columns ``kept``, and those of ``predict_spark(type="raw")``. ``names`` are
    those of the prediction, the probabilities and the raw numbers; an empty name omits its column.
    `InputError`: ``kept`` has one of the names already.
    """
    prediction, probability, raw = names
    are_many = len(outputs) > 1
    given = [f".pred_{output.name}" for output in outputs] if are_many else [".pred"]
    added: dict[str, tuple[str, bool]] = {}  # SQL, and whether it is a vector
    if classes.count and not are_many:
        numbers, probabilities, chosen = _classify(outputs[0], classes)
        added = {raw: (numbers, True), probability: (probabilities, True)}
        added[prediction] = chosen, False
    else:
        for index, output in enumerate(outputs):
            name = f"{prediction}_{output.name}" if are_many else prediction
            added[name] = _number(output, index), output.depth == 1
    added.pop("", None)
    _reject_taken_names(kept, list(added))
    columns = [frame[_quote(name)].alias(f"{_GIVEN}{index}") for index, name in enumerate(given)]
    staged = frame.select(*(frame[_quote(name)] for name in kept), *columns).selectExpr(
        "*", *(f"{sql} AS `.new{index}`" for index, (sql, _) in enumerate(added.values()))
    )
    metadata = {prediction: _describe(classes)} if classes.count else {}
    new = [
        _finish(staged[f"`.new{index}`"], name, is_vector, metadata.get(name))
        for index, (name, (_, is_vector)) in enumerate(added.items())
    ]
    return staged.select(*(staged[_quote(name)] for name in kept), *new)


def _number(output: Output, index: int) -> str:
    """Return the SQL for an output without classes: one number, a vector, or nested arrays."""
    wanted = {0: "double", 1: "array<double>"}.get(output.depth)
    return f"CAST(`{_GIVEN}{index}` AS {wanted})" if wanted else f"`{_GIVEN}{index}`"


def _classify(output: Output, classes: _Classes) -> tuple[str, str, str]:
    """Return the SQL for the raw numbers, the probabilities and the class."""
    if output.depth == 0:
        number = f"CAST(`{_GIVEN}0` AS double)"
        if classes.are_logits:
            sigmoid = f"1 / (1 + exp(-{number}))"
            raw, probability = f"array(-{number}, {number})", f"array(1 - {sigmoid}, {sigmoid})"
        else:
            raw = probability = f"array(1 - {number}, {number})"
        border = 0 if classes.are_logits else 0.5
        return raw, probability, f"CAST({number} > {border}D AS double)"
    probability = _softmax(_DOUBLES) if classes.are_logits else _DOUBLES
    chosen = _let("r", _DOUBLES, "CAST(array_position(r, array_max(r)) - 1 AS double)")
    return _DOUBLES, probability, chosen


def _softmax(numbers: str) -> str:
    quotients = _let("s", "aggregate(e, 0D, (a, v) -> a + v)", "transform(e, v -> v / s)")
    powers = _let("e", "transform(r, v -> exp(v - m))", quotients)
    return _let("r", numbers, _let("m", "array_max(r)", powers))


def _let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that Spark computes once per row."""
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


def _finish(column: Any, name: str, is_vector: bool, metadata: dict[str, Any] | None) -> Any:
    if is_vector:
        from pyspark.ml.functions import array_to_vector

        column = array_to_vector(column)
    return column.alias(name, metadata=metadata) if metadata else column.alias(name)


def _describe(classes: _Classes) -> dict[str, Any]:
    """Return Spark ML metadata for a column of classes, in which `IndexToString` finds names."""
    known = {"vals": list(classes.levels)} if classes.levels else {"num_vals": classes.count}
    return {"ml_attr": {"type": "nominal", **known}}


def _reject_taken_names(kept: Sequence[str], added: Sequence[str]) -> None:
    """Reject names that Spark considers equal, because it ignores case."""
    taken = {name.lower() for name in kept}
    for name in added:
        if name.lower() in taken:
            raise InputError(
                f"the {term('DataFrame')} would have two columns named {show(name)}: rename the "
                "prediction columns with setPredictionCol(), setProbabilityCol() and "
                f"setRawPredictionCol(), or drop the column of the {term('DataFrame')}"
            )
        taken.add(name.lower())


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
