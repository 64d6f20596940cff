"""Resources of each worker."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number, check_flag, check_whole_number, name_arguments
from pybackend.core.words import call_of, one_of, show

# A unit without "B" is binary, as Spark and Slurm have it.
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_PREFIXES = " kmgt"
_LEAST_MEMORY = 1 << 20
# The environment of the driver.
THIS = "this"


@name_arguments
@dataclass(frozen=True)
class Resources:
    """Resources of each worker, the same on every launcher.

    If a launcher cannot provide them, an error is raised before the training starts. With Spark 4
    on a cluster, the tasks that run the workers get these cores and GPUs; other tasks of the
    session keep theirs.

    Parameters
    ----------
    cpus
        Number of TensorFlow threads in each worker. None (default): workers on the same machine
        divide its cores.
    memory
        Memory limit for a worker and all processes that it starts: bytes, or text such as
        ``"4GB"``, ``"512MiB"`` or ``"4g"`` (``"4GiB"``, as in Spark and Slurm). A worker above the
        limit is killed. None (default): no limit.
    gpus
        Number of GPUs for each worker's exclusive use; 0 hides all of them. None (default): workers
        on the same machine get its GPUs in turn.
    environment
        Python environment of the workers, with Spark, `hosts`, `slurm` and `kubernetes`: nothing
        needs to be installed on their hosts. ``"this"``: the environment of this session. Or the
        path of an environment's folder, or of a file that `pack_environment`, venv-pack or
        conda-pack wrote. It is sent to each host once, and unpacked there. None (default): what
        the hosts have.
    fork_server
        Whether a process that has imported TensorFlow waits for later calls on each host, so that
        their workers start at once. It takes 0.5 GB of memory, and ends when it has not been used
        for ten minutes, or with the session (on Spark: with its executor). None (default): on this
        machine, and not elsewhere. True is possible with Spark and `hosts`.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    cpus: int | None = None
    memory: int | str | None = None
    gpus: int | None = None
    environment: str | os.PathLike[str] | None = None
    fork_server: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("cpus", 1), ("gpus", 0)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_whole_number(name, value, least=least))
        object.__setattr__(self, "memory", _check_memory(self.memory))
        if self.environment is not None:
            object.__setattr__(self, "environment", _check_environment(self.environment))
        if self.fork_server is not None:
            object.__setattr__(self, "fork_server", check_flag("fork_server", self.fork_server))

    @property
    def bytes(self) -> int | None:
        """Memory limit in bytes."""
        assert not isinstance(self.memory, str)
        return self.memory


def check_resources(value: Any) -> Resources:
    """Check the argument ``resources``; None is the default `Resources`."""
    if value is None:
        return Resources()
    if not isinstance(value, Resources):
        raise InputError(
            f"`resources` must be {one_of('Resources')}, e.g. "
            f"{call_of('pybackend.Resources', cpus=2, memory='4GB')}, not {show(value)}"
        )
    # Not where it is made: a worker has the path of another machine.
    if value.environment not in (None, THIS) and not os.path.exists(value.environment):
        raise InputError(
            f"`environment` must be {show(THIS)}, or the path of a Python environment or of a "
            f"packed one, but {show(value.environment)} does not exist"
        )
    return value


def _check_environment(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`environment` must be {show(THIS)} or a path, not {show(value)}")
    text = os.fspath(value)
    return text if text == THIS else os.path.abspath(os.path.expanduser(text))


def _check_memory(value: Any) -> int | None:
    if value is None:
        return None
    number = _parse(value) if isinstance(value, str) else as_number(value)
    if number is None or not 0 < number < 2**60:
        raise InputError(
            f"`memory` must be a number of bytes, or text such as {show('4GB')}, "
            f"{show('512MiB')} or {show('4g')}, not {show(value)}"
        )
    if number < _LEAST_MEMORY:
        raise InputError(
            f"`memory` is {show(value)}, which is {number:g} bytes: not enough for a worker. Give "
            "a unit, as in '4GB'"
        )
    return int(number)


def _parse(text: str) -> float | None:
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        return None
    power = _PREFIXES.index(found[2].lower() or " ")
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return float(found[1]) * float(base**power)
