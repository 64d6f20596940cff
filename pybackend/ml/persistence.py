"""Stages on Spark's file systems: metadata in pyspark's format, and the model's file.

A stage's folder contains ``metadata``, JSON written by pyspark's own writer, and ``model``, the
bytes of the model's file as Parquet. Reading does not unpickle or import anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from pyspark.ml import Pipeline, PipelineModel, util

from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job import codec
from pybackend.core.job.call_options import CLASSES
from pybackend.core.job.job import MODEL_FILE
from pybackend.core.job.storage_options import ColumnEncoding
from pybackend.core.model.file_checks import check_digest
from pybackend.core.model.serialization import sha256_of
from pybackend.core.words import either, show


@dataclass(frozen=True)
class Trained:
    """History and columns of a training run, as in `TrainResult`, with levels as text."""

    history: Mapping[str, Any] = field(default_factory=dict)
    levels: Sequence[str] | None = None
    features: Any = None
    tensors: Mapping[str, Any] | None = None
    categories: Mapping[str, Any] | None = None
    encode: Mapping[str, ColumnEncoding] | None = None


_MODEL = "model"
_SCHEMA = "place int, content binary"
# Rows of this size, because a row with a whole model might not fit into an array of the JVM.
_PIECE_BYTES = 16 << 20
_DIGEST = "modelSha256"


def encode(model: Any, custom_objects: Any, kind: Literal["train", "predict"]) -> bytes:
    """Return a model as a Keras file if that preserves all of it; errors as in `encode_file`."""
    from pybackend.core.api.sent_objects import add_custom_objects
    from pybackend.core.model.transfer import encode_file
    from pybackend.core.model.view import ModelView

    view = ModelView(model)
    known = add_custom_objects(view, custom_objects)
    # The model is of this session, so its own code may run when the file is read to compare it.
    return encode_file(view, known, safe_mode=False, kind=kind)[MODEL_FILE]


class SavedStage(util.MLWritable, util.MLReadable[Any]):
    """Stage with methods ``pack`` and ``unpack``, for the contents of its folder."""

    def write(self) -> util.MLWriter:
        """Return a writer of this stage; ``save(path)`` is short for ``write().save(path)``.

        An estimator saves its model, which must not be a function, and the Params without
        callbacks.
        """
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        """Return a reader of such stages; ``load(path)`` is short for ``read().load(path)``."""
        return StageReader(cls)


class StageWriter(util.MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        session = self.sparkSession
        home, (content, extra, params) = find_home(session), self.instance.pack()
        extra[_DIGEST] = sha256_of(content)
        util.DefaultParamsWriter.saveMetadata(self.instance, path, home, extra, params)
        pieces = [content[i : i + _PIECE_BYTES] for i in range(0, len(content), _PIECE_BYTES)]
        rows = [(place, bytearray(piece)) for place, piece in enumerate(pieces)]
        frame = session.createDataFrame(rows, _SCHEMA)
        frame.coalesce(1).write.parquet(f"{path}/{_MODEL}")


class StageReader(util.MLReader[Any]):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls
        self._options: dict[str, Any] = {}

    def customObjects(self, value: Mapping[str, Any]) -> StageReader:
        """Set the custom classes and functions of the model, and return this reader."""
        self._options["customObjects"] = value
        return self

    def safeMode(self, value: bool) -> StageReader:
        """Set whether the model may run Python code that it contains, and return this reader."""
        self._options["safeMode"] = value
        return self

    def load(self, path: str) -> Any:
        """Read a folder; `InputError` for another kind of stage, `SerializationError` for changed
        content. The model of an estimator is decoded, with errors as in `load_model`.
        """
        session = self.sparkSession
        metadata = util.DefaultParamsReader.loadMetadata(path, find_home(session))
        expected = f"{self.cls.__module__}.{self.cls.__name__}"
        # Never the class that is named there: it would be imported.
        if metadata.get("class") != expected:
            raise InputError(f"{show(path)} contains a {metadata.get('class')}, not a {expected}")
        # One partition after another: Spark limits the size of a job's results on the driver.
        rows = session.read.parquet(f"{path}/{_MODEL}").toLocalIterator()
        pieces = {row["place"]: bytes(row["content"]) for row in rows}
        content = b"".join(pieces[place] for place in sorted(pieces))
        if not isinstance(metadata.get(_DIGEST), str):
            raise SerializationError(f"the metadata of {show(path)} has no digest of the model")
        check_digest(content, metadata[_DIGEST])
        stage = self.cls.unpack(path, content, metadata, **self._options)
        util.DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def find_home(session: Any) -> Any:
    """Return the argument for pyspark's metadata reader and writer: before 4.0 a SparkContext."""
    import pyspark

    return session.sparkContext if pyspark.__version__.startswith("3.") else session


def pack_options(options: Mapping[str, Any]) -> dict[str, Any]:
    packed = {}
    for name, value in options.items():
        try:
            is_ours = is_dataclass(value) and type(value) in CLASSES
            packed[name] = json.loads(codec.encode(value) if is_ours else json.dumps(value))
        except TypeError as error:
            raise InputError(
                f"`{name}`{either(' of trainOptions', '')} cannot be saved ({error}): remove it, "
                "save, and set it again after loading; or save the model that fit() returns"
            ) from error
    return packed


def unpack_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: codec.decode(json.dumps(value), *CLASSES)
        if isinstance(value, dict) and "__type__" in value
        else value
        for name, value in options.items()
    }


# Pipelines with stages of sparklyr and of this package, for R.


def save_stages(
    session: Any, parts: Sequence[Any], path: str, overwrite: bool, is_fitted: bool
) -> None:
    """Write stages, or the paths at which sparklyr saved them, as one Spark ML pipeline."""
    stages = [stage for part in parts for stage in _list_stages(session, part)]
    pipeline = PipelineModel(stages) if is_fitted else Pipeline(stages=stages)
    writer = pipeline.write().session(session)
    try:
        (writer.overwrite() if overwrite else writer).save(path)
    except Exception as error:
        if "already exists" in str(error):
            raise InputError(f"{show(path)} already exists: use `overwrite = TRUE`") from error
        raise


def load_stages(session: Any, path: str) -> tuple[bool, Any]:
    """Load a pipeline that `save_stages` wrote; return whether it is fitted, and the pipeline."""
    try:
        metadata = util.DefaultParamsReader.loadMetadata(path, find_home(session))
    except Exception as error:
        raise InputError(f"there is no pipeline at {show(path)}: {error}") from error
    kind = str(metadata.get("class")).rpartition(".")[2]
    if kind not in ("Pipeline", "PipelineModel"):
        raise InputError(f"{show(path)} contains a {metadata.get('class')}, not a pipeline")
    is_fitted = kind == "PipelineModel"
    reader = PipelineModel.read() if is_fitted else Pipeline.read()
    return is_fitted, reader.session(session).load(path)


def _list_stages(session: Any, part: Any) -> list[Any]:
    if not isinstance(part, str):
        return [part]
    metadata = util.DefaultParamsReader.loadMetadata(part, find_home(session))
    if str(metadata.get("class")).rpartition(".")[2] in ("Pipeline", "PipelineModel"):
        return flatten_stages(load_stages(session, part)[1])
    return [util.DefaultParamsReader.loadParamsInstance(part, find_home(session))]


def flatten_stages(stage: Any) -> list[Any]:
    if isinstance(stage, Pipeline):
        return list(stage.getStages())
    return list(stage.stages) if isinstance(stage, PipelineModel) else [stage]
