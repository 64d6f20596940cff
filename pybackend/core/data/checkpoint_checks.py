"""Check that a training run may resume from a checkpoint: it must be the run that wrote it."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby, zip_longest
from typing import Any

from pybackend.core.data.checkpoint_store import Manifest
from pybackend.core.data.sharding import is_sharded_evenly
from pybackend.core.errors import InputError
from pybackend.core.job.codec import TYPE, encode
from pybackend.core.job.job import TrainingJob, argument_of
from pybackend.core.job.worker_options import LocalSteps, ParameterServer
from pybackend.core.words import call_of, setting, show, term

_SETTINGS = ["batch_size", "initial_epoch", "steps_per_epoch", "shuffle", "class_weight"]
_SETTINGS += ["validation_freq", "seed", "floatx", "dtype_policy"]
# How rows are cut into batches; it changes with a release that cuts them in another way.
_CUT = "as fit"
_KERAS_SETTINGS = {"floatx": "default float type", "dtype_policy": "default dtype policy"}
_ROWS = [argument_of(name) for name in ("train", "validation")]
# Sections of a configuration, which are not arguments.
_SECTIONS = ("config", "inner_optimizer")
# Characters of the digest that older releases stored instead of a description.
_DIGEST = 64


def describe_settings(job: TrainingJob) -> dict[str, Any]:
    """Return the settings that determine the result of a training run, as plain JSON data."""
    described: dict[str, Any] = {"cut": _CUT}
    described |= {name: getattr(job, name) for name in _SETTINGS}
    # The number of parameter servers may change.
    exchange = ParameterServer() if job.is_asynchronous else job.exchange
    described["exchange"] = _select(json.loads(encode(exchange)))
    described["scale_lr"] = job.scale_lr and json.loads(encode(job.scale_lr))
    # As runs of equal sizes: a data set of many batches usually has two.
    described["batches"] = [[size, len(list(run))] for size, run in groupby(job.batches or ())]
    return dict(json.loads(json.dumps(described)))


def _select(exchange: Any) -> Any:
    """Return the settings of an exchange without those that do not change the result.

    A checkpoint has the whole state of the optimizer; older ones also name these settings.
    """
    left_out = ("shard_optimizer", "audit", "scale_lr")  # the last is described on its own
    return exchange and {name: one for name, one in exchange.items() if name not in left_out}


def check_is_same(uri: str, saved: Manifest, job: TrainingJob, here: Mapping[str, Any]) -> None:
    """Reject a checkpoint of another training run; the `InputError` names what differs.

    ``here`` is the description of this run, by argument, and includes at least that of
    `describe_settings`.
    """
    which = f"the checkpoint of {saved.point} at {show(uri)}"
    for name in here:
        if how := _compare(name, saved, job, here[name]):
            raise InputError(
                f"{which} belongs to a different training run: its {how}, or choose another folder"
            )
    if saved.generations and saved.step and not job.is_elastic:
        elastic = setting(workers=call_of("Elastic", ...))
        raise InputError(
            f"{which} was written during an epoch of elastic training: resume with {elastic}"
        )
    needs_same = saved.step and not saved.generations
    is_other_group = saved.workers != job.workers or job.is_elastic
    if is_other_group and (needs_same or isinstance(job.exchange, LocalSteps)):
        why = (
            f"was written during an epoch in which {saved.workers} workers trained on their shards"
            if needs_same
            else f"has a state for each of {saved.workers} workers, because of {term('LocalSteps')}"
        )
        raise InputError(f"{which} {why}: resume with {setting(workers=saved.workers)}")
    if saved.epoch + bool(saved.step) > job.epochs:
        raise InputError(f"{which} is beyond {setting(epochs=job.epochs)}: increase `epochs`")


def check_rows_are_as_many(uri: str, saved: Manifest, rows: Mapping[str, int | None]) -> None:
    """The numbers of rows are None for data sets that have not been counted."""
    for name, here in rows.items():
        argument = argument_of(name)
        there = sum(count for count, _ in saved.job.get(argument) or ())
        if there == saved.workers * (here or 0):  # each worker has all rows
            continue
        if there and here is not None and there != here:
            raise InputError(
                f"the checkpoint of {saved.point} at {show(uri)} belongs to a different training "
                f"run: its `{argument}` had {there} rows, but now has {here}. Repeat the original "
                "call, or choose another folder"
            )


def _compare(name: str, saved: Manifest, job: TrainingJob, here: Any) -> str | None:
    """Describe how a training run differs from the one in the checkpoint; None if it does not."""
    there = saved.job.get(name)
    if name == "exchange":
        there = _select(there)
    if name == "model":
        found = find_difference(there or "", here)
        return found and f"model differs: {found}. Build and compile it as before"
    if name == "learning_rate":
        if isinstance(there, float) == isinstance(here, float):
            return None  # no variable of the state depends on it
        was, now = show_argument(there), show_argument(here)
        return f"`learning_rate` was {was}, but is now {now}. Compile the model as before"
    if name == "cut" and there is None and _was_cut_alike(saved, job):
        return None
    if name not in _ROWS:
        return None if there == here else _explain(name, there, here)
    is_same_kind = bool(saved.generations) == job.is_elastic
    if there and here and not (is_same_kind and len(there) == len(here)):
        # Else the rows are sharded differently.
        has_all = name == argument_of("train") and job.shuffles_globally
        pair = (there, here)
        there, here = [rows[0] if has_all else sum(count for count, _ in rows) for rows in pair]
    if there == here:
        return None
    return f"`{name}` has different rows, or in a different order. Repeat the original call"


def _was_cut_alike(saved: Manifest, job: TrainingJob) -> bool:
    """True if an older release cut the rows into the same batches."""
    counts = [count for count, _ in saved.job.get(argument_of("train")) or ()]
    if job.batches is not None or job.is_asynchronous or not counts:
        return True
    return not is_sharded_evenly(counts) or sum(counts) % (saved.workers * job.batch_size) == 0


def _explain(name: str, there: Any, here: Any) -> str:
    differs = f"was {_show(there)}, but is now {_show(here)}"
    if name == "seed":
        return f"`seed` {differs}: pass {setting(seed=there)}"
    if name in _KERAS_SETTINGS:
        setter = f"keras.config.set_{name}({show(there)})"
        return f"{_KERAS_SETTINGS[name]} {differs}: call {setter} first"
    if name == "cut":
        return (
            "batches were cut by an older release of tfdist, so that a resumed run would train "
            "other ones: finish it with that release"
        )
    if name == "weights":
        return f"model has different weights ({_find_first(there, here)}): build it as before"
    if name == "batches":
        counts = [sum(count for _, count in one or ()) for one in (there, here)]
        if counts[0] != counts[1]:
            return (
                f"data set had {counts[0]} batches, but has {counts[1]} now. An infinite data set "
                "has those of all epochs: pass a finite one to resume with more `epochs`"
            )
        return "data set had batches of different sizes: batch it as before"
    return f"`{name}` {differs}. Repeat the original call"


def _show(value: Any) -> str:
    if not isinstance(value, dict) or TYPE not in value:
        return show(value)
    return call_of(value[TYPE], **{name: one for name, one in value.items() if name != TYPE})


def _find_first(there: Any, here: Any) -> str:
    pairs = zip_longest(there or [], here, fillvalue="not there")
    number, (one, other) = next((n, p) for n, p in enumerate(pairs) if p[0] != p[1])
    return f"number {number} was {one}, but is now {other}"


def shorten(text: str) -> str:
    """Compress a description, as `pybackend.core.model.compile_settings` makes it, for a file."""
    return text and base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def find_difference(there: str, here: str) -> str | None:
    """Describe the first argument in which two descriptions of models differ; None: they are equal.

    Both are results of `shorten`; ``there`` may be the digest that older releases wrote.
    """
    if there == here:
        return None
    if not there or not here or len(there) == _DIGEST:
        return "it has different compile settings or layer arguments"
    own, other = (json.loads(zlib.decompress(base64.b64decode(one))) for one in (there, here))
    return next(_compare_parts(own, other, "the model", "layers"), None)


def _compare_parts(there: Any, here: Any, owner: str, argument: str) -> Iterator[str]:
    """``owner`` has the argument."""
    if isinstance(there, dict) and isinstance(here, dict):
        kind, config = there.get("class_name"), there.get("config")
        if kind != here.get("class_name"):
            yield _describe(there, here, owner, argument)
            return
        if isinstance(config, dict):
            kind, name = (_drop_number(one) for one in (kind, config.get("name", "")))
            owner = kind if name in ("", kind) else f"{kind} {show(name)}"
        for key in dict.fromkeys([*there, *here]):
            inner = argument if key in _SECTIONS else str(key)
            yield from _compare_parts(there.get(key), here.get(key), owner, inner)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for one, other in zip(there, here, strict=True):
            yield from _compare_parts(one, other, owner, argument)
    elif there != here:
        yield _describe(there, here, owner, argument)


def _describe(there: Any, here: Any, owner: str, argument: str) -> str:
    was, now = show_argument(there), show_argument(here)
    return f"`{argument}` of {owner} was {was}, but is now {now}"


def _drop_number(name: Any) -> str:
    return str(name).partition("#")[0]


def show_argument(value: Any) -> str:
    if isinstance(value, dict):
        return _drop_number(value.get("class_name", "a dict"))
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return f"a list of {len(value)}"
    if isinstance(value, float):  # of float32
        value = float(f"{value:.7g}")
    return show(_drop_number(value) if isinstance(value, str) else value)


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
