"""Run a function on several workers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from pybackend.core import launchers
from pybackend.core.api.call_data import check_takes
from pybackend.core.api.calls import Target, hide_frames, suggest
from pybackend.core.api.display import printer
from pybackend.core.api.request import Timeline
from pybackend.core.data.columns import TEXT, ColumnGroup, ColumnSpec
from pybackend.core.data.files import naming_open_files
from pybackend.core.data.frames import is_frame, is_pandas
from pybackend.core.errors import Failure, InputError, WorkerFailedError
from pybackend.core.function.adapters import RankZero, read_script
from pybackend.core.function.values import Unreturned, decode_result
from pybackend.core.job.job import FUNCTION, ROWS, FunctionJob, make_job
from pybackend.core.job.pickling import pickle_value
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.worker_options import Resources
from pybackend.core.tf_config import check_roles
from pybackend.core.words import either, show, term


def read_function_data(launcher: launchers.Launcher, data: Any) -> dict[str, Any]:
    """Return the argument ``data`` in the form that launchers take."""
    if is_frame(data):
        if not is_pandas(data):
            import pyarrow as pa

            data = pa.table(data).to_pandas()
        data = {str(name): column.to_numpy() for name, column in data.items()}
    if isinstance(data, Mapping):
        return {ROWS: _read_arrays(data)}
    is_rdd = hasattr(data, "mapPartitions") and hasattr(data, "context")
    if not is_rdd and not launchers.is_spark_frame(data):
        raise InputError(
            f"`data` must be a {term('Spark DataFrame')}, an RDD, a "
            f"{term('pandas or polars data frame')} or a {term('dict')} of arrays, not "
            f"{type(data).__name__}"
        )
    if launcher.session is None:
        example = either(
            "barrier_run(df.sparkSession, fn, data=df)", "barrier_apply(sc, f, data = data)"
        )
        raise InputError(
            f"`data` belongs to Spark, but `{term('spark')}` is {show(None)} or {show('local')}: "
            f"pass its session, e.g. {example}"
        )
    if is_rdd:
        try:
            data = launcher.session.createDataFrame(data)
        except Exception as error:
            raise InputError(
                f"`data` is an RDD that cannot be converted to a {term('DataFrame')}; its items "
                f"must be tuples, Rows or dicts of numbers, text, bytes or lists: {error}"
            ) from error
    return {ROWS: _read_frame(data)}


def _read_arrays(data: Mapping[Any, Any]) -> dict[str, Any]:
    columns = {f"x/{name}": np.asarray(column) for name, column in data.items()}
    if not columns:
        raise InputError("`data` has no columns")
    for name, column in columns.items():
        if column.dtype.kind not in "biufc":
            raise InputError(
                f"the column {show(name[2:])} of `data` is not numeric: encode it first"
            )
    if len({len(column) if column.ndim else -1 for column in columns.values()} - {-1}) != 1:
        sizes = {name[2:]: np.shape(column) for name, column in columns.items()}
        raise InputError(
            f"all columns of `data` must have the same number of rows: their shapes are {sizes}"
        )
    return columns


def _read_frame(frame: Any) -> Any:
    from pybackend.core.data.spark_rows import DataFrameRows, describe_type

    kinds = {
        field.name: describe_type(field.dataType) for field in launchers.read_schema(frame).fields
    }
    spec = ColumnSpec(features={name: [name] for name in kinds}, label=None, finds_levels=False)
    # Doubles stay doubles, and narrower types keep their width.
    rows = DataFrameRows.of(frame, spec, "float64", "data")
    for name, kind in kinds.items():
        if kind.holds == "text" and kind.depth:
            raise InputError(
                f"column {show(name)} has lists of text: join each to one string, or encode them "
                "as arrays of numbers"
            )
    groups = (_keep_type(group, kinds[group.columns[0]]) for group in rows.column_groups)
    return replace(rows, column_groups=tuple(groups))


def _keep_type(group: ColumnGroup, kind: Any) -> ColumnGroup:
    """Preserve the type of numbers, and add no axis to columns with one value per row."""
    if kind.holds == "number":
        dtype = kind.dtype if kind.dtype != "bool" else group.dtype
        return replace(group, dtype=dtype, is_flat=not kind.depth)
    return replace(group, is_flat=group.dtype == TEXT)


_OPTIONS = ("workers", "roles", "data", "resources", "verbose", "timeout")


@hide_frames
def barrier_run(
    spark: Target,
    fn: Callable[..., Any] | str | os.PathLike[str],
    /,
    *args: Any,
    workers: int | None = None,
    roles: Mapping[str, int] | None = None,
    data: Any = None,
    resources: Resources | None = None,
    verbose: int = 2,
    timeout: float = 300.0,
    **kwargs: Any,
) -> list[Any]:
    """Run a function once on each worker, all at the same time, and return the values.

    Parameters
    ----------
    spark
        As in `barrier_train`.
    fn
        A function, called as ``fn(context, *args, **kwargs)`` with a `WorkerContext`. The
        environment variable TF_CONFIG is set and its ports are reserved, so
        ``tf.distribute.MultiWorkerMirroredStrategy()`` works without further setup. Its servers
        listen on all interfaces and accept every connection: use them only on networks that you
        trust.

        Or the path of a Python script, which each worker runs as ``python script.py *args`` in a
        process of its own. The script's text is sent to the workers. Modules next to it are found
        only on machines that have them in the same folder.
    args, kwargs
        Further arguments. Like ``fn``, they are pickled and sent from this process to the workers.
    workers
        As in `barrier_train`. The call lasts as long as the function.
    roles
        Number of workers by role, such as ``{"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}``,
        instead of ``workers``. Ranks are assigned in this order. TF_CONFIG and ``context.role``
        give each worker's role. As soon as the function has returned on the chief (or on all
        workers, if there is no chief), the evaluator and the parameter servers, which need not
        return, are stopped. If there are a chief and parameter servers, workers that do not return
        within 3 seconds are stopped, too. The value of a stopped rank is None.
    data
        Rows to distribute over the workers, which iterate over them with
        ``context.feed(batch_size)``: a Spark DataFrame, an RDD of tuples, Rows or dicts, a data
        frame in memory or a dict of arrays. With ``roles``, only the roles chief and worker are
        allowed.
    resources
        As in `barrier_train`.
    verbose
        2 (default) shows the workers' output. 0 and 1 do not.
    timeout
        As in `barrier_train`. The function itself has no time limit.

    Returns
    -------
    list
        One value per rank. Scripts, and functions that end with ``sys.exit(0)``, return None.
        Values may be None, numbers, text, bytes, dates and times, paths, UUIDs, lists, tuples,
        sets, dicts and the classes of ``collections``, numpy arrays (not structured ones), pandas
        data frames, series and indexes, Arrow tables, and Keras models, which are rebuilt here in
        Keras's safe mode. They equal what the function returned, and have the same class. An
        instance of a class derived from these, such as a masked array, raises an error. Tensors
        become arrays.

        A dataclass, an enum or a named tuple retains its class if that class is loaded here and
        found in its module. Otherwise it becomes a ``types.SimpleNamespace`` or a new named tuple.
        The history of ``fit`` becomes a ``types.SimpleNamespace`` with ``history``, ``epoch`` and
        ``params``. Any other value raises an error that names its position and type, because
        nothing from a worker is unpickled.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError
        As in `barrier_train`. If all functions returned but a value cannot be sent, the values of
        the other ranks are the ``values`` of the error.
    """
    options = {"workers": workers, "roles": roles, "data": data, "resources": resources}
    options |= {"verbose": verbose, "timeout": timeout}
    return run_function(spark, check_function(fn, kwargs), args, kwargs, **options)


def check_function(fn: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function, or a callable that runs the script."""
    if isinstance(fn, (str, os.PathLike)):
        script = read_script(fn)
        if kwargs:
            raise InputError(
                f"a script does not take named arguments such as `{next(iter(kwargs))}`: pass "
                "them by position, as on a command line"
            )
        return script
    if not callable(fn):
        kind = type(fn).__name__
        raise InputError(f"`fn` must be a function or the path of a .py file, not {kind}")
    _check_names(fn, kwargs)
    return cast("Callable[..., Any]", fn)


def run_function(
    spark: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **options: Any,
) -> list[Any]:
    """Run `barrier_run` with a checked function, whose arguments are separate from the options."""
    launcher = launchers.launcher_for(spark)
    roles = check_roles(options.get("roles"))
    wanted = _count_by_role(roles, options.get("workers"))
    options = {**options, "workers": launchers.count_workers(launcher, wanted)}
    job = make_job(FunctionJob, options)
    call = "fn(context, *args, **kwargs)" if kwargs else "fn(context, *args)"
    check_takes(fn, call, None, *args, **kwargs)
    files = {FUNCTION: _pickle_call(fn, args, kwargs)}
    datasets: Mapping[str, Any] = {}
    if options.get("data") is not None:
        if others := [role for role, _ in roles if role not in ("chief", "worker")]:
            raise InputError(
                f"`data` is distributed to all workers, but `roles` has {show(others[0])}, which "
                "would not train on its rows: leave out `data` and read the rows in the function, "
                f"or leave out {show(others[0])}"
            )

        datasets = read_function_data(launcher, options["data"])
    with naming_open_files():
        outcome = Timeline().launch(launcher, job, files, datasets, printer(job.verbose))
    return _collect_values(outcome.reports)


def _collect_values(reports: Sequence[WorkerReport]) -> list[Any]:
    """Return the values of all ranks; if one cannot be sent, the error contains the others."""
    values = [decode_result(report.value) for report in reports]
    advice = (
        "return another value; the values of the other ranks are in the `values` attribute of "
        "this error"
    )
    failures = [
        Failure(one.rank, one.host, "SerializationError", value.reason, advice=advice)
        for one, value in zip(reports, values, strict=True)
        if isinstance(value, Unreturned)
    ]
    if failures:
        known = [None if isinstance(value, Unreturned) else value for value in values]
        raise WorkerFailedError(failures, known)
    return values


def _pickle_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    owners = [fn.fn if isinstance(fn, RankZero) else fn, *args, *kwargs.values()]
    bound = partial(fn, **kwargs) if kwargs else fn
    try:
        return pickle_value((bound, tuple(args)), "`fn` and its arguments", owners)
    except InputError as error:
        # The pickle is a tuple, whose places mean nothing to the caller.
        text = str(error).replace("because of `[0]", "because of `fn")
        raise InputError(text.replace("because of `[1]", "because of `args")) from error


def _count_by_role(roles: Sequence[tuple[str, int]], workers: Any) -> Any:
    """Return the number of workers in all roles; without roles, ``workers`` itself."""
    if not roles:
        return workers
    count = sum(number for _, number in roles)
    if workers not in (None, count):
        raise InputError(
            f"`workers` is {show(workers)}, but `roles` adds up to {count}: leave out `workers`"
        )
    return count


def _check_names(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Reject a named argument that neither the function nor the call has."""
    try:
        known = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        return
    names = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = next((name for name in kwargs if name not in names), None)
    if unknown is not None:
        own = suggest(unknown, [*_OPTIONS, *names[1:]]) or "leave it out"
        raise InputError(
            f"neither {term('barrier_run')}() nor the function takes an argument `{unknown}`: {own}"
        )
