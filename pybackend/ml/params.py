"""Params of the stages, with names like those of pyspark's own stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml.param import Param, TypeConverters, shared
from pyspark.ml.util import Identifiable

from pybackend.core.api.calls import suggest
from pybackend.core.api.train import barrier_train
from pybackend.core.errors import InputError
from pybackend.core.words import show, term

_INT = TypeConverters.toInt

# Arguments of `barrier_train` that are separate Params, the data, or not supported: Spark's barrier
# stage cannot change its number of tasks.
_NOT_OPTIONS = {"spark", "model", "data", "validation_data", "validation_split", "features"}
_NOT_OPTIONS |= {"label", "weight", "workers", "epochs", "batch_size", "seed", "verbose"}


class _Unbound(Identifiable):
    """Owner of the Params of a class; each stage gets its own copies."""

    def __init__(self) -> None:
        self.uid = "undefined"


def setter(name: str) -> Callable[..., Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Set the Param `{name}`, and return this stage."
    return set_value


def getter(name: str) -> Callable[..., Any]:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    get_value.__doc__ = f"Return the value of the Param `{name}`, or its default."
    return get_value


def _to_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"expected a {term('dict')} with strings as keys, not {show(value)}")
    return dict(value)


def _to_features(value: Any) -> Any:
    return _to_mapping(value) if isinstance(value, Mapping) else TypeConverters.toListString(value)


def _to_options(value: Any) -> dict[str, Any]:
    options = _to_mapping(value)
    known = inspect.signature(barrier_train).parameters
    allowed = [name for name in known if name not in _NOT_OPTIONS]
    if unknown := sorted(options.keys() - set(allowed)):
        raise TypeError(f"{show(unknown[0])} is not one of the options: {', '.join(allowed)}")
    return options


def param(name: str, doc: str, convert: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return a Param for a class of stages, its setter and its getter."""
    made = Param(_Unbound(), name, doc, typeConverter=convert)
    return made, setter(name), getter(name)


class PredictionParams(
    shared.HasFeaturesCol,
    shared.HasLabelCol,
    shared.HasPredictionCol,
    shared.HasProbabilityCol,
    shared.HasRawPredictionCol,
):
    """Params for predictions; a fitted model inherits them from its estimator."""

    features, setFeatures, getFeatures = param(
        "features", "columns of one input, or a mapping; overrides featuresCol", _to_features
    )
    predictBatchSize, setPredictBatchSize, getPredictBatchSize = param(
        "predictBatchSize", "number of rows that a task predicts at once", _INT
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(predictBatchSize=256)

    setFeaturesCol = setter("featuresCol")
    setLabelCol = setter("labelCol")
    setPredictionCol = setter("predictionCol")
    setProbabilityCol = setter("probabilityCol")
    setRawPredictionCol = setter("rawPredictionCol")

    def setParams(self, **values: Any) -> Any:
        """Set several Params by name, and return this stage."""
        return self._set(**values)

    def _set_up(self, custom_objects: Any, safe_mode: bool, uid: str | None, params: Any) -> None:
        """Set what both stages are created with."""
        self.customObjects, self.safeMode = custom_objects, safe_mode
        if uid is not None:
            self._resetUid(uid)
        for name in params:
            if not self.hasParam(name):
                known = [param.name for param in self.params]
                wrong = f"{type(self).__name__} has no Param `{name}`"
                raise InputError(f"{wrong}: {suggest(name, known) or 'see its documentation'}")
        self._set(**params)

    def _given(self, name: str) -> Any:
        """Return the value of a Param; None if it has neither a value nor a default."""
        return self.getOrDefault(name) if self.isDefined(name) else None


class TrainingParams(PredictionParams, shared.HasWeightCol, shared.HasValidationIndicatorCol):
    """Params for training: the arguments of `barrier_train`, in pyspark's spelling."""

    labels, setLabels, getLabels = param(
        "labels", "mapping from outputs to columns; overrides labelCol", _to_mapping
    )
    workers, setWorkers, getWorkers = param("workers", "number of worker processes", _INT)
    epochs, setEpochs, getEpochs = param("epochs", "number of passes over the data", _INT)
    batchSize, setBatchSize, getBatchSize = param("batchSize", "largest batch of a worker", _INT)
    seed, setSeed, getSeed = param("seed", "random seed, for a repeatable training", _INT)
    verbose, setVerbose, getVerbose = param("verbose", "0: silent, 1: epochs, 2: all output", _INT)
    modelArgs, setModelArgs, getModelArgs = param(
        "modelArgs", "named arguments of the function that builds the model", _to_mapping
    )
    trainOptions, setTrainOptions, getTrainOptions = param(
        "trainOptions", "other arguments of barrier_train, by name", _to_options
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(epochs=1, batchSize=32, verbose=0, modelArgs={}, trainOptions={})

    setWeightCol = setter("weightCol")
    setValidationIndicatorCol = setter("validationIndicatorCol")
