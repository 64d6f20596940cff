"""The frozen description of a job, shared by every launcher and by the workers."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pybackend.errors import InputError

MAX_WORKERS = 4096
# Files that the driver sends along to every worker.
FUNCTION = "function.pkl"
MODEL_FILE = "model.keras"
MODEL_FUNCTION = "model.pkl"
EXTRAS = "extras.pkl"


@dataclass(frozen=True)
class Job:
    """What every worker is told, whatever started it.

    Attributes
    ----------
    kind
        ``"train"`` a Keras model or ``"run"`` a Python function.
    workers
        World size.
    epochs, batch_size, steps_per_epoch, shuffle
        As in `barrier_train`; ``batch_size`` counts rows per worker and step.
    seed
        Rank r uses ``seed + r`` for its own randomness (dropout, shuffling).
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

    kind: Literal["train", "run"]
    workers: int
    epochs: int = 1
    batch_size: int = 32
    steps_per_epoch: int | None = None
    shuffle: bool = True
    seed: int = 0
    timeout: float = 300.0
    model_source: Literal["file", "function"] = "file"
    floatx: str = "float32"
    dtype_policy: str = "float32"
    image_data_format: str = "channels_last"
    safe_mode: bool = True
    verbose: int = 1

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
    """Check the numbers of a training job; the messages name the argument."""
    steps = arguments["steps_per_epoch"]
    return Job(
        kind="train",
        workers=whole_number("workers", arguments["workers"], least=1, most=MAX_WORKERS),
        epochs=whole_number("epochs", arguments["epochs"], least=1),
        batch_size=whole_number("batch_size", arguments["batch_size"], least=1),
        steps_per_epoch=None if steps is None else whole_number("steps_per_epoch", steps, least=1),
        shuffle=_flag("shuffle", arguments["shuffle"]),
        seed=whole_number("seed", arguments["seed"], least=0, most=2**31 - 1),
        timeout=positive_seconds("timeout", arguments["timeout"]),
        safe_mode=_flag("safe_mode", arguments["safe_mode"]),
        verbose=whole_number("verbose", arguments["verbose"], least=0, most=2),
    )


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
