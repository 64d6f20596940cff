"""TensorFlow's distribution strategies by name: the one that a training takes, and the others."""

from __future__ import annotations

from typing import Any, Literal

from pybackend.errors import InputError

Strategy = Literal["parameter_server"]
# What does here what they do, in words that follow "strategy='...' is not needed: ".
_INSTEAD = {
    "one_device": "workers=1 trains on one device",
    "mirrored": "barrier_train('local', ..., workers=n, resources=Resources(gpus=1)) gives each "
    "of n GPUs a worker, and the result is that of one process",
    "multi_worker_mirrored": "leave it out, and barrier_train() does what it is for, with any "
    "model of Keras 3 and with the result of one process",
    "central_storage": "leave it out: workers that each keep the weights exchange gradients, and "
    "the result is the same",
}
_BY_HAND = "To have TensorFlow's own, make it in a function for barrier_run()"


def check_strategy(value: Any) -> Strategy | None:
    """Check the argument ``strategy``.

    Raises
    ------
    InputError
        It is another of TensorFlow's strategies, and says what to use, or none at all.
    """
    if value is None or value == "parameter_server":
        return value if value is None else "parameter_server"
    if value == "tpu":
        raise InputError(
            "strategy='tpu' needs a TPU, and workers are processes with CPUs or GPUs: leave it "
            f"out to train on these. {_BY_HAND}, on a machine that has one"
        )
    if isinstance(value, str) and value in _INSTEAD:
        raise InputError(f"strategy={value!r} is not needed: {_INSTEAD[value]}. {_BY_HAND}")
    raise InputError(
        f"`strategy` must be None or 'parameter_server', not {value!r}: a strategy of TensorFlow's "
        "is made in the workers, and named here"
    )
