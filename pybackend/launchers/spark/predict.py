"""Predictions as columns of a Spark DataFrame: a lazy plan that runs when rows are needed."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from pybackend.data.column_groups import group_columns
from pybackend.data.columns import ColumnSpec
from pybackend.data.dataframe import add_fields, column_types, describe_type
from pybackend.data.predictions import TEXT, Field, Predictions
from pybackend.errors import InputError
from pybackend.job.job import MODEL_FILE, PredictionJob
from pybackend.launchers.spark.predict_task import PredictTask
from pybackend.launchers.spark.python import driver_python, ship_package
from pybackend.launchers.spark.session import ask, is_connect, read_schema, read_version
from pybackend.model.scorers import OnnxInput
from pybackend.words import show

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

    Parameters
    ----------
    onnx_inputs, skips_incomplete
        As in `PredictTask`.

    Raises
    ------
    InputError
        Names the column and the expected value.
    """
    from pyspark.sql.types import StructType

    session = frame.sparkSession
    columns = read_schema(frame).fields
    _reject_taken_names([field.name for field in columns], predictions)
    types = column_types(read_schema(frame), choice)
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    column_groups, read = group_columns(choice, kinds, job.floatx, "df")
    # The fields of structs are appended, then vectors as arrays.
    vectors = [name for name in read if type(types[name]).__name__ == _VECTOR]
    places = {name: place for place, name in enumerate(types)}
    sources = [places[name] for name in vectors]
    places |= {name: len(types) + extra for extra, name in enumerate(vectors)}
    if onnx_inputs is None:
        files = {**files, MODEL_FILE: remove_dates(files[MODEL_FILE])}
    task = PredictTask(
        job,
        files,
        _digest({**files, "onnx_inputs": repr(onnx_inputs).encode()}),
        tuple(column_groups),
        tuple(places[name] for name in read),
        len(columns),
        predictions,
        skips_incomplete,
        onnx_inputs=onnx_inputs,
    )
    added = [_struct_field(field) for field in predictions.fields]
    ship_package(session)
    if is_connect(session):
        task = _send_model(task, session)
    by_udf = has_arrow_udfs(session)

    def plan() -> Any:
        sent = _with_arrays(add_fields(frame, types), len(types), sources)
        if not by_udf:
            return sent.mapInArrow(task, StructType([*columns, *added]))
        scored = _with_structs(sent, task, added)
        return scored.toDF(*(field.name for field in [*columns, *added]))

    with driver_python(session):
        return ask(session, "a plan", plan, sum(map(len, task.files.values())))


def has_arrow_udfs(session: Any) -> bool:
    """Return whether Spark has them; its version and that of a Connect client may differ."""
    from pyspark.sql import functions

    return hasattr(functions, "arrow_udf") and read_version(session) >= (4, 1)


def _with_structs(sent: Any, task: PredictTask, added: list[Any]) -> Any:
    """Return a DataFrame's columns and the predictions, computed by a UDF of the features alone.

    `mapInArrow` would send Python all columns, and back.
    """
    import pyarrow as pa
    from pyspark.sql import functions
    from pyspark.sql.types import StructField, StructType

    sf: Any = functions  # type checkers do not find Arrow UDFs there
    kind = StructType([StructField(f"p{n}", field.dataType) for n, field in enumerate(added)])

    def score(structs: Any) -> Any:
        return task.score(structs)

    # Spark warns without them; in R, a warning from a thread would wait for R's own thread.
    score.__annotations__ = dict.fromkeys(["structs", "return"], Iterator[pa.Array])
    predict = sf.arrow_udf(score, kind)
    kept = [f"c{place}" for place in range(task.kept)]
    scored = predict(sf.struct(*(f"c{place}" for place in task.places))).alias("p")
    predicted = [f"p.{name}" for name in kind.names]
    return sent.select(*kept, scored).select(*kept, *predicted)


def _with_arrays(frame: Any, columns: int, vectors: list[int]) -> Any:
    """Return a DataFrame with the vectors at these positions appended as arrays.

    Its columns are renamed, because mapInArrow interprets dots in a user's names.
    """
    sent = frame.toDF(*(f"c{place}" for place in range(columns)))
    arrays = [
        _as_array(sent[f"c{place}"]).alias(f"c{columns + extra}")
        for extra, place in enumerate(vectors)
    ]
    return sent.select("*", *arrays)


def _send_model(task: PredictTask, session: Any) -> PredictTask:
    """Send the model to Spark as a separate artifact.

    A Connect plan contains the task and is sent with each request, so it must stay below 128 MB. In
    a classic session, PySpark itself broadcasts large objects.
    """
    name = f"tfdist-{task.digest[:32]}.model"
    files = dict(task.files)
    model = files.pop(MODEL_FILE)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        path = Path(folder) / name
        path.write_bytes(model)
        send = partial(session.addArtifacts, str(path), file=True)
        ask(session, "to take the model", send, len(model))
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


def _as_array(vector: Any) -> Any:
    from pyspark.ml.functions import vector_to_array

    return vector_to_array(vector)


def _struct_field(field: Field) -> Any:
    from pyspark.sql import types

    kinds = {
        TEXT: types.StringType,
        "bool": types.BooleanType,
        "int32": types.IntegerType,
        "int64": types.LongType,
        "float32": types.FloatType,
        "float64": types.DoubleType,
    }
    kind: Any = kinds[field.dtype]()
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


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
