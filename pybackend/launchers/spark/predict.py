"""Predictions beside the rows of a Spark DataFrame: a plan that Spark runs when it is asked to."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from pybackend.data.column_groups import group_columns
from pybackend.data.columns import ColumnSpec
from pybackend.data.dataframe import describe_type
from pybackend.data.predictions import TEXT, Field, Predictions
from pybackend.errors import InputError
from pybackend.job.job import MODEL_FILE, Job
from pybackend.launchers.spark.predict_task import PredictTask
from pybackend.launchers.spark.python import driver_python
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.shipping import ship_package

_METADATA = "metadata.json"


def frame_of_predictions(
    frame: Any, choice: ColumnSpec, job: Job, files: Mapping[str, bytes], predictions: Predictions
) -> Any:
    """A DataFrame of all columns of another, and the predictions; no Spark job is run.

    Raises
    ------
    InputError
        Names the column and what is expected.
    """
    from pyspark.sql.types import StructType

    columns = frame.schema.fields
    _refuse_taken([field.name for field in columns], predictions)
    types = {field.name: field.dataType for field in columns}
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    column_groups, read = group_columns(choice, kinds, job.floatx, "df")
    # By names of their own: dots in a user's names would mean something to mapInArrow.
    own = [f"c{place}" for place in range(len(columns))]
    sent = frame.toDF(*own)
    places = {field.name: place for place, field in enumerate(columns)}
    vectors = [name for name in read if type(types[name]).__name__ == "VectorUDT"]
    for extra, name in enumerate(vectors, start=len(own)):
        sent = sent.select("*", _as_array(sent[own[places[name]]]).alias(f"c{extra}"))
        places[name] = extra
    files = {**files, MODEL_FILE: undated(files[MODEL_FILE])}
    task = PredictTask(
        job,
        files,
        _digest(files),
        tuple(column_groups),
        tuple(places[name] for name in read),
        len(own),
        predictions,
    )
    schema = StructType([*columns, *map(_struct_field, predictions.fields)])
    session = frame.sparkSession
    ship_package(session)
    if is_connect(session):
        task = _with_artifact(task, session)
    with driver_python(session):
        return sent.mapInArrow(task, schema)


def _with_artifact(task: PredictTask, session: Any) -> PredictTask:
    """Send the model to Spark by itself.

    A Connect plan carries the task, is sent with each request, and must stay below 128 MB; in a
    classic session PySpark itself broadcasts what is large.
    """
    name = f"tfdist-{task.digest[:32]}.keras"
    files = dict(task.files)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        path = Path(folder) / name
        path.write_bytes(files.pop(MODEL_FILE))
        session.addArtifacts(str(path), file=True)
    return replace(task, files=files, artifact=name)


def _refuse_taken(columns: list[str], predictions: Predictions) -> None:
    """Refuse names that Spark, which does not look at capitals, would take for one."""
    taken = {name.lower() for name in columns}
    for field in predictions.fields:
        if field.name.lower() in taken:
            raise InputError(
                f"`df` would have two columns named {field.name!r}, counting those of the "
                "predictions: rename or drop its own, or use another `type`"
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


def undated(model: bytes) -> bytes:
    """A ``.keras`` file without the times that it was written at: equal for equal models."""
    undated = BytesIO()
    with zipfile.ZipFile(BytesIO(model)) as source, zipfile.ZipFile(undated, "w") as target:
        for name in sorted(source.namelist()):
            content = source.read(name)
            if name == _METADATA:
                known = json.loads(content)
                content = json.dumps({**known, "date_saved": ""}).encode()
            target.writestr(zipfile.ZipInfo(name), content)
    return undated.getvalue()


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
