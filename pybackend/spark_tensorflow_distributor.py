"""`MirroredStrategyRunner`, with the names and arguments of spark-tensorflow-distributor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from pybackend.core.api.call_data import check_takes
from pybackend.core.api.display import printer
from pybackend.core.api.function_run import run_function
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.function.adapters import RankZero
from pybackend.core.job.arguments import check_flag, check_whole_number
from pybackend.core.job.messages import Note
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers import get_session, read_setting

_IGNORE_SSL = "tensorflow.spark.distributor.ignoreSsl"
_OPEN_SERVERS = (
    "TensorFlow's own servers (of MultiWorkerMirroredStrategy) listen on all interfaces of the "
    "workers' hosts, and accept every connection, without a token or encryption: use them only on "
    "networks that you trust"
)


class MirroredStrategyRunner:
    """Run a TensorFlow function on the tasks of a Spark session, or on this machine.

    Parameters
    ----------
    num_slots
        Number of GPUs that train together, or of workers if ``use_gpu`` is False.
    local_mode
        True: train on this machine, in one worker process. False (default): in Spark tasks.
    use_gpu
        True (default): the slots are GPUs; ``spark.task.resource.gpu.amount`` sets how many each
        task has.
    gpu_resource_name
        Spark's name for GPUs; its tasks must call them ``"gpu"``.
    use_custom_strategy
        True: the function makes its own strategy. False (default): it is called in the scope of a
        ``tf.distribute.MultiWorkerMirroredStrategy``.

    Raises
    ------
    InputError
        An argument or a Spark setting is invalid. The message names it and the expected value.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
    ) -> None:
        self._num_slots = check_whole_number("num_slots", num_slots, least=1)
        self._local_mode = check_flag("local_mode", local_mode)
        self._use_gpu = check_flag("use_gpu", use_gpu)
        self._gpu_resource_name = gpu_resource_name
        self._use_custom_strategy = check_flag("use_custom_strategy", use_custom_strategy)
        if local_mode and not use_gpu and num_slots > 1:
            raise InputError(
                f"`num_slots` is {num_slots}, but local_mode=True without GPUs has one slot: pass "
                "num_slots=1, or local_mode=False"
            )
        self._spark = get_session()
        if not local_mode:
            self.get_num_tasks()

    @property
    def sc(self) -> Any:
        """``SparkContext`` of the session; Spark Connect has no such object."""
        return self._spark.sparkContext

    def get_num_tasks(self) -> int:
        """Return the number of Spark tasks that train together.

        Raises
        ------
        InputError
            Spark's tasks have no GPUs.
        """
        if not self._use_gpu:
            return self._num_slots
        if self._gpu_resource_name != "gpu":
            raise InputError(
                f"`gpu_resource_name` is {self._gpu_resource_name!r}, but workers only get the "
                "GPUs that Spark calls 'gpu' (spark.task.resource.gpu.amount): name the resource "
                "'gpu' in Spark"
            )
        key = f"spark.task.resource.{self._gpu_resource_name}.amount"
        amount = read_setting(self._spark, key)
        if amount is None or float(amount) < 1:
            raise InputError(
                f"`use_gpu` is True, but {key} is {amount or 'not set'}: start the session with "
                "the number of GPUs per task, or pass use_gpu=False"
            )
        return math.ceil(self._num_slots / int(float(amount)))

    # `/`, because a function may have an argument named `self`.
    def run(self, /, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call a function on all workers, and return its value on the first.

        Parameters
        ----------
        train_fn
            Called as ``train_fn(**kwargs)``. In it, ``BarrierTaskContext.get()`` of pyspark returns
            an object that has the worker's rank and exchanges messages with the other workers.
        kwargs
            Arguments of the function. Like the function, they are pickled and sent.

        Returns
        -------
        Any
            A value that `barrier_run` can return. With ``local_mode=True``, the function also runs
            in a separate process.

        Raises
        ------
        InputError, ClusterError, WorkerFailedError
            As in `barrier_run`.
        """
        if not callable(train_fn):
            raise InputError(f"`train_fn` must be a function, not {type(train_fn).__name__}")
        check_takes(train_fn, "train_fn(**kwargs)", **kwargs)
        is_mirrored = not self._use_custom_strategy
        if self._local_mode:
            gpus = self._gpus_of_driver() if self._use_gpu else ()
            fn = RankZero(train_fn, chosen=gpus, is_mirrored=is_mirrored)
            return run_function("local", fn, (), kwargs, workers=1, verbose=2)[0]
        self._check_ssl()
        if is_mirrored:
            printer(1)(Note(_OPEN_SERVERS))
        fn = RankZero(train_fn, self._num_slots if self._use_gpu else None, None, is_mirrored)
        resources = None if self._use_gpu else Resources(gpus=0)
        options = {"workers": self.get_num_tasks(), "resources": resources, "verbose": 2}
        return run_function(self._spark, fn, (), kwargs, **options)[0]

    def _gpus_of_driver(self) -> tuple[str, ...]:
        found = self.sc.resources.get(self._gpu_resource_name)
        if found is None:
            name = f"spark.driver.resource.{self._gpu_resource_name}"
            raise InputError(
                f"the driver has no GPUs that Spark calls {self._gpu_resource_name!r}: start the "
                f"session with {name}.amount and {name}.discoveryScript, or pass use_gpu=False"
            )
        numbers = list(found.addresses)
        if shown := os.environ.get("CUDA_VISIBLE_DEVICES"):
            numbers = _find_visible(numbers, shown.split(","))
        if self._num_slots > len(numbers):
            raise InputError(
                f"`num_slots` is {self._num_slots}, but the driver has {len(numbers)} GPUs"
            )
        return tuple(numbers[: self._num_slots])

    def _check_ssl(self) -> None:
        """Reject a session that requires encryption, which TensorFlow's servers do not support."""
        wants, ignores = (
            (read_setting(self._spark, name) or "false").lower() == "true"
            for name in ("spark.ssl.enabled", _IGNORE_SSL)
        )
        if wants and not ignores:
            raise ClusterError(
                "spark.ssl.enabled is true, but TensorFlow's own servers do not encrypt what they "
                f"send. Set {_IGNORE_SSL}=true in the session to train anyway, or use "
                "`pybackend.barrier_train`, whose workers encrypt their connections"
            )


def _find_visible(addresses: list[str], shown: list[str]) -> list[str]:
    """Return the GPUs with Spark's addresses, among those that are visible to this process.

    Discovery scripts return the machine's GPU numbers or, if they see only what the process sees,
    positions among the visible GPUs.
    """
    if set(addresses) <= set(shown):
        return addresses
    if all(address.isdecimal() and int(address) < len(shown) for address in addresses):
        return [shown[int(address)] for address in addresses]
    raise InputError(
        f"Spark assigned the GPUs {', '.join(addresses)} to the driver, but CUDA_VISIBLE_DEVICES "
        f"lists {', '.join(shown)}: unset the variable before the session starts"
    )
