"""Classes of what the calls return, for annotations and `isinstance`.

Each name loads what it needs when it is first used, as those of `pybackend`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Names by module.
_NAMES = {
    "core.api.detached_job": "DetachedJob",
    "core.api.planning": "Plan PlannedWorker",
    "core.api.tfrecords": "WrittenRecords",
    "core.api.train_result": "TrainResult",
    "core.errors": "Failure Moment",
    "core.job.context": "WorkerContext",
    "core.job.report": "Audit Generation Restart StepTimes WorkerReport",
    "core.launchers.environment.archive": "PackedEnvironment",
    "scaling.measured": "ScalingRow",
    "scaling.scaling_result": "ScalingResult",
    "sql.compile": "SqlModel",
    "sql.deploy": "Deployment",
    "tracking.tensorboard": "TensorBoardView",
    "core.tf_config": "ClusterSpec",
    "tuning.trials": "Trial Trials",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from pybackend.core.api.detached_job import DetachedJob as DetachedJob
    from pybackend.core.api.planning import Plan as Plan
    from pybackend.core.api.planning import PlannedWorker as PlannedWorker
    from pybackend.core.api.tfrecords import WrittenRecords as WrittenRecords
    from pybackend.core.api.train_result import TrainResult as TrainResult
    from pybackend.core.errors import Failure as Failure
    from pybackend.core.errors import Moment as Moment
    from pybackend.core.job.context import WorkerContext as WorkerContext
    from pybackend.core.job.report import Audit as Audit
    from pybackend.core.job.report import Generation as Generation
    from pybackend.core.job.report import Restart as Restart
    from pybackend.core.job.report import StepTimes as StepTimes
    from pybackend.core.job.report import WorkerReport as WorkerReport
    from pybackend.core.launchers.environment.archive import PackedEnvironment as PackedEnvironment
    from pybackend.core.tf_config import ClusterSpec as ClusterSpec
    from pybackend.scaling.measured import ScalingRow as ScalingRow
    from pybackend.scaling.scaling_result import ScalingResult as ScalingResult
    from pybackend.sql.compile import SqlModel as SqlModel
    from pybackend.sql.deploy import Deployment as Deployment
    from pybackend.tracking.tensorboard import TensorBoardView as TensorBoardView
    from pybackend.tuning.trials import Trial as Trial
    from pybackend.tuning.trials import Trials as Trials

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'pybackend.types' has no attribute {name!r}")
        return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
