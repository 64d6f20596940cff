"""Write and read pipelines with stages from sparklyr and from this package, for R."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.util import DefaultParamsReader

from pybackend.core.errors import InputError
from pybackend.core.words import show
from pybackend.ml.model import KerasModel
from pybackend.ml.persistence import find_home


def save_stages(
    session: Any, parts: Sequence[Any], path: str, overwrite: bool, is_fitted: bool
) -> None:
    """Write stages as one Spark ML pipeline.

    Parameters
    ----------
    parts
        Stages, or paths at which sparklyr saved stages.
    is_fitted
        Whether they are fitted.

    Raises
    ------
    InputError
        The path already exists, or a stage cannot be saved.
    """
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
    """Load a pipeline that `save_stages` wrote; return whether it is fitted, and the pipeline.

    Raises
    ------
    InputError
        There is no pipeline at the path.
    """
    try:
        metadata = DefaultParamsReader.loadMetadata(path, find_home(session))
    except Exception as error:
        raise InputError(f"there is no pipeline at {show(path)}: {error}") from error
    kind = str(metadata.get("class")).rpartition(".")[2]
    if kind not in ("Pipeline", "PipelineModel"):
        raise InputError(f"{show(path)} contains a {metadata.get('class')}, not a pipeline")
    is_fitted = kind == "PipelineModel"
    reader = PipelineModel.read() if is_fitted else Pipeline.read()
    return is_fitted, reader.session(session).load(path)


def find_keras(stages: Sequence[Any]) -> KerasModel | None:
    """Return the last Keras model among fitted stages, including those of pipelines."""
    found = [one for stage in stages for one in _flatten(stage) if isinstance(one, KerasModel)]
    return found[-1] if found else None


def _list_stages(session: Any, part: Any) -> list[Any]:
    if not isinstance(part, str):
        return [part]
    metadata = DefaultParamsReader.loadMetadata(part, find_home(session))
    if str(metadata.get("class")).rpartition(".")[2] in ("Pipeline", "PipelineModel"):
        return _flatten(load_stages(session, part)[1])
    return [DefaultParamsReader.loadParamsInstance(part, find_home(session))]


def _flatten(stage: Any) -> list[Any]:
    if isinstance(stage, Pipeline):
        return list(stage.getStages())
    return list(stage.stages) if isinstance(stage, PipelineModel) else [stage]
