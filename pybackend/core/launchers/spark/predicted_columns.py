"""Predictions as columns of a Spark DataFrame: a lazy plan that runs when rows are needed.

Spark's own Python processes compute them, and cache the model. The tasks do not communicate, so
they are plain tasks that Spark can schedule and retry freely. This file is imported on the
executors, too; the driver sends it there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.data.arrow import TensorReader
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import ColumnGroup, ColumnSpec, list_columns
from pybackend.core.data.predictions import TEXT, Field, Predictions
from pybackend.core.data.spark_rows import add_fields, column_as_array, column_types, describe_type
from pybackend.core.errors import InputError
from pybackend.core.job.job import EXTRAS, MODEL_FILE, PredictionJob
from pybackend.core.launchers.package_files import digest_files
from pybackend.core.launchers.spark import sessions
from pybackend.core.model import scorers
from pybackend.core.model.scorers import OnnxInput, Scorer
from pybackend.core.quiet import import_tensorflow
from pybackend.core.words import show

_METADATA = "metadata.json"
_VECTOR = "VectorUDT"


def add_predictions(
    frame: Any,
    choice: ColumnSpec,
    job: PredictionJob,
    files: Mapping[str, bytes],
    predictions: Predictions,
    *,
    onnx_inputs: tuple[OnnxInput, ...] | None,
    skips_incomplete: bool,
) -> Any:
    """Return a DataFrame with the predictions as further columns; no Spark job is run.

    ``onnx_inputs`` and ``skips_incomplete`` are as in `PredictTask`. `InputError` names the column
    and the expected value.
    """
    from pyspark.sql.types import StructType

    session, schema = frame.sparkSession, sessions.read_schema(frame)
    columns = schema.fields
    _reject_taken_names([field.name for field in columns], predictions)
    types = column_types(schema, choice)
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    column_groups = group_columns(choice, kinds, job.floatx, "df")
    read = list_columns(column_groups)
    # The fields of structs are appended, then vectors as arrays.
    vectors = [name for name in read if type(types[name]).__name__ == _VECTOR]
    indices = {name: index for index, name in enumerate(types)}
    sources = {indices[name]: types[name] for name in vectors}
    indices |= {name: len(types) + extra for extra, name in enumerate(vectors)}
    if onnx_inputs is None:
        files = {**files, MODEL_FILE: remove_dates(files[MODEL_FILE])}
    digest = digest_files({**files, "onnx_inputs": repr(onnx_inputs).encode()})
    read_from = (tuple(column_groups), tuple(indices[name] for name in read), len(columns))
    given = (job, files, digest, *read_from, predictions, skips_incomplete)
    task = PredictTask(*given, onnx_inputs=onnx_inputs)
    added = [_struct_field(field) for field in predictions.fields]
    sessions.ship_package(session)
    if sessions.is_connect(session):
        task = _send_model(task, session)
    by_udf = has_arrow_udfs(session)

    def plan() -> Any:
        sent = _with_arrays(add_fields(frame, types), len(types), sources)
        if not by_udf:
            return sent.mapInArrow(task, StructType([*columns, *added]))
        scored = _with_structs(sent, task, added)
        return scored.toDF(*(field.name for field in [*columns, *added]))

    with sessions.driver_python(session):
        return sessions.ask(session, "a plan", plan, sum(map(len, task.files.values())))


def has_arrow_udfs(session: Any) -> bool:
    """Return whether Spark has them; its version and that of a Connect client may differ."""
    from pyspark.sql import functions

    return hasattr(functions, "arrow_udf") and sessions.read_version(session) >= (4, 1)


def _with_structs(sent: Any, task: PredictTask, added: list[Any]) -> Any:
    """Return a DataFrame's columns and the predictions, computed by a UDF of the features alone."""
    import pyarrow as pa
    from pyspark.sql import functions
    from pyspark.sql.types import StructField, StructType

    sf: Any = functions  # type checkers do not find Arrow UDFs there
    kind = StructType([StructField(f"p{n}", field.dataType) for n, field in enumerate(added)])

    # `mapInArrow` would send Python all columns, and back.
    def score(structs: Any) -> Any:
        return task.score(structs)

    # Spark warns without them; in R, a warning from a thread would wait for R's own thread.
    score.__annotations__ = dict.fromkeys(["structs", "return"], Iterator[pa.Array])
    predict = sf.arrow_udf(score, kind)
    kept = [f"c{index}" for index in range(task.kept)]
    scored = predict(sf.struct(*(f"c{index}" for index in task.indices))).alias("p")
    predicted = [f"p.{name}" for name in kind.names]
    return sent.select(*kept, scored).select(*kept, *predicted)


def _with_arrays(frame: Any, columns: int, vectors: Mapping[int, Any]) -> Any:
    """Return a DataFrame with the vectors at these positions, of these types, added as arrays."""
    # Renamed, because `mapInArrow` interprets dots in your names.
    sent = frame.toDF(*(f"c{index}" for index in range(columns)))
    arrays = [
        column_as_array(sent, f"c{index}", kind).alias(f"c{columns + extra}")
        for extra, (index, kind) in enumerate(vectors.items())
    ]
    return sent.select("*", *arrays)


def _send_model(task: PredictTask, session: Any) -> PredictTask:
    # A Connect plan contains the task and is sent with each request, so it must stay below 128 MB.
    # In a classic session, PySpark itself broadcasts large objects.
    name, files = f"tfdist-{task.digest[:32]}.model", dict(task.files)
    model = files.pop(MODEL_FILE)

    def write(folder: Path) -> str:
        (folder / name).write_bytes(model)
        return str(folder / name)

    sessions.send_file(session, "to take the model", len(model), write)
    return replace(task, files=files, artifact=name)


def _reject_taken_names(columns: list[str], predictions: Predictions) -> None:
    """Reject names that Spark considers equal, because it ignores case."""
    taken = {name.lower() for name in columns}
    for field in predictions.fields:
        if field.name.lower() in taken:
            raise InputError(
                f"`df` would have two columns named {show(field.name)} (counting the predictions): "
                "rename or drop the column of `df`, or use another `type`"
            )
        taken.add(field.name.lower())


_KINDS = {TEXT: "String", "bool": "Boolean", "int32": "Integer", "int64": "Long"}
_KINDS |= {"float32": "Float", "float64": "Double"}


def _struct_field(field: Field) -> Any:
    from pyspark.sql import types

    kind: Any = getattr(types, f"{_KINDS[field.dtype]}Type")()
    for _ in range(field.depth):
        kind = types.ArrayType(kind)
    return types.StructField(field.name, kind)


def remove_dates(model: bytes) -> bytes:
    """Return a ``.keras`` file without its timestamps, so that equal models give equal files."""
    target_bytes = BytesIO()
    with zipfile.ZipFile(BytesIO(model)) as source, zipfile.ZipFile(target_bytes, "w") as target:
        for name in sorted(source.namelist()):
            content = source.read(name)
            if name == _METADATA:
                metadata = json.loads(content)
                content = json.dumps({**metadata, "date_saved": ""}).encode()
            target.writestr(zipfile.ZipInfo(name), content)
    return target_bytes.getvalue()


Array = npt.NDArray[Any]
# Spark reuses its Python processes for other tasks and queries.
_MOST_MODELS = 3
_models: OrderedDict[str, Scorer] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class PredictTask:
    """Function that Spark runs on each partition, by `mapInArrow` or as a UDF (`score`).

    ``files`` are the model's file, for Keras or ONNX Runtime, and the custom objects that it needs;
    models with an equal ``digest`` are equal. ``artifact`` is the name under which Spark stores the
    model's file; None: it is in ``files``. ``onnx_inputs`` are those of the model's ONNX file;
    None: Keras computes the predictions. The ``indices`` of ``column_groups``, the tensors, are
    into ``indices``, which number the feature columns in the batches of `mapInArrow`. The
    first ``kept`` of their columns are copied to the result. With ``skips_incomplete``, a row with
    a null or an unknown category gets null predictions.
    """

    job: PredictionJob
    files: Mapping[str, bytes]
    digest: str
    column_groups: tuple[ColumnGroup, ...]
    indices: tuple[int, ...]
    kept: int
    predictions: Predictions
    skips_incomplete: bool
    artifact: str | None = None
    onnx_inputs: tuple[OnnxInput, ...] | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        reader = TensorReader(self.column_groups)
        names = [field.name for field in self.predictions.fields]
        for batch in batches:
            first = 0
            for columns, last in self._score(reader, batch.select(list(self.indices))):
                rows = batch.slice(first, last - first)
                first = last
                copied = rows.columns[: self.kept], rows.schema.names[: self.kept]
                yield pa.RecordBatch.from_arrays([*copied[0], *columns], [*copied[1], *names])

    def score(self, structs: Iterator[Any]) -> Iterator[Any]:
        """Yield the predictions as structs, for each array of structs of the features."""
        import pyarrow as pa

        reader = TensorReader(self.column_groups)
        names = [f"p{index}" for index, _ in enumerate(self.predictions.fields)]
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

        ``features`` are those of the complete rows.
        """
        ends = [*np.flatnonzero(complete).tolist(), len(complete)]
        if not features.num_rows:
            yield [output.make_empty() for output in self.predictions.outputs], ends[0]
            return
        done = 0
        rows = reader.read(features)
        for outputs in scorers.predict_rows(self.model(), rows, self.job.batch_size):
            done += len(outputs[0])
            yield outputs, ends[done]

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
            return scorers.OnnxScorer(self._model_file(), self.onnx_inputs, _count_cores() or 1)
        set_up_tensorflow()
        import cloudpickle

        from pybackend.core.model.serialization import read_own_model
        from pybackend.core.model.transfer import configure_keras

        configure_keras(self.job)
        # Pickled by the driver from its own objects, like this task.
        extras = cloudpickle.loads(self.files[EXTRAS]) if EXTRAS in self.files else {}
        custom, safe = extras.get("custom_objects"), self.job.safe_mode
        file = self._model_file()
        model = read_own_model(file, custom_objects=custom, safe_mode=safe, compile=False)
        # XLA recompiles for each number of rows, and is slower for convolutions on a CPU.
        model.jit_compile = False
        return scorers.KerasScorer(model)

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
