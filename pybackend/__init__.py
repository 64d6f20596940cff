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
    "DatabaseError": "errors",
    "InputError": "errors",
    "PeerLostError": "errors",
    "RError": "errors",
    "SerializationError": "errors",
    "TfdistError": "errors",
    "UnverifiedFileWarning": "errors",
    "WorkerFailedError": "errors",
    "ClusterSpec": "tf_config",
    "join": "launchers.joined.joining",
    "make_tf_config": "tf_config",
    "read_tf_config": "tf_config",
    "replay_batches": "data.sharding",
    "DataOptions": "job.options",
    "Elastic": "job.options",
    "Exchange": "job.options",
    "LocalSteps": "job.options",
    "ParameterServer": "job.options",
    "ScaleLearningRate": "job.options",
    "Checkpoint": "job.checkpoint",
    "Resources": "job.resources",
    "RFunction": "r.function",
    "WorkerContext": "job.context",
    "TFDistributor": "distributor",
    "Observer": "api.observer",
    "TrainResult": "api.result",
    "WorkerReport": "job.report",
    "StepTimes": "job.report",
    "Generation": "job.report",
    "Restart": "job.report",
    "report": "reporting.call",
    "ScalingResult": "scaling.result",
    "load_checkpoint": "api.checkpoints",
    "load_model": "model.serialization",
    "model_from_base64": "model.serialization",
    "model_from_bytes": "model.serialization",
    "model_to_base64": "model.serialization",
    "model_to_bytes": "model.serialization",
    "save_model": "model.serialization",
    "sha256_of": "model.serialization",
    "mnist": "api.mnist",
    "plan": "api.plan",
    "Plan": "api.plan",
    "PlannedWorker": "api.plan",
    "predict_spark": "api.predict",
    "barrier_evaluate": "api.score",
    "barrier_predict": "api.score",
    "barrier_run": "api.run",
    "hosts": "launchers.hosts.launcher",
    "kubernetes": "launchers.kubernetes.launcher",
    "barrier_train": "api.train",
    "bench_scale": "scaling.call",
    "train_mnist": "api.mnist",
    "to_sql": "sql.compile",
    "deploy_model": "sql.deploy",
    "undeploy_model": "sql.deploy",
    "read_tfrecords": "api.records",
    "slurm": "launchers.slurm.launcher",
    "view_tensorboard": "tensorboard",
    "Audit": "job.report",
    "Deployment": "sql.deploy",
    "Failure": "errors",
    "ScalingRow": "scaling.rows",
    "SqlModel": "sql.compile",
    "TensorBoardView": "tensorboard",
    "WrittenRecords": "api.records",
    "write_tfrecords": "api.records",
}
__all__ = [
    "Audit",
    "Checkpoint",
    "ClusterError",
    "ClusterSpec",
    "DataOptions",
    "DatabaseError",
    "Deployment",
    "Elastic",
    "Exchange",
    "Failure",
    "Generation",
    "InputError",
    "LocalSteps",
    "Observer",
    "ParameterServer",
    "PeerLostError",
    "Plan",
    "PlannedWorker",
    "RError",
    "RFunction",
    "Resources",
    "Restart",
    "ScaleLearningRate",
    "ScalingResult",
    "ScalingRow",
    "SerializationError",
    "SqlModel",
    "StepTimes",
    "TFDistributor",
    "TensorBoardView",
    "TfdistError",
    "TrainResult",
    "UnverifiedFileWarning",
    "WorkerContext",
    "WorkerFailedError",
    "WorkerReport",
    "WrittenRecords",
    "__version__",
    "barrier_evaluate",
    "barrier_predict",
    "barrier_run",
    "barrier_train",
    "bench_scale",
    "deploy_model",
    "hosts",
    "join",
    "kubernetes",
    "load_checkpoint",
    "load_model",
    "make_tf_config",
    "mnist",
    "model_from_base64",
    "model_from_bytes",
    "model_to_base64",
    "model_to_bytes",
    "plan",
    "predict_spark",
    "read_tf_config",
    "read_tfrecords",
    "replay_batches",
    "report",
    "save_model",
    "sha256_of",
    "slurm",
    "to_sql",
    "train_mnist",
    "undeploy_model",
    "view_tensorboard",
    "write_tfrecords",
]

if TYPE_CHECKING:
    from pybackend.api.checkpoints import load_checkpoint
    from pybackend.api.mnist import mnist, train_mnist
    from pybackend.api.observer import Observer
    from pybackend.api.plan import Plan, PlannedWorker, plan
    from pybackend.api.predict import predict_spark
    from pybackend.api.records import WrittenRecords, read_tfrecords, write_tfrecords
    from pybackend.api.result import TrainResult
    from pybackend.api.run import barrier_run
    from pybackend.api.score import barrier_evaluate, barrier_predict
    from pybackend.api.train import barrier_train
    from pybackend.data.sharding import replay_batches
    from pybackend.distributor import TFDistributor
    from pybackend.errors import (
        ClusterError,
        DatabaseError,
        Failure,
        InputError,
        PeerLostError,
        RError,
        SerializationError,
        TfdistError,
        UnverifiedFileWarning,
        WorkerFailedError,
    )
    from pybackend.job.checkpoint import Checkpoint
    from pybackend.job.context import WorkerContext
    from pybackend.job.options import (
        DataOptions,
        Elastic,
        Exchange,
        LocalSteps,
        ParameterServer,
        ScaleLearningRate,
    )
    from pybackend.job.report import Audit, Generation, Restart, StepTimes, WorkerReport
    from pybackend.job.resources import Resources
    from pybackend.launchers.hosts.launcher import hosts
    from pybackend.launchers.joined.joining import join
    from pybackend.launchers.kubernetes.launcher import kubernetes
    from pybackend.launchers.slurm.launcher import slurm
    from pybackend.model.serialization import (
        load_model,
        model_from_base64,
        model_from_bytes,
        model_to_base64,
        model_to_bytes,
        save_model,
        sha256_of,
    )
    from pybackend.r.function import RFunction
    from pybackend.reporting.call import report
    from pybackend.scaling.call import bench_scale
    from pybackend.scaling.result import ScalingResult
    from pybackend.scaling.rows import ScalingRow
    from pybackend.sql.compile import SqlModel, to_sql
    from pybackend.sql.deploy import Deployment, deploy_model, undeploy_model
    from pybackend.tensorboard import TensorBoardView, view_tensorboard
    from pybackend.tf_config import ClusterSpec, make_tf_config, read_tf_config


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pybackend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
