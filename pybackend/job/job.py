"""The frozen description of a job, shared by every launcher and by the workers."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from pybackend.errors import InputError

MAX_WORKERS = 4096
# What the driver, Spark's messages and R's strings hold without trouble.
MODEL_LIMIT = 1 << 30
Shuffle = Literal["shard", "global"] | bool
# Files that the driver sends along to every worker.
FUNCTION = "function.pkl"
MODEL_FILE = "model.keras"
MODEL_FUNCTION = "model.pkl"
EXTRAS = "extras.pkl"
# Follows the name of a data set that workers read for themselves.
SOURCE = ".source.pkl"


def argument_of(dataset: str) -> str:
    """The user's argument that gives a data set: ``"train"`` or ``"validation"``."""
    return "data" if dataset == "train" else "validation_data"


@dataclass(frozen=True)
class Job:
    """What every worker is told, whatever started it.

    Attributes
    ----------
    kind
        ``"train"``, ``"evaluate"`` or ``"predict"`` with a Keras model, or ``"run"`` a function.
    workers
        World size.
    epochs, batch_size, steps_per_epoch, shuffle, in_memory, class_weight, transport, compression,
    bucket_mb, local_steps, outer_learning_rate, outer_momentum, verify_weights
        As in `barrier_train`; ``batch_size`` counts rows per worker and step.
    batches
        Rows of all workers together by step, if the data came in batches of their own; None: as
        ``batch_size`` says.
    seed
        Rank r uses ``seed + r`` for its own randomness (dropout, shuffling).
    is_seeded
        Whether the user has given the seed, and so wants rows in an order that repeats.
    model_uri
        As in `barrier_train`.
    model_limit
        Largest model, in bytes, that comes back through the driver.
    timeout
        Seconds of silence from a peer after which it counts as lost.
    model_source
        ``"file"`` (a ``.keras`` file) or ``"function"`` (a pickled function).
    floatx, dtype_policy, image_data_format
        Keras's defaults on the driver.
    safe_mode
        Whether loading a model may execute code that it carries.
    verbose
        0 silent, 1 a line per epoch, 2 also what the workers print.
    """

    kind: Literal["train", "evaluate", "predict", "run"]
    workers: int
    epochs: int = 1
    batch_size: int = 32
    batches: tuple[int, ...] | None = None
    steps_per_epoch: int | None = None
    shuffle: Shuffle = True
    in_memory: bool = False
    class_weight: tuple[tuple[int, float], ...] | None = None
    transport: Literal["tcp", "tf"] = "tcp"
    compression: Literal["fp16", "bf16"] | None = None
    bucket_mb: float = 25.0
    local_steps: int = 1
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    verify_weights: bool = False
    seed: int = 0
    is_seeded: bool = False
    model_uri: str | None = None
    model_limit: int = MODEL_LIMIT
    timeout: float = 300.0
    model_source: Literal["file", "function"] = "file"
    floatx: str = "float32"
    dtype_policy: str = "float32"
    image_data_format: str = "channels_last"
    safe_mode: bool = True
    verbose: int = 1

    @property
    def needs_tensorflow_server(self) -> bool:
        """Whether TensorFlow itself will listen in the workers, or may do so."""
        return self.kind == "run" or (self.transport == "tf" and self.workers > 1)

    def to_json(self) -> str:
        """JSON text of the job."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read back what `to_json` wrote."""
        return cls(**json.loads(text))


def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Check that an argument is a whole number in a range; R's 3 (a double) is one."""
    number = _number(value)
    if number is None or not number.is_integer():
        raise InputError(f"`{name}` must be a whole number, not {value!r}")
    if number < least or (most is not None and number > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"`{name}` must be {span}, not {value!r}")
    return int(value)


def positive_seconds(name: str, value: Any) -> float:
    """Check that an argument is a positive, finite number of seconds."""
    number = _number(value)
    if number is None or not (math.isfinite(number) and number > 0):
        raise InputError(f"`{name}` must be a positive number of seconds, not {value!r}")
    return number


def _number(value: Any) -> float | None:
    """The value as a float where it is a real number (numpy's too), else None."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else None
    except OverflowError:  # a whole number beyond the floats
        return math.inf


def train_job(arguments: Mapping[str, Any]) -> Job:
    """Check the numbers and choices of a training job; what is left out has `Job`'s default."""
    known = {name: check(arguments[name]) for name, check in _CHECKS.items() if name in arguments}
    job = Job(kind="train", **known)
    _check_together(job)
    return job


def score_job(kind: Literal["evaluate", "predict"], arguments: Mapping[str, Any]) -> Job:
    """Check the numbers of a `barrier_evaluate` or `barrier_predict` job."""
    return replace(train_job(arguments), kind=kind, shuffle=False)


def run_job(workers: Any, verbose: Any) -> Job:
    """Check the numbers of a `barrier_run` job."""
    return Job(
        kind="run",
        workers=whole_number("workers", workers, least=1, most=MAX_WORKERS),
        verbose=whole_number("verbose", verbose, least=0, most=2),
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False, not {value!r}")
    return value


def _model_uri(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"`model_uri` must be a path or URI, not {value!r}")
    uri = os.fspath(value)
    if not uri.endswith((".h5", ".keras")):
        raise InputError(f"`model_uri` must end in .h5 or .keras, not {uri!r}")
    # Workers have another working directory.
    return uri if "://" in uri else os.path.abspath(uri)


def _check_together(job: Job) -> None:
    """Refuse arguments that exclude each other."""
    if job.local_steps > 1 and job.transport != "tcp":
        raise InputError("`local_steps` needs transport='tcp': it sends weights, not gradients")
    if job.compression is not None and job.transport != "tcp":
        raise InputError("`compression` needs transport='tcp'")
    if job.local_steps == 1 and (job.outer_momentum or job.outer_learning_rate != 1.0):
        raise InputError(
            "`outer_learning_rate` and `outer_momentum` act between local steps: set `local_steps` "
            "to 2 or more"
        )


def _one_of(name: str, value: Any, *, choices: list[Any]) -> Any:
    # True == 1 in Python, and 1 is no choice.
    if not any(value is choice or (type(value) is str and value == choice) for choice in choices):
        listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise InputError(f"`{name}` must be {listed}, not {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    number = _number(value)
    if number is None or math.isnan(number) or number <= 0:
        raise InputError(f"`{name}` must be a positive number, not {value!r}")
    return number


def _momentum(value: Any) -> float:
    number = _number(value)
    if number is None or not 0 <= number < 1:
        raise InputError(f"`outer_momentum` must be a number from 0 to below 1, not {value!r}")
    return number


def _class_weight(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of class and weight: JSON has no whole numbers as keys."""
    if not isinstance(value, Mapping) or not value:
        raise InputError(
            f"`class_weight` must map classes to weights, e.g. {{0: 1.0, 1: 5.0}}, not {value!r}"
        )
    pairs = []
    for key, weight in value.items():
        number = _number(weight)
        try:
            label = int(key)  # R's names are text
        except (TypeError, ValueError):
            raise InputError(f"`class_weight` has the class {key!r}: use 0, 1, 2, ...") from None
        if number is None or not (math.isfinite(number) and number >= 0) or label < 0:
            raise InputError(f"`class_weight` has the weight {weight!r} for the class {key!r}")
        pairs.append((label, number))
    return tuple(sorted(pairs))


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "workers": partial(whole_number, "workers", least=1, most=MAX_WORKERS),
    "epochs": partial(whole_number, "epochs", least=1),
    "batch_size": partial(whole_number, "batch_size", least=1),
    "steps_per_epoch": _optional(partial(whole_number, "steps_per_epoch", least=1)),
    "shuffle": partial(_one_of, "shuffle", choices=[True, False, "shard", "global"]),
    "model_uri": _optional(_model_uri),
    "in_memory": partial(_flag, "in_memory"),
    "class_weight": _optional(_class_weight),
    "transport": partial(_one_of, "transport", choices=["tcp", "tf"]),
    "compression": partial(_one_of, "compression", choices=[None, "fp16", "bf16"]),
    "bucket_mb": partial(_positive, "bucket_mb"),
    "local_steps": partial(whole_number, "local_steps", least=1),
    "outer_learning_rate": partial(_positive, "outer_learning_rate"),
    "outer_momentum": _momentum,
    "verify_weights": partial(_flag, "verify_weights"),
    "seed": partial(whole_number, "seed", least=0, most=2**31 - 1),
    "timeout": partial(positive_seconds, "timeout"),
    "safe_mode": partial(_flag, "safe_mode"),
    "verbose": partial(whole_number, "verbose", least=0, most=2),
}
