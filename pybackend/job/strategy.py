"""Check of the argument ``strategy``: names of TensorFlow's distribution strategies."""

from __future__ import annotations

from typing import Any, Literal

from pybackend.errors import InputError

Strategy = Literal["parameter_server"]
# What to use instead, in words that follow "strategy='...' is not needed: ".
_INSTEAD = {
    "one_device": "workers=1 trains on one device",
    "mirrored": "barrier_train('local', ..., workers=n, resources=Resources(gpus=1)) gives each "
    "of n GPUs a worker, and the result is that of one process",
    "multi_worker_mirrored": "leave it out, and barrier_train() trains on all workers, with any "
    "Keras 3 model and with the result of one process",
    "central_storage": "leave it out: every worker has the weights and exchanges gradients, and "
    "the result is the same",
}
_BY_HAND = "To use TensorFlow's own, create it in a function for barrier_run()"


def check_strategy(value: Any) -> Strategy | None:
    """Check the argument ``strategy``.

    Raises
    ------
    InputError
        It is another strategy of TensorFlow (the message names the alternative), or no strategy.
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
        f"`strategy` must be None or 'parameter_server', not {value!r}: pass the name, and the "
        "workers create TensorFlow's strategy"
    )
