"""Classes of what the calls return, for annotations and `isinstance`.

Each name loads what it needs when it is first used, as those of `pybackend`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Names by module.
_NAMES = {
    "api.detached_job": "DetachedJob",
    "api.plan": "Plan PlannedWorker",
    "api.records": "WrittenRecords",
    "api.result": "TrainResult",
    "errors": "Failure Moment",
    "job.context": "WorkerContext",
    "job.report": "Audit Generation Restart StepTimes WorkerReport",
    "launchers.environment.archive": "PackedEnvironment",
    "scaling.result": "ScalingResult",
    "scaling.rows": "ScalingRow",
    "sql.compile": "SqlModel",
    "sql.deploy": "Deployment",
    "tensorboard": "TensorBoardView",
    "tf_config": "ClusterSpec",
    "tuning.result": "Trial Trials",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from pybackend.api.detached_job import DetachedJob as DetachedJob
    from pybackend.api.plan import Plan as Plan
    from pybackend.api.plan import PlannedWorker as PlannedWorker
    from pybackend.api.records import WrittenRecords as WrittenRecords
    from pybackend.api.result import TrainResult as TrainResult
    from pybackend.errors import Failure as Failure
    from pybackend.errors import Moment as Moment
    from pybackend.job.context import WorkerContext as WorkerContext
    from pybackend.job.report import Audit as Audit
    from pybackend.job.report import Generation as Generation
    from pybackend.job.report import Restart as Restart
    from pybackend.job.report import StepTimes as StepTimes
    from pybackend.job.report import WorkerReport as WorkerReport
    from pybackend.launchers.environment.archive import PackedEnvironment as PackedEnvironment
    from pybackend.scaling.result import ScalingResult as ScalingResult
    from pybackend.scaling.rows import ScalingRow as ScalingRow
    from pybackend.sql.compile import SqlModel as SqlModel
    from pybackend.sql.deploy import Deployment as Deployment
    from pybackend.tensorboard import TensorBoardView as TensorBoardView
    from pybackend.tf_config import ClusterSpec as ClusterSpec
    from pybackend.tuning.result import Trial as Trial
    from pybackend.tuning.result import Trials as Trials

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'pybackend.types' has no attribute {name!r}")
        return getattr(importlib.import_module(f"pybackend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
