"""Train Keras 3 models on many machines with one call.

Importing this package imports neither TensorFlow nor Keras nor pyspark: each name loads what it
needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names by module.
_NAMES = {
    "api.checkpoints": "load_checkpoint",
    "api.detached_job": "DetachedJob attach_job jobs",
    "api.environment": "pack_environment",
    "api.mnist": "mnist train_mnist",
    "api.observer": "Observer",
    "api.plan": "Plan PlannedWorker plan",
    "api.predict": "predict_spark",
    "api.records": "WrittenRecords read_tfrecords write_tfrecords",
    "api.result": "TrainResult",
    "api.run": "barrier_run",
    "api.score": "barrier_evaluate barrier_predict",
    "api.train": "barrier_train submit_training",
    "data.sharding": "replay_batches",
    "distributor": "TFDistributor",
    "errors": (
        "ClusterError DatabaseError Failure InputError PeerLostError RError "
        "SerializationError TfdistError UnverifiedFileWarning WorkerFailedError"
    ),
    "job.checkpoint": "Recovery",
    "job.context": "WorkerContext",
    "job.learning_rate": "ScaleLearningRate",
    "job.model_options": "ModelOptions",
    "job.options": "DataOptions Elastic Exchange LocalSteps ParameterServer",
    "job.report": "Audit Generation Restart StepTimes WorkerReport",
    "job.resources": "Resources",
    "launchers.environment.archive": "PackedEnvironment",
    "launchers.hosts.launcher": "hosts",
    "launchers.joined.joining": "join",
    "launchers.kubernetes.launcher": "kubernetes",
    "launchers.slurm.launcher": "slurm",
    "model.serialization": (
        "load_model model_from_base64 model_from_bytes model_to_base64 model_to_bytes "
        "save_model sha256_of"
    ),
    "r.function": "RFunction",
    "reporting.call": "report",
    "scaling.call": "bench_scale",
    "scaling.result": "ScalingResult",
    "scaling.rows": "ScalingRow",
    "sql.compile": "SqlModel to_sql",
    "sql.deploy": "Deployment deploy_model undeploy_model",
    "tensorboard": "TensorBoardView view_tensorboard",
    "tf_config": "ClusterSpec make_tf_config read_tf_config",
    "tuning.call": "train_many",
    "tuning.pruning": "MedianPruning SuccessiveHalving",
    "tuning.result": "Trial Trials",
    "tracking.mlflow": "track_mlflow",
    "tracking.tensorboard": "track_tensorboard",
    "tracking.wandb": "track_wandb",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOME])

if TYPE_CHECKING:
    from pybackend.api.checkpoints import load_checkpoint as load_checkpoint
    from pybackend.api.detached_job import DetachedJob as DetachedJob
    from pybackend.api.detached_job import attach_job as attach_job
    from pybackend.api.detached_job import jobs as jobs
    from pybackend.api.environment import pack_environment as pack_environment
    from pybackend.api.mnist import mnist as mnist
    from pybackend.api.mnist import train_mnist as train_mnist
    from pybackend.api.observer import Observer as Observer
    from pybackend.api.plan import Plan as Plan
    from pybackend.api.plan import PlannedWorker as PlannedWorker
    from pybackend.api.plan import plan as plan
    from pybackend.api.predict import predict_spark as predict_spark
    from pybackend.api.records import WrittenRecords as WrittenRecords
    from pybackend.api.records import read_tfrecords as read_tfrecords
    from pybackend.api.records import write_tfrecords as write_tfrecords
    from pybackend.api.result import TrainResult as TrainResult
    from pybackend.api.run import barrier_run as barrier_run
    from pybackend.api.score import barrier_evaluate as barrier_evaluate
    from pybackend.api.score import barrier_predict as barrier_predict
    from pybackend.api.train import barrier_train as barrier_train
    from pybackend.api.train import submit_training as submit_training
    from pybackend.data.sharding import replay_batches as replay_batches
    from pybackend.distributor import TFDistributor as TFDistributor
    from pybackend.errors import ClusterError as ClusterError
    from pybackend.errors import DatabaseError as DatabaseError
    from pybackend.errors import Failure as Failure
    from pybackend.errors import InputError as InputError
    from pybackend.errors import PeerLostError as PeerLostError
    from pybackend.errors import RError as RError
    from pybackend.errors import SerializationError as SerializationError
    from pybackend.errors import TfdistError as TfdistError
    from pybackend.errors import UnverifiedFileWarning as UnverifiedFileWarning
    from pybackend.errors import WorkerFailedError as WorkerFailedError
    from pybackend.job.checkpoint import Recovery as Recovery
    from pybackend.job.context import WorkerContext as WorkerContext
    from pybackend.job.learning_rate import ScaleLearningRate as ScaleLearningRate
    from pybackend.job.model_options import ModelOptions as ModelOptions
    from pybackend.job.options import DataOptions as DataOptions
    from pybackend.job.options import Elastic as Elastic
    from pybackend.job.options import Exchange as Exchange
    from pybackend.job.options import LocalSteps as LocalSteps
    from pybackend.job.options import ParameterServer as ParameterServer
    from pybackend.job.report import Audit as Audit
    from pybackend.job.report import Generation as Generation
    from pybackend.job.report import Restart as Restart
    from pybackend.job.report import StepTimes as StepTimes
    from pybackend.job.report import WorkerReport as WorkerReport
    from pybackend.job.resources import Resources as Resources
    from pybackend.launchers.environment.archive import PackedEnvironment as PackedEnvironment
    from pybackend.launchers.hosts.launcher import hosts as hosts
    from pybackend.launchers.joined.joining import join as join
    from pybackend.launchers.kubernetes.launcher import kubernetes as kubernetes
    from pybackend.launchers.slurm.launcher import slurm as slurm
    from pybackend.model.serialization import load_model as load_model
    from pybackend.model.serialization import model_from_base64 as model_from_base64
    from pybackend.model.serialization import model_from_bytes as model_from_bytes
    from pybackend.model.serialization import model_to_base64 as model_to_base64
    from pybackend.model.serialization import model_to_bytes as model_to_bytes
    from pybackend.model.serialization import save_model as save_model
    from pybackend.model.serialization import sha256_of as sha256_of
    from pybackend.r.function import RFunction as RFunction
    from pybackend.reporting.call import report as report
    from pybackend.scaling.call import bench_scale as bench_scale
    from pybackend.scaling.result import ScalingResult as ScalingResult
    from pybackend.scaling.rows import ScalingRow as ScalingRow
    from pybackend.sql.compile import SqlModel as SqlModel
    from pybackend.sql.compile import to_sql as to_sql
    from pybackend.sql.deploy import Deployment as Deployment
    from pybackend.sql.deploy import deploy_model as deploy_model
    from pybackend.sql.deploy import undeploy_model as undeploy_model
    from pybackend.tensorboard import TensorBoardView as TensorBoardView
    from pybackend.tensorboard import view_tensorboard as view_tensorboard
    from pybackend.tf_config import ClusterSpec as ClusterSpec
    from pybackend.tf_config import make_tf_config as make_tf_config
    from pybackend.tf_config import read_tf_config as read_tf_config
    from pybackend.tracking.mlflow import track_mlflow as track_mlflow
    from pybackend.tracking.tensorboard import track_tensorboard as track_tensorboard
    from pybackend.tracking.wandb import track_wandb as track_wandb
    from pybackend.tuning.call import train_many as train_many
    from pybackend.tuning.pruning import MedianPruning as MedianPruning
    from pybackend.tuning.pruning import SuccessiveHalving as SuccessiveHalving
    from pybackend.tuning.result import Trial as Trial
    from pybackend.tuning.result import Trials as Trials


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pybackend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
