"""Compare the calls made by several processes, which must agree."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from io import BytesIO
from typing import Any

import cloudpickle
import numpy as np

import pybackend
from pybackend.core.data.arrays import count_rows
from pybackend.core.data.ragged import Ragged
from pybackend.core.data.sources import FileRows
from pybackend.core.data.structures import digest_text
from pybackend.core.job.codec import encode
from pybackend.core.job.job import EXTRAS, MODEL_FILE, SOURCE, Job, TrainingJob, argument_of
from pybackend.core.model.compile_settings import describe_config
from pybackend.core.words import show

# These may differ: only the first process writes files, and the rest concerns one process only.
_OWN = {
    "seed",
    "is_seeded",
    "model_uri",
    "tensorboard",
    "verbose",
    "timeout",
    "reports_steps",
    "is_observed",
    "language",
}
# Fields that are not arguments, and the argument from which they are derived.
_ARGUMENTS = {"batches": "data", "model_source": "model", "in_memory": "data_options"}
_ROWS = "rows of "
_FILES = "files of "


def describe_call(
    number: int, job: Job, files: Mapping[str, bytes], datasets: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a call that must be equal in all processes, as plain data.

    Parameters
    ----------
    number
        Number of such calls in this process so far, including this one.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    claims: dict[str, Any] = {
        "release": f"tfdist {pybackend.__version__}, Python {python}",
        "call": number,
        "kind": job.kind,
    }
    for field in fields(job):
        if field.name not in _OWN:
            claims[field.name] = json.loads(encode(getattr(job, field.name)))
    if isinstance(job, TrainingJob):
        claims["seed"] = job.seed if job.is_seeded else None
        claims["model_uri"] = None if job.model_uri is None else "a path"
    if MODEL_FILE in files:
        claims["structure"] = _digest_file(files[MODEL_FILE])
    # Functions are not compared: their code contains file names and more.
    claims["files"] = sorted(files)
    if EXTRAS in files:
        claims["callbacks"] = _describe_callbacks(files[EXTRAS])
    for name, columns in datasets.items():
        claims[_ROWS + argument_of(name)] = [count_rows(columns), describe_columns(columns)]
    for name in (name for name in files if name.endswith(SOURCE)):
        # Written by this process.
        source = cloudpickle.loads(files[name])
        if isinstance(source, FileRows):
            argument = argument_of(name.removesuffix(SOURCE))
            claims[_FILES + argument] = _describe_files(source)
    return claims


def find_disagreement(peers: Sequence[str], claims: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a message about the first process that differs from process 0; None if all agree.

    Parameters
    ----------
    peers
        Name of each process, for messages.
    claims
        Result of `describe_call` in each process, by rank.
    """
    wanted = claims[0]
    for rank, found in enumerate(claims):
        for name in {**wanted, **found}:
            if found.get(name) != wanted.get(name):
                return _explain(name, wanted.get(name), found.get(name), peers[0], peers[rank])
    return None


def describe_columns(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the type, the shape and a digest of the values of each column."""
    found = {}
    for name, column in columns.items():
        digest = hashlib.blake2b(digest_size=16)
        arrays = [column.values, column.lengths] if isinstance(column, Ragged) else [column]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        shape = "rows of different lengths" if isinstance(column, Ragged) else str(column.shape)
        found[name] = [f"{arrays[0].dtype} {shape}", digest.hexdigest()]
    return found


def _digest_file(content: bytes) -> str:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return digest_text(describe_config(json.loads(archive.read("config.json"))))


def _describe_callbacks(content: bytes) -> list[Any]:
    """Return the classes of the callbacks, and the numeric settings of Keras's own.

    Paths, and the state of custom callbacks, may differ.
    """
    found = []
    # Written by this process.
    for callback in cloudpickle.loads(content)["callbacks"]:
        kind = type(callback)
        settings = {
            name: value
            for name, value in vars(callback).items()
            if isinstance(value, (bool, int, float)) and not name.startswith("_")
        }
        is_of_keras = kind.__module__.partition(".")[0] == "keras"
        found.append([kind.__name__, json.dumps(settings, sort_keys=True) if is_of_keras else ""])
    return found


def _describe_files(source: FileRows) -> dict[str, Any]:
    """Return the names, numbers of rows and sizes of files, without reading their content."""
    files = source.files
    return {
        "columns": repr((source.column_groups, source.spec)),
        "schema": str(files.schema),
        "rows": [
            [os.path.basename(path), int(rows), _size(path)]
            for path, rows in zip(files.files, files.counts, strict=True)
        ],
    }


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _explain(name: str, wanted: Any, found: Any, first: str, other: str) -> str:
    if name == "call":
        what = f"{other} is at call number {found}, but {first} is at call number {wanted}"
        advice = "restart all processes: they must make the same calls in the same order"
    elif name == "release":
        what = f"{other} has {found}, {first} has {wanted}"
        advice = "install the same release on all machines"
    elif name == "structure":
        what = (
            f"the model of {other} differs from that of {first} in its structure, or in the "
            "arguments of compile()"
        )
        advice = "build the same model in all processes"
    elif name == "callbacks":
        what = f"`callbacks` of {other} and of {first} differ in their classes or settings"
        advice = "pass the same callbacks in all processes"
    elif name.startswith(_ROWS):
        what, advice = _explain_rows(name.removeprefix(_ROWS), wanted, found, first, other)
    elif name.startswith(_FILES):
        what, advice = _explain_files(name.removeprefix(_FILES), wanted, found, first, other)
    elif name == "files":
        what = f"{other} passes {_list(found)}, {first} passes {_list(wanted)}"
        advice = "pass the same kind of model, data and callbacks in all processes"
    else:
        argument = _ARGUMENTS.get(name, name)
        what = f"`{argument}` is {show(found)} in {other}, but {show(wanted)} in {first}"
        advice = "all processes must make the same call"
    return f"{what}: {advice}"


def _explain_rows(
    argument: str, wanted: Any, found: Any, first: str, other: str
) -> tuple[str, str]:
    advice = (
        "pass all rows in every process, which trains on its share; if each machine has its own "
        "rows, pass a function that returns a tf.data.Dataset"
    )
    if wanted is None or found is None:
        who, whom = (other, first) if wanted is None else (first, other)
        return f"{who} passes `{argument}` as arrays, {whom} does not", advice
    if wanted[0] != found[0]:
        what = f"`{argument}` has {found[0]} rows in {other}, but {wanted[0]} in {first}"
        return what, advice
    return _explain_columns(argument, wanted[1], found[1], first, other)


def _explain_columns(
    argument: str, wanted: Any, found: Any, first: str, other: str
) -> tuple[str, str]:
    """Return a message and advice about the first array that differs."""
    name = next(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
    kinds = [given[name][0] if name in given else "absent" for given in (found, wanted)]
    where = f"`{name}` of `{argument}`"
    if kinds[0] != kinds[1]:
        what = f"{where} is {kinds[0]} in {other}, but {kinds[1]} in {first}"
        return what, "give it the same type and shape in all processes"
    advice = "pass the same rows in the same order in every process, which trains on its share"
    return f"{where} has different values in {other} than in {first}", advice


def _explain_files(
    argument: str, wanted: Any, found: Any, first: str, other: str
) -> tuple[str, str]:
    advice = "pass the same files in all processes; each trains on its share of the rows"
    if wanted is None or found is None:
        who, whom = (other, first) if wanted is None else (first, other)
        return f"{who} passes `{argument}` as files, {whom} does not", advice
    if wanted["rows"] != found["rows"]:
        return f"the files `{argument}` of {other} and of {first} are not the same", advice
    advice = "pass the same `features`, `label`, `weight` and `data_options` in all processes"
    return f"{other} reads different columns of the files `{argument}` than {first}", advice


def _list(names: Sequence[str] | None) -> str:
    return ", ".join(names or ()) or "none"
