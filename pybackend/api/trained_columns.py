"""Choose the columns of a call: its own arguments, or else those of the model's training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from pybackend.api.calls import ModelCall, PredictionCall, TrainingCall
from pybackend.data.columns import ColumnSpec, as_list, check_column_spec
from pybackend.job.options import DataOptions


class TrainedColumns(Protocol):
    """Attributes of a `TrainResult` that describe the columns of its training."""

    @property
    def features(self) -> Any: ...
    @property
    def tensors(self) -> Any: ...
    @property
    def categories(self) -> Any: ...
    @property
    def encode(self) -> Any: ...
    @property
    def levels(self) -> Any: ...


def choose_columns(
    call: ModelCall, options: DataOptions, known: TrainedColumns | None
) -> ColumnSpec:
    """Return the columns of the call, or else those that a result's model was trained on."""
    columns = ColumnSpec(
        features=as_list(call.features),
        label=call.label,
        weight=call.weight,
        tensors=options.tensors,
        categories=options.categories,
        encode=options.encode,
        tfrecord_spec=options.tfrecord_spec,
        repartition=options.repartition,
        finds_levels=isinstance(call, TrainingCall),
    )
    check_column_spec(columns)
    if isinstance(call, PredictionCall):
        columns = replace(columns, label=None)
    return columns if known is None else _add_defaults(columns, known)


def _add_defaults(columns: ColumnSpec, known: TrainedColumns) -> ColumnSpec:
    """Read columns as the training did, unless the call says otherwise."""
    named = replace(columns, features=columns.features or known.features).named_columns

    def select(given: Any) -> dict[str, Any] | None:
        return {column: v for column, v in (given or {}).items() if column in named} or None

    categories = select(known.categories) if columns.categories is None else columns.categories
    if known.levels is not None and isinstance(columns.label, str):
        categories = {columns.label: known.levels, **(categories or {})}
    encode = select(known.encode) if columns.encode is None else columns.encode
    return replace(
        columns,
        features=known.features if columns.features is None else columns.features,
        tensors=known.tensors if columns.tensors is None else columns.tensors,
        categories=categories,
        encode=encode or None,
        known_from=None if columns.features or not known.features else "the training",
    )
