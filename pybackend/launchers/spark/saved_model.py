"""Outputs of a SavedModel for the rows of a DataFrame, as a lazy Spark plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pybackend.data.column_groups import group_columns
from pybackend.data.columns import ColumnSpec
from pybackend.data.dataframe import column_as_array, describe_type
from pybackend.errors import InputError
from pybackend.launchers.spark.python import driver_python, ship_package
from pybackend.launchers.spark.records import call_in_task
from pybackend.launchers.spark.saved_model_task import (
    SavedModel,
    SavedModelTask,
    describe_signature,
)
from pybackend.launchers.spark.session import ask, read_schema
from pybackend.words import show

_KINDS = {"double": "double", "int64": "bigint", "bool": "boolean", "binary": "binary"}


def apply_saved_model(
    frame: Any,
    model: SavedModel,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    batch_size: int,
) -> Any:
    """Return a DataFrame of a SavedModel's outputs only, in the order of the rows.

    Parameters
    ----------
    inputs
        Mapping from the signature's inputs to columns.
    outputs
        Mapping from its outputs to the names of their columns, in the order of the columns.
    batch_size
        Number of rows per call of the model.

    Raises
    ------
    InputError
        An input, output or column is missing or does not fit. The message names it.
    ClusterError
        Spark could not read the model.
    """
    session = frame.sparkSession
    types = {field.name: field.dataType for field in read_schema(frame).fields}
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    spec = ColumnSpec(features={name: [column] for name, column in inputs.items()}, label=None)
    ship_package(session)
    # Read in a task, because this process may not see the model's folder.
    signature = call_in_task(session, describe_signature, model)
    _check_names("input_mapping", "input", inputs, signature["inputs"], needs_all=True)
    groups, read = group_columns(spec, kinds, "float64", "dataset")
    _check_names("output_mapping", "output", outputs, signature["outputs"])
    fields: list[str] = []
    for name in outputs:
        dtype, depth = signature["outputs"][name]
        kind = "array<" * depth + _KINDS[dtype] + ">" * depth
        fields.append(f"o{len(fields)} {kind}")
    columns = [
        column_as_array(frame, name, types[name]).alias(f"c{place}")
        for place, name in enumerate(read)
    ]
    task = SavedModelTask(model, tuple(groups), tuple(outputs), batch_size)

    def plan() -> Any:
        # In a schema's text, Spark would replace ${...} in the user's names.
        computed = frame.select(*columns).mapInArrow(task, ", ".join(fields))
        return computed.toDF(*outputs.values())

    with driver_python(session):
        return ask(session, "a plan", plan)


def _check_names(
    argument: str,
    what: str,
    given: Mapping[str, Any],
    known: Mapping[str, Any],
    needs_all: bool = False,
) -> None:
    listed = ", ".join(known)
    if not given:
        raise InputError(f"`{argument}` is empty: the model's {what}s are {listed}")
    for name in given:
        if name not in known:
            raise InputError(
                f"`{argument}` has the {what} {show(name)}, but the model's {what}s are {listed}"
            )
    missing = [name for name in known if name not in given]
    if needs_all and missing:
        raise InputError(f"`{argument}` has no column for the model's {what} {show(missing[0])}")
