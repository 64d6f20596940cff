"""Train Keras 3 models on many machines with one call.

Importing this package imports neither TensorFlow nor Keras nor pyspark: each name loads what it
needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ClusterError": "errors",
    "InputError": "errors",
    "PeerLostError": "errors",
    "RError": "errors",
    "SerializationError": "errors",
    "TfdistError": "errors",
    "WorkerFailedError": "errors",
    "ClusterSpec": "cluster",
    "make_tf_config": "cluster",
    "read_tf_config": "cluster",
    "RFunction": "r.function",
    "WorkerContext": "context",
    "TrainResult": "result",
    "WorkerReport": "result",
    "load_model": "serialization",
    "model_from_base64": "serialization",
    "model_from_bytes": "serialization",
    "model_to_base64": "serialization",
    "model_to_bytes": "serialization",
    "save_model": "serialization",
    "sha256_of": "serialization",
    "mnist": "data.mnist",
    "predict_spark": "inference",
    "barrier_evaluate": "scoring",
    "barrier_predict": "scoring",
    "barrier_run": "api",
    "barrier_train": "api",
    "train_mnist": "digits",
    "read_tfrecords": "records",
    "write_tfrecords": "records",
}
__all__ = [
    "ClusterError",
    "ClusterSpec",
    "InputError",
    "PeerLostError",
    "RError",
    "RFunction",
    "SerializationError",
    "TfdistError",
    "TrainResult",
    "WorkerContext",
    "WorkerFailedError",
    "WorkerReport",
    "__version__",
    "barrier_evaluate",
    "barrier_predict",
    "barrier_run",
    "barrier_train",
    "load_model",
    "make_tf_config",
    "mnist",
    "model_from_base64",
    "model_from_bytes",
    "model_to_base64",
    "model_to_bytes",
    "predict_spark",
    "read_tf_config",
    "read_tfrecords",
    "save_model",
    "sha256_of",
    "train_mnist",
    "write_tfrecords",
]

if TYPE_CHECKING:
    from pybackend.api import barrier_run, barrier_train
    from pybackend.cluster import ClusterSpec, make_tf_config, read_tf_config
    from pybackend.context import WorkerContext
    from pybackend.data.mnist import mnist
    from pybackend.digits import train_mnist
    from pybackend.errors import (
        ClusterError,
        InputError,
        PeerLostError,
        RError,
        SerializationError,
        TfdistError,
        WorkerFailedError,
    )
    from pybackend.inference import predict_spark
    from pybackend.r.function import RFunction
    from pybackend.records import read_tfrecords, write_tfrecords
    from pybackend.result import TrainResult, WorkerReport
    from pybackend.scoring import barrier_evaluate, barrier_predict
    from pybackend.serialization import (
        load_model,
        model_from_base64,
        model_from_bytes,
        model_to_base64,
        model_to_bytes,
        save_model,
        sha256_of,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pybackend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
