"""The settings of a training run as plain data, including Keras's global settings."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pybackend
from pybackend.core.errors import InputError
from pybackend.core.job.job import TrainingJob
from pybackend.core.launchers import Launcher
from pybackend.core.machine.packages import find_version
from pybackend.core.words import either, show

_PACKAGES = ("tensorflow", "keras", "numpy")


def describe_settings(job: TrainingJob, launcher: Launcher, restarts: int) -> dict[str, Any]:
    """Return the settings of a training run, for `TrainResult.settings`."""
    return {
        "launcher": launcher.where,
        "workers": job.workers,
        "elastic": {"min": job.elastic.min, "max": job.elastic.max} if job.elastic else None,
        "epochs": job.epochs,
        "initial_epoch": job.initial_epoch,
        "batch_size": job.batch_size,
        "steps_per_epoch": job.steps_per_epoch,
        "shuffle": job.shuffle,
        "seed": job.seed,
        "class_weight": {str(key): weight for key, weight in job.class_weight or ()} or None,
        "exchange": _describe_exchange(job),
        "scale_lr": _plain(asdict(job.scale_lr)) if job.scale_lr else None,
        "roles": dict(job.roles) or None,
        "resources": asdict(job.resources),
        "in_memory": job.in_memory,
        "checkpoint": _plain(asdict(job.checkpoint)) if job.checkpoint else None,
        "restarts": restarts,
        "model_uri": job.model_uri,
        "timeout": job.timeout,
        "versions": read_versions(launcher),
    }


def _describe_exchange(job: TrainingJob) -> dict[str, Any]:
    options = {name: one for name, one in asdict(job.exchange).items() if name != "scale_lr"}
    return {"kind": type(job.exchange).__name__, **_plain(options)}


def describe_optimizer(model: Any) -> dict[str, Any] | None:
    """Return the class of a compiled model's optimizer, with its arguments that are plain values.

    None if only the workers build the model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    try:
        config = dict(optimizer.get_config())
    except Exception:  # a custom class may raise any error
        config = {}
    return {"kind": type(optimizer).__name__, **_pick_plain(config)}


def _pick_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a configuration of Keras, except names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and "class_name" in value:  # a schedule, or an optimizer
            found[name] = {"kind": value["class_name"], **_pick_plain(value["config"])}
        elif isinstance(value, float):
            found[name] = float(f"{value:.7g}")  # Keras has float32
        elif isinstance(value, bool | int | str) and name != "name":
            found[name] = value
    return _plain(found)


def read_versions(launcher: Launcher) -> dict[str, str | None]:
    """Return the versions of tfdist, Python and the packages of a training run, in this process."""
    packages = _PACKAGES if launcher.session is None else (*_PACKAGES, "pyspark")
    found = {name: find_version(name) for name in packages}
    return {"tfdist": pybackend.__version__, "python": platform.python_version(), **found}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert names, and numbers that JSON cannot represent, to text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = _plain(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        found[str(name)] = value
    return found


# Settings with which Keras ends training early, and the arguments that replace them.
_LIMITS = {"max_epochs": "epochs", "max_steps_per_epoch": "steps_per_epoch"}


def read_keras_defaults() -> dict[str, Any]:
    """Return Keras's global settings; they can differ from the defaults only if Keras is loaded.

    Raises
    ------
    InputError
        A setting ends every training run early; the workers would not know about it.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    for setting, argument in _LIMITS.items():
        limit = getattr(keras.config, setting, lambda: None)()  # Keras 3.12 lacks it
        if limit is not None:
            raise InputError(
                f"{either('keras.config.', 'keras3::config_')}{setting}() is {limit}, which ends "
                "every training run in this session early: call "
                f"{either('keras.config.set_', 'keras3::config_set_')}{setting}({show(None)}), and "
                f"pass `{argument}` instead"
            )
    return {
        "epsilon": keras.config.epsilon(),
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }
