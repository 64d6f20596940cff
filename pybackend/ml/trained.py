"""Description of a training, which a stage saves with its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.job.options import ColumnEncoding


@dataclass(frozen=True)
class Trained:
    """History and columns of a training, as in `TrainResult`, with levels as text."""

    history: Mapping[str, Any] = field(default_factory=dict)
    levels: Sequence[str] | None = None
    features: Any = None
    tensors: Mapping[str, Any] | None = None
    categories: Mapping[str, Any] | None = None
    encode: Mapping[str, ColumnEncoding] | None = None
