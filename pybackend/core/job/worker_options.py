"""Options for the workers: how many there are, what each gets, and what they exchange."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import (
    MAX_WORKERS,
    Choice,
    Whole,
    as_number,
    check_fields,
    check_flag,
    check_fraction,
    check_group,
    check_number,
    check_positive,
    name_arguments,
    wrong,
)
from pybackend.core.words import call_of, either, listed, setting, show, term

Compression = Literal["fp16", "bf16"] | None
_COMPRESSION = Choice((None, "fp16", "bf16"))
_ENCRYPT = Choice((None, True, False))
Scaling = Literal["linear", "sqrt"]
_SCALINGS = ("linear", "sqrt")
# A unit without "B" is binary, as Spark and Slurm have it.
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_PREFIXES = " kmgt"
_LEAST_MEMORY = 1 << 20
# The environment of the driver.
THIS = "this"


def _explain_scale(name: str) -> str | None:
    """Explain why there is no ``scale_lr`` if each worker takes steps of its own."""
    why = "a step has the rows of one worker, regardless of the number of workers. Omit it"
    return why if name == "scale_lr" else None


@name_arguments
@dataclass(frozen=True)
class Elastic:
    """Let workers leave and join: a value for the argument ``workers``.

    A lost worker costs the step that failed: the others share the rest of the epoch's rows. New
    workers join between epochs, or when a worker is lost. `barrier_train` describes the exceptions,
    and what takes the place of a lost worker.

    Parameters
    ----------
    workers
        Number of workers at the start. None (default): the same as without `Elastic`, but at least
        ``min`` and at most ``max``.
    min
        The training continues without workers that fail or are preempted, as long as this many are
        left.
    max
        Workers are started until there are this many, as soon as there are slots for them. If it is
        larger than ``workers``, spare workers join after the first epochs. None (default): lost
        workers are not replaced.

    Raises
    ------
    InputError
        A number is wrong. The message names it and the expected value.
    """

    workers: int | None = None
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        number = Whole(1, MAX_WORKERS)
        check_fields(self, workers=number, min=number, max=number)
        most = math.inf if self.max is None else self.max
        if not self.min <= (self.min if self.workers is None else self.workers) <= most:
            raise InputError(
                f"`workers` of {term('Elastic')} must be at least `min` and at most `max`, but "
                f"{setting(workers=self.workers)}, {setting(min=self.min)} and "
                f"{setting(max=self.max)}"
            )


@name_arguments
@dataclass(frozen=True)
class ParameterServer:
    """Train asynchronously on parameter servers: a value for the argument ``exchange``.

    There is no ``scale_lr``, because a step uses the rows of one worker.

    Parameters
    ----------
    servers
        Number of parameter servers, which divide the weights.

    Raises
    ------
    InputError
        ``servers`` is not a whole number of at least 1.
    """

    servers: int = 1

    def __post_init__(self) -> None:
        # The chief and at least one worker count, too.
        check_fields(self, servers=Whole(1, MAX_WORKERS - 2))

    explain_missing = staticmethod(_explain_scale)


@name_arguments
@dataclass(frozen=True)
class Exchange:
    """Average the gradients in every step, so that the result equals that of one process.

    With one worker these options have no effect.

    Parameters
    ----------
    transport
        ``"tcp"`` (default), or ``"tf"`` for TensorFlow's collectives (NCCL between GPUs).
        TensorFlow's servers accept every connection: use ``"tf"`` only on networks that you trust.
    compression
        ``"fp16"`` or ``"bf16"`` halves the number of bytes sent. Rounding errors are added to later
        steps (error feedback), but the result no longer equals that of one process. None (default):
        exact. Needs ``transport="tcp"``.
    bucket_mb
        Megabytes of gradients per message, sent while the backward pass is still running.
        ``float("inf")``: all gradients at once, after the backward pass. None (default): 25,
        with two exceptions, unless there is ``compression``. Two workers on two hosts send 1 to 64,
        as many as their connection takes in about 20 ms. If all workers are on one host that has no
        more cores than workers, they send all at once.
    loss_over
        Rows over which the loss is computed. ``"rows"`` (default): each worker computes the loss of
        its own rows, which must be a mean over rows. ``"global batch"``: in each step the workers
        exchange their outputs, labels and weights, and compute the loss of all rows. The loss may
        then compare or sum the rows of a batch (contrastive, ranking, correlation, soft F1, sums),
        and masks may reach several losses.
    encrypt
        True encrypts and authenticates the data that the workers exchange (TLS 1.3). None
        (default): only between machines. False: never, for fast networks that you trust.
    audit
        True (default) repeats some steps in one process, on the rows of all workers, and compares
        the results: the first step of the first epoch and its last one, if that has another number
        of rows, the first step of the second epoch, and as many steps as fit into 2 % of the time.
        The numbers of the rows of all steps are checked, too. A difference that rounding does not
        explain raises an error; with ``"warn"``, it produces a note. Only the audit finds
        losses that are not a mean over rows. With ``compression``, the repeated step is exchanged
        uncompressed. False: no audit.
    shard_optimizer
        True: each worker has the optimizer's state for only its part of the weights, updates that
        part, and gets the new values of the others (ZeRO, stage 1). With N workers and P bytes of
        weights, Adam's state takes 2 P / N bytes on each worker instead of 2 P, if no single
        variable is larger than that. The result is the same up to rounding. No more bytes are
        sent, except that tables with sparse gradients are sent whole, and that hosts with several
        workers do not first sum in memory. While rank 0 writes the model or a checkpoint, it holds
        the state of all workers. False (default): each worker has all state. Needs
        ``transport="tcp"`` without ``compression``.
    scale_lr
        ``"linear"`` or ``"sqrt"``: multiplies the learning rate by the number of workers or by its
        square root, because a step uses the rows of all workers. `ScaleLearningRate` adds warm-up
        and decay. The history reports the rate of each epoch's last step as ``learning_rate``. Not
        supported for data sets of global batches. None (default): the optimizer's rate.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    transport: Literal["tcp", "tf"] = "tcp"
    compression: Compression = None
    bucket_mb: float | None = None
    loss_over: Literal["rows", "global batch"] = "rows"
    encrypt: bool | None = None
    audit: bool | Literal["warn"] = True
    shard_optimizer: bool = False
    scale_lr: ScaleLearningRate | Scaling | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            transport=Choice(("tcp", "tf")),
            compression=_COMPRESSION,
            bucket_mb=check_positive,
            loss_over=Choice(("rows", "global batch")),
            encrypt=_ENCRYPT,
            audit=Choice((True, False, "warn")),
            shard_optimizer=check_flag,
            scale_lr=lambda _, value: check_scale_lr(value),
        )
        if self.compression is not None and self.transport != "tcp":
            raise InputError(f"`compression` needs {setting(transport='tcp')}")
        if self.shard_optimizer and (self.transport != "tcp" or self.compression is not None):
            raise InputError(
                f"`shard_optimizer` needs {setting(transport='tcp')} and no `compression`: each "
                "worker gets the exact mean gradients of its own weights only"
            )
        if self.encrypt and self.transport != "tcp":
            raise InputError(
                f"`{setting(encrypt=True)}` needs {setting(transport='tcp')}: TensorFlow's own "
                "servers cannot encrypt"
            )


@name_arguments
@dataclass(frozen=True)
class LocalSteps:
    """Let each worker take several steps before the weights are averaged (local SGD).

    This suits slow networks, and changes the result. The loss is always computed on each worker's
    own rows, even if it is not a mean over rows. With one worker these options have no effect.
    There is no ``scale_lr``, because a step uses the rows of one worker.

    Parameters
    ----------
    steps
        Number of steps between averages, at least 2.
    learning_rate, momentum
        Learning rate and momentum with which the average change of the weights is applied. 0.7 and
        0.9 correspond to DiLoCo.
    compression, encrypt
        As in `Exchange`.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    steps: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    compression: Compression = None
    encrypt: bool | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            steps=Whole(2),
            learning_rate=partial(check_positive, most=1e300),
            momentum=check_fraction,
            compression=_COMPRESSION,
            encrypt=_ENCRYPT,
        )

    explain_missing = staticmethod(_explain_scale)


AnyExchange = Exchange | LocalSteps | ParameterServer


def check_exchange(value: Any) -> AnyExchange:
    kinds: tuple[type[AnyExchange], ...] = (Exchange, LocalSteps, ParameterServer)
    return check_group("exchange", value, *kinds, loss_over="global batch")


@name_arguments
@dataclass(frozen=True)
class ScaleLearningRate:
    """Scale the learning rate with the number of workers.

    With N workers, a step has N times as many rows as with one. Each step uses the optimizer's own
    learning rate, as compiled or as set by callbacks, times `multiple`. The optimizer's variable
    does not change: the trained model, and every checkpoint, have the unscaled rate.

    Parameters
    ----------
    rule
        ``"linear"``: N times the rate (Goyal et al., 2017). ``"sqrt"``: the square root of N times
        the rate (Krizhevsky, 2014), which suits Adam and similar optimizers.
    warmup_epochs
        Number of epochs, possibly fractional, over which the rate rises step by step from the
        unscaled to the scaled one: gradual warm-up (Goyal et al., 2017).
    decay
        Maps the number of completed epochs to the factor for the rate from then on: ``{30: 0.1, 60:
        0.01}``. None (default): no decay.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    rule: Scaling = "linear"
    warmup_epochs: float = 0.0
    decay: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        check_fields(self, rule=Choice(_SCALINGS), warmup_epochs=_check_warmup, decay=_check_decay)

    def multiple(self, workers: int, epochs: float) -> float:
        """Return the factor for the rate after a number of epochs, which may be fractional."""
        most = float(workers) if self.rule == "linear" else math.sqrt(workers)
        risen = min(1.0, epochs / self.warmup_epochs) if self.warmup_epochs else 1.0
        begun = [epoch for epoch in self.decay or {} if epoch <= epochs]
        decayed = (self.decay or {})[max(begun)] if begun else 1.0
        return (1.0 + (most - 1.0) * risen) * decayed


def check_scale_lr(value: Any) -> ScaleLearningRate | None:
    """Check the argument ``scale_lr``; the name of a rule becomes a `ScaleLearningRate`."""
    if value is None or isinstance(value, ScaleLearningRate):
        return value
    if isinstance(value, str) and value in _SCALINGS:
        return ScaleLearningRate(value)  # type: ignore[arg-type]
    example = call_of("pybackend.ScaleLearningRate", "linear", warmup_epochs=5)
    kinds = [*map(show, (None, *_SCALINGS)), either("a ScaleLearningRate", "a list")]
    raise wrong("scale_lr", f"{listed(kinds)}, e.g. {example}", value)


def _check_warmup(name: str, value: Any) -> float:
    return check_number(name, value, "at least 0", lambda n: 0 <= n < math.inf)


def _check_decay(name: str, value: Any) -> dict[int, float]:
    example = show({30: 0.1, 60: 0.01})
    expected = f"`{name}` must map epochs to multipliers of the learning rate, e.g. {example}"
    if not isinstance(value, Mapping) or not value:
        raise InputError(f"{expected}, not {show(value)}")
    checked: dict[int, float] = {}
    for key, multiple in value.items():
        # R's names, and JSON's, are text.
        epoch = float(key) if isinstance(key, str) and key.isdecimal() else as_number(key)
        number = as_number(multiple)
        if epoch is None or not epoch.is_integer() or epoch < 0:
            raise InputError(f"{expected}; it has the epoch {show(key)}")
        if number is None or not (math.isfinite(number) and number > 0):
            raise InputError(f"{expected}; it has the multiplier {show(multiple)} for {show(key)}")
        if int(epoch) in checked:
            raise InputError(f"`decay` has the epoch {int(epoch)} twice")
        checked[int(epoch)] = number
    return dict(sorted(checked.items()))


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
        their workers start at once. It takes 0.4 GB of memory, and ends when it has not been used
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
        check_fields(
            self,
            cpus=Whole(1),
            memory=_check_memory,
            gpus=Whole(0),
            environment=_check_environment,
            fork_server=check_flag,
        )

    @property
    def bytes(self) -> int | None:
        """Memory limit in bytes."""
        assert not isinstance(self.memory, str)
        return self.memory


def check_resources(value: Any) -> Resources:
    """Check the argument ``resources``; None is the default `Resources`."""
    checked = check_group("resources", value, Resources, cpus=2, memory="4GB")
    path = checked.environment
    # Not where it is made: a worker has the path of another machine.
    if path is not None and path != THIS and not os.path.exists(path):
        raise InputError(
            f"`environment` must be {show(THIS)}, or the path of a Python environment or of a "
            f"packed one, but {show(path)} does not exist"
        )
    return checked


def _check_environment(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise wrong(name, f"{show(THIS)} or a path", value)
    text = os.fspath(value)
    return text if text == THIS else os.path.abspath(os.path.expanduser(text))


def _check_memory(name: str, value: Any) -> int:
    number = _parse(value) if isinstance(value, str) else as_number(value)
    if number is None or not 0 < number < 2**60:
        examples = listed(map(show, ("4GB", "512MiB", "4g")))
        raise wrong(name, f"a number of bytes, or text such as {examples}", value)
    if number < _LEAST_MEMORY:
        raise InputError(
            f"`memory` is {show(value)}, which is {number:g} bytes: not enough for a worker. Give "
            "a unit, as in '4GB'"
        )
    return int(number)


def _parse(text: str) -> float | None:
    if (found := _MEMORY.fullmatch(text.strip())) is None:
        return None
    power = _PREFIXES.index(found[2].lower() or " ")
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return float(found[1]) * float(base**power)
