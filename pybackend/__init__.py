"""Train Keras 3 models on many machines with one call.

Importing this package imports neither TensorFlow nor Keras nor pyspark: each name loads what it
needs when it is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from pybackend.core.api import hooks as _hooks

__version__ = "0.1.0"

# Names by module.
_NAMES = {
    "core.api.checkpoints": "load_checkpoint",
    "core.api.detached_job": "attach_job jobs",
    "core.api.environment": "pack_environment",
    "mnist_example": "mnist train_mnist",
    "core.api.observer": "Observer",
    "core.api.planning": "plan",
    "core.api.tfrecords": "read_tfrecords write_tfrecords",
    "core.api.function_run": "barrier_run",
    "core.api.scoring": "barrier_evaluate barrier_predict predict_spark",
    "core.api.train": "barrier_train submit_training",
    "core.data.sharding": "replay_batches",
    "distributor": "TFDistributor",
    "core.errors": (
        "ClusterError DatabaseError InputError PeerLostError RError SerializationError "
        "TfdistError UnverifiedFileWarning WorkerFailedError"
    ),
    "core.job.storage_options": "DataOptions ModelOptions Recovery",
    "core.job.worker_options": (
        "Elastic Exchange LocalSteps ParameterServer Resources ScaleLearningRate"
    ),
    "core.launchers.hosts.launcher": "hosts",
    "core.launchers.joined.place": "join",
    "core.launchers.kubernetes.launcher": "kubernetes",
    "core.launchers.slurm.launcher": "slurm",
    "core.model.serialization": "load_model model_from_base64 model_to_base64 save_model",
    "core.r.function": "RFunction",
    "reporting.reports": "report",
    "scaling.bench": "bench_scale",
    "sql.compile": "to_sql",
    "sql.deploy": "deploy_model undeploy_model",
    "core.tf_config": "make_tf_config read_tf_config",
    "tuning.train_many": "train_many",
    "tuning.pruning": "MedianPruning SuccessiveHalving",
    "tracking.mlflow": "track_mlflow",
    "tracking.tensorboard": "track_tensorboard view_tensorboard",
    "tracking.wandb": "track_wandb",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOME])
# Names that had been here, and what to use instead.
_INSTEAD = {
    "Checkpoint": "Recovery",
    "model_from_bytes": "load_model, which takes bytes, too",
    "model_to_bytes": "save_model(model, None), which returns bytes",
    "sha256_of": "hashlib.sha256",
}

if TYPE_CHECKING:
    from pybackend import types as types
    from pybackend.core.api.checkpoints import load_checkpoint as load_checkpoint
    from pybackend.core.api.detached_job import attach_job as attach_job
    from pybackend.core.api.detached_job import jobs as jobs
    from pybackend.core.api.environment import pack_environment as pack_environment
    from pybackend.core.api.function_run import barrier_run as barrier_run
    from pybackend.core.api.observer import Observer as Observer
    from pybackend.core.api.planning import plan as plan
    from pybackend.core.api.scoring import barrier_evaluate as barrier_evaluate
    from pybackend.core.api.scoring import barrier_predict as barrier_predict
    from pybackend.core.api.scoring import predict_spark as predict_spark
    from pybackend.core.api.tfrecords import read_tfrecords as read_tfrecords
    from pybackend.core.api.tfrecords import write_tfrecords as write_tfrecords
    from pybackend.core.api.train import barrier_train as barrier_train
    from pybackend.core.api.train import submit_training as submit_training
    from pybackend.core.data.sharding import replay_batches as replay_batches
    from pybackend.core.errors import ClusterError as ClusterError
    from pybackend.core.errors import DatabaseError as DatabaseError
    from pybackend.core.errors import InputError as InputError
    from pybackend.core.errors import PeerLostError as PeerLostError
    from pybackend.core.errors import RError as RError
    from pybackend.core.errors import SerializationError as SerializationError
    from pybackend.core.errors import TfdistError as TfdistError
    from pybackend.core.errors import UnverifiedFileWarning as UnverifiedFileWarning
    from pybackend.core.errors import WorkerFailedError as WorkerFailedError
    from pybackend.core.job.storage_options import DataOptions as DataOptions
    from pybackend.core.job.storage_options import ModelOptions as ModelOptions
    from pybackend.core.job.storage_options import Recovery as Recovery
    from pybackend.core.job.worker_options import Elastic as Elastic
    from pybackend.core.job.worker_options import Exchange as Exchange
    from pybackend.core.job.worker_options import LocalSteps as LocalSteps
    from pybackend.core.job.worker_options import ParameterServer as ParameterServer
    from pybackend.core.job.worker_options import Resources as Resources
    from pybackend.core.job.worker_options import ScaleLearningRate as ScaleLearningRate
    from pybackend.core.launchers.hosts.launcher import hosts as hosts
    from pybackend.core.launchers.joined.place import join as join
    from pybackend.core.launchers.kubernetes.launcher import kubernetes as kubernetes
    from pybackend.core.launchers.slurm.launcher import slurm as slurm
    from pybackend.core.model.serialization import load_model as load_model
    from pybackend.core.model.serialization import model_from_base64 as model_from_base64
    from pybackend.core.model.serialization import model_to_base64 as model_to_base64
    from pybackend.core.model.serialization import save_model as save_model
    from pybackend.core.r.function import RFunction as RFunction
    from pybackend.core.tf_config import make_tf_config as make_tf_config
    from pybackend.core.tf_config import read_tf_config as read_tf_config
    from pybackend.distributor import TFDistributor as TFDistributor
    from pybackend.mnist_example import mnist as mnist
    from pybackend.mnist_example import train_mnist as train_mnist
    from pybackend.reporting.reports import report as report
    from pybackend.scaling.bench import bench_scale as bench_scale
    from pybackend.sql.compile import to_sql as to_sql
    from pybackend.sql.deploy import deploy_model as deploy_model
    from pybackend.sql.deploy import undeploy_model as undeploy_model
    from pybackend.tracking.mlflow import track_mlflow as track_mlflow
    from pybackend.tracking.tensorboard import track_tensorboard as track_tensorboard
    from pybackend.tracking.tensorboard import view_tensorboard as view_tensorboard
    from pybackend.tracking.wandb import track_wandb as track_wandb
    from pybackend.tuning.pruning import MedianPruning as MedianPruning
    from pybackend.tuning.pruning import SuccessiveHalving as SuccessiveHalving
    from pybackend.tuning.train_many import train_many as train_many

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)
        if name.startswith("_"):
            raise AttributeError(f"module 'pybackend' has no attribute {name!r}")
        types = importlib.import_module("pybackend.types")
        if name == "types":
            return types
        message = f"module 'pybackend' has no attribute {name!r}"
        if name in types.__all__:
            message += f": it is pybackend.types.{name}"
        elif name in _INSTEAD:
            message += f": use {_INSTEAD[name]}"
        raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)


def _find_scale_hook() -> Any:
    """Let bench-scale change the training calls of a script that it started.

    Such a process is known by its environment, which Python shares with R.
    """
    if "TFDIST_BENCH_SCALE" in os.environ:
        return importlib.import_module("pybackend.scaling.script_hook").HOOK
    return None


_hooks["bench-scale"] = _find_scale_hook


class _StartWithKeras:
    """Starts the fork server of an interactive session as soon as it imports Keras.

    The import takes seconds in both, at the same time, and the model is built after it.
    """

    _has_started = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "keras" and not self._has_started:
            self._has_started = True
            threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        from pybackend.core.launchers import start_fork_server

        start_fork_server()


if hasattr(sys, "ps1"):
    sys.meta_path.insert(0, _StartWithKeras())
