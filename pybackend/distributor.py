"""`TFDistributor`: TensorFlow on the workers of a Spark session, with TorchDistributor's API."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pybackend.core.api.call_data import check_takes
from pybackend.core.api.function_run import check_function, run_function
from pybackend.core.errors import InputError
from pybackend.core.function.adapters import RankZero, Script
from pybackend.core.job.arguments import check_flag, check_whole_number
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers import get_session


class TFDistributor:
    """Run a function or a script in several processes, with TF_CONFIG set.

    Parameters
    ----------
    num_processes
        Number of processes. Each has one GPU if ``use_gpu`` is True.
    local_mode
        True (default): processes on this machine. False: tasks of the active Spark session.
    use_gpu
        True: one GPU per process; it is an error if there are fewer GPUs than processes. False: no
        GPU. None (default): GPUs are used if there are any.

    Raises
    ------
    InputError
        An argument is invalid, or no Spark session is active. The message names the argument and
        the expected value.
    """

    def __init__(
        self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool | None = None
    ) -> None:
        self.num_processes = check_whole_number("num_processes", num_processes, least=1)
        self.local_mode = check_flag("local_mode", local_mode)
        self.use_gpu = None if use_gpu is None else check_flag("use_gpu", use_gpu)
        self.spark = None if local_mode else get_session(starts=False)
        if not local_mode and self.spark is None:
            raise InputError(
                "local_mode=False needs a Spark session, but none is active: create one with "
                "SparkSession.builder.getOrCreate(), or keep local_mode=True to use processes on "
                "this machine"
            )

    def run(
        self,
        /,
        train_object: Callable[..., Any] | str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a function or a script in all processes, and return the value of the first.

        Parameters
        ----------
        train_object
            A function, called as ``train_object(*args, **kwargs)``, or the path of a Python script,
            which is run as ``python script.py *args``.
        args, kwargs
            Arguments of the function or script. A script has no named arguments.

        Returns
        -------
        Any
            A value that `barrier_run` can return; None for a script.

        Raises
        ------
        InputError, ClusterError, WorkerFailedError
            As in `barrier_run`.
        """
        fn = check_function(train_object, kwargs)
        if not isinstance(fn, Script):
            check_takes(fn, "train_object(*args, **kwargs)", *args, **kwargs)
            fn = RankZero(fn)
        # None leaves the choice to the launcher, which gives workers of a machine its GPUs in turn.
        gpus = None if self.use_gpu is None else Resources(gpus=int(self.use_gpu))
        options = {"workers": self.num_processes, "resources": gpus, "verbose": 2}
        where = "local" if self.spark is None else self.spark
        return run_function(where, fn, args, kwargs, **options)[0]
