"""A Keras model as a Spark ML pipeline stage that adds predictions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from pybackend.core.api.model import is_keras_model
from pybackend.core.api.predict import predict_spark
from pybackend.core.api.result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import ModelOptions
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.words import term
from pybackend.ml.columns import Classes, Names, add_columns
from pybackend.ml.params import PredictionParams
from pybackend.ml.persistence import ModelReader, ModelWriter, Trained, encode


class KerasModel(Model, PredictionParams, MLWritable, MLReadable["KerasModel"]):
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
        if not (isinstance(model, (TrainResult, bytes)) or is_keras_model(model)):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise InputError(
                f"`model` must be a Keras 3 model or a {term('TrainResult')}, not a {kind}"
            )
        self._source = model
        self._decoded: Any = None
        self._lock = threading.Lock()
        self._custom_objects = customObjects
        self._safe_mode = safeMode
        self.trained = _describe(model) if trained is None else trained
        if uid is not None:
            self._resetUid(uid)
        self._set(**params)

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
                    self._source, custom_objects=self._custom_objects, safe_mode=self._safe_mode
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
        self._custom_objects = value
        return self

    def setSafeMode(self, value: bool) -> KerasModel:
        """Set the safe mode for a saved model, and return this stage.

        False allows the model to run Python code that it contains: use it only for files that you
        trust.
        """
        self._safe_mode = value
        return self

    def _transform(self, dataset: Any) -> Any:
        from pybackend.core.model.inputs_outputs import (
            count_classes,
            has_logits,
            is_classifier,
            list_outputs,
        )

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
            model_options=ModelOptions(
                custom_objects=self._custom_objects, safe_mode=self._safe_mode
            ),
        )
        outputs = list_outputs(model)
        are_logits = has_logits(model, outputs)
        classes = count_classes(model, outputs) if is_classifier(model, outputs) else 0
        if are_logits:
            classes = max(2, classes)
        levels = self.levels if self.levels and len(self.levels) == classes else None
        return add_columns(
            frame,
            dataset.columns,
            outputs,
            Classes(classes, are_logits, levels),
            Names(self.getPredictionCol(), self.getProbabilityCol(), self.getRawPredictionCol()),
        )

    def _chosen_features(self) -> Any:
        if self.isDefined("features"):
            return self.getFeatures()
        if self.isSet("featuresCol") or self.trained.features is None:
            return [self.getFeaturesCol()]
        return self.trained.features

    def content(self) -> bytes:
        """Return the model's file, as `write` saves it.

        Raises
        ------
        InputError, SerializationError
            A Keras file would not preserve the whole model.
        """
        if isinstance(self._source, bytes):
            return self._source
        return encode(self.model, self._custom_objects, "predict")

    def write(self) -> MLWriter:
        """Return a writer of this stage; ``save(path)`` is short for ``write().save(path)``."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[KerasModel]:
        """Return a reader of such stages; ``load(path)`` is short for ``read().load(path)``."""
        return ModelReader(cls)


def _describe(model: Any) -> Trained:
    if not isinstance(model, TrainResult):
        return Trained()
    levels = None if model.levels is None else [str(level) for level in model.levels]
    columns = (model.features, model.tensors, model.categories, model.encode)
    return Trained(model.history, levels, *columns)
