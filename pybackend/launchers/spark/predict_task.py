"""Predictions in Spark's own Python processes, which cache the model.

This file is imported on the executors; the driver sends it there. The tasks do not communicate, so
they are plain tasks that Spark can schedule and retry freely.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.data.arrow import TensorReader
from pybackend.data.columns import ColumnGroup
from pybackend.data.predictions import Predictions
from pybackend.job.job import EXTRAS, MODEL_FILE, PredictionJob
from pybackend.model.quiet import import_tensorflow
from pybackend.model.scorers import (
    KerasScorer,
    OnnxInput,
    OnnxScorer,
    Scorer,
    predict_rows,
)

Array = npt.NDArray[Any]
# Spark reuses its Python processes for other tasks and queries.
_MOST_MODELS = 3
_models: OrderedDict[str, Scorer] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class PredictTask:
    """Function that Spark runs on each partition, by `mapInArrow` or as a UDF (`score`).

    Attributes
    ----------
    files
        The model's file, for Keras or ONNX Runtime, and the custom objects that it needs.
    digest
        Digest of the files' content; models with equal digests are equal.
    artifact
        Name under which Spark stores the model's file; None: it is in ``files``.
    onnx_inputs
        Inputs of the model's ONNX file; None: Keras computes the predictions.
    column_groups
        The tensors; their ``places`` are indices into ``places`` below.
    places
        Positions of the feature columns in the batches of `mapInArrow`.
    kept
        Number of their columns, starting with the first, that are copied to the result.
    skips_incomplete
        Whether a row with a null or an unknown category gets null predictions.
    """

    job: PredictionJob
    files: Mapping[str, bytes]
    digest: str
    column_groups: tuple[ColumnGroup, ...]
    places: tuple[int, ...]
    kept: int
    predictions: Predictions
    skips_incomplete: bool
    artifact: str | None = None
    onnx_inputs: tuple[OnnxInput, ...] | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield each batch with the predictions as further columns."""
        import pyarrow as pa

        reader = TensorReader(self.column_groups)
        names = [field.name for field in self.predictions.fields]
        for batch in batches:
            features = pa.RecordBatch.from_arrays(
                [batch.column(place) for place in self.places],
                [batch.schema.names[place] for place in self.places],
            )
            first = 0
            for columns, last in self._score(reader, features):
                rows = batch.slice(first, last - first)
                first = last
                yield pa.RecordBatch.from_arrays(
                    [*rows.columns[: self.kept], *columns],
                    [*rows.schema.names[: self.kept], *names],
                )

    def score(self, structs: Iterator[Any]) -> Iterator[Any]:
        """Yield the predictions as structs, for each array of structs of the features."""
        import pyarrow as pa

        reader = TensorReader(self.column_groups)
        names = [f"p{place}" for place, _ in enumerate(self.predictions.fields)]
        for array in structs:
            for columns, _ in self._score(reader, pa.RecordBatch.from_struct_array(array)):
                yield pa.StructArray.from_arrays(columns, names)

    def _score(self, reader: TensorReader, features: Any) -> Iterator[tuple[list[Any], int]]:
        """Yield prediction columns for blocks of rows, each with the row at which it ends."""
        import pyarrow as pa

        if not features.num_rows:
            return
        complete = np.ones(features.num_rows, bool)
        if self.skips_incomplete:
            complete = reader.find_complete(features)
            if not complete.all():
                features = features.filter(pa.array(complete))
        first = 0
        for outputs, last in self._predict(reader, features, complete):
            yield self.predictions.arrow(outputs, complete[first:last]), last
            first = last

    def _predict(
        self, reader: TensorReader, features: Any, complete: Array
    ) -> Iterator[tuple[list[Array], int]]:
        """Yield outputs for the complete rows in blocks, each with the row at which it ends.

        Parameters
        ----------
        features
            Features of the complete rows.
        """
        places = [*np.flatnonzero(complete).tolist(), len(complete)]
        if not features.num_rows:
            yield [output.make_empty() for output in self.predictions.outputs], places[0]
            return
        done = 0
        for outputs in predict_rows(self.model(), reader.read(features), self.job.batch_size):
            done += len(outputs[0])
            yield outputs, places[done]

    def model(self) -> Scorer:
        """Return the model, from this process's memory if it was already loaded."""
        with _lock:
            if self.digest not in _models:
                _models[self.digest] = self._load()
                while len(_models) > _MOST_MODELS:
                    _models.popitem(last=False)
            _models.move_to_end(self.digest)
            return _models[self.digest]

    def _load(self) -> Scorer:
        if self.onnx_inputs is not None:
            return OnnxScorer(self._model_file(), self.onnx_inputs, _count_cores() or 1)
        set_up_tensorflow()
        import cloudpickle

        from pybackend.model.load import configure_keras
        from pybackend.model.serialization import read_own_model

        configure_keras(self.job)
        # Pickled by the driver from its own objects, like this task.
        extras = cloudpickle.loads(self.files[EXTRAS]) if EXTRAS in self.files else {}
        model = read_own_model(
            self._model_file(),
            custom_objects=extras.get("custom_objects"),
            safe_mode=self.job.safe_mode,
            compile=False,
        )
        # XLA recompiles for each number of rows, and is slower for convolutions on a CPU.
        model.jit_compile = False
        return KerasScorer(model)

    def _model_file(self) -> bytes:
        if self.artifact is None:
            return self.files[MODEL_FILE]
        from pyspark import SparkFiles

        return Path(SparkFiles.get(self.artifact)).read_bytes()


def set_up_tensorflow() -> None:
    """Limit TensorFlow to the cores and GPUs of the task, and to the GPU memory that it needs."""
    from pyspark import TaskContext

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    context = TaskContext.get()
    gpus = None if context is None else context.resources().get("gpu")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    is_first = "tensorflow" not in sys.modules
    import_tensorflow()
    import tensorflow as tf

    if is_first:
        # Spark collects garbage after each task, and would search all of TensorFlow's objects.
        gc.freeze()
    with suppress(RuntimeError):  # initialized already, by an earlier model or the user
        if cores := _count_cores():
            tf.config.threading.set_intra_op_parallelism_threads(cores)
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)


def _count_cores() -> int | None:
    """Return the number of cores of this task; None outside a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return None if context is None else max(1, context.cpus())
