"""Spark ML estimator that trains a Keras model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.ml import Estimator

from pybackend.core.api.display import printer
from pybackend.core.api.sent_objects import find_source, is_keras_model
from pybackend.core.api.train import barrier_train
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.job.messages import Note
from pybackend.core.job.storage_options import check_model_options
from pybackend.core.launchers import SparkLauncher, is_spark_frame
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.words import term
from pybackend.ml.model import KerasModel
from pybackend.ml.params import TrainingParams
from pybackend.ml.persistence import SavedStage, encode, pack_options, unpack_options


class KerasEstimator(Estimator["KerasModel"], TrainingParams, SavedStage):
    """Train a Keras model with `barrier_train` on the rows of a DataFrame.

    Parameters
    ----------
    model
        A compiled Keras 3 model, from which each `fit` starts and which stays unchanged; or a
        function that returns one. The function is called on every worker, with the Param
        ``modelArgs`` as named arguments, so that ``ParamGridBuilder`` can vary them.
    customObjects, safeMode
        As ``custom_objects`` and ``safe_mode`` of `ModelOptions`. They are not saved.
    params
        Params by name. As in pyspark's classifiers: ``featuresCol``, ``labelCol``, ``weightCol``,
        ``predictionCol``, ``probabilityCol``, ``rawPredictionCol``, ``validationIndicatorCol``
        (True for validation rows). As in `barrier_train`: ``features`` (columns of one input, or a
        mapping from input names), ``labels`` (a mapping from output names), ``workers``,
        ``epochs``, ``batchSize``, ``seed``, ``verbose`` (default 0), and all others in
        ``trainOptions``, e.g. ``{"exchange": LocalSteps(8)}``.

    Raises
    ------
    InputError
        ``model`` is neither. `fit` raises the same errors as `barrier_train`.
    """

    def __init__(
        self,
        model: Any,
        *,
        customObjects: Mapping[str, Any] | None = None,
        safeMode: bool = True,
        uid: str | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        # `fit` checks the arguments of a function.
        if not callable(model) or isinstance(model, type):
            find_source(model)
        self.model = model
        self._set_up(customObjects, safeMode, uid, params)

    def _fit(self, dataset: Any) -> KerasModel:
        if not is_spark_frame(dataset):
            kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
            raise InputError(f"`dataset` must be a {term('Spark DataFrame')}, not {kind}")
        data, validation_data = self._split(dataset)
        features = self._given("features") or [self.getFeaturesCol()]
        # A tuning may fit several at once: each waits for its turn, and reports it.
        show = printer(1)
        launcher = SparkLauncher(dataset.sparkSession, on_wait=lambda text: show(Note(text)))
        options = self.getTrainOptions()
        model_options = replace(
            check_model_options(options.get("model_options")),
            custom_objects=self.customObjects,
            safe_mode=self.safeMode,
        )
        result = barrier_train(
            launcher,
            self._model_to_train(),
            data,
            validation_data=validation_data,
            workers=self._given("workers"),
            epochs=self.getEpochs(),
            batch_size=self.getBatchSize(),
            seed=self._given("seed"),
            features=features,
            label=self._given("labels") or self.getLabelCol(),
            weight=self._given("weightCol"),
            verbose=self.getVerbose(),
            **{**options, "model_options": model_options},
        )
        fitted = KerasModel(
            result, customObjects=self.customObjects, safeMode=self.safeMode, uid=self.uid
        )
        if fitted.levels is None and not self.isDefined("labels"):
            levels = _read_levels(dataset, self.getLabelCol())
            fitted.trained = replace(fitted.trained, levels=levels)
        return self._copyValues(fitted)

    def _model_to_train(self) -> Any:
        arguments = self.getModelArgs()
        if not arguments:
            return self.model
        build = partial(self.model, **arguments)
        if find_source(build) == "function" and not hasattr(self.model, "fit"):
            return build
        raise InputError(
            "`modelArgs` are arguments for a function that builds the model, but `model` is a model"
        )

    def _split(self, dataset: Any) -> tuple[Any, Any]:
        """Return the training rows and the validation rows."""
        indicator = self._given("validationIndicatorCol")
        if not indicator:
            return dataset, None
        validates = dataset["`" + indicator.replace("`", "``") + "`"]
        return dataset.filter(~validates), dataset.filter(validates)

    def pack(self) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        """Return the model's file, further metadata, and the values of the Params."""
        model = self.model.model if isinstance(self.model, TrainResult) else self.model
        # Functions, and callbacks among the options, could not be read in safe mode.
        if not is_keras_model(model):
            raise InputError(
                "this estimator builds its model with a function, and functions are not saved: "
                "pass it a compiled model, or save the model that fit() returns"
            )
        values = {p.name: self.getOrDefault(p) for p in self.params if self.isSet(p)}
        if "trainOptions" in values:
            values["trainOptions"] = pack_options(values["trainOptions"])
        return encode(model, self.customObjects, "train"), {}, values

    @classmethod
    def unpack(cls, path: str, content: bytes, metadata: Any, **options: Any) -> KerasEstimator:
        custom_objects, safe_mode = options.get("customObjects"), options.get("safeMode", True)
        model = model_from_bytes(content, custom_objects=custom_objects, safe_mode=safe_mode)
        given = metadata["paramMap"]
        if "trainOptions" in given:
            given["trainOptions"] = unpack_options(given["trainOptions"])
        return cls(model, uid=metadata["uid"], **options)


def _read_levels(dataset: Any, label: str) -> Sequence[str] | None:
    """Return the class names that `StringIndexer` stored in the metadata of its column."""
    found = [field.metadata for field in dataset.schema.fields if field.name == label]
    levels = found[0].get("ml_attr", {}).get("vals") if found else None
    return levels if isinstance(levels, list) else None
