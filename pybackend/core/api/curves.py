"""Curves of a training run's history: which ones to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number

_VALIDATION = "val_"


@dataclass(frozen=True)
class Curve:
    """Values of one metric per epoch, for the training or the validation rows.

    Attributes
    ----------
    label
        ``"training"`` or ``"validation"``, with a number if the metric has several values.
    """

    label: str
    epochs: list[int]
    values: list[float]
    is_validation: bool = False

    def smoothed(self, weight: float) -> list[float]:
        """Return exponential moving averages, where ``weight`` is the decay factor of older values.

        The weights always sum to 1, as in TensorBoard, so the first mean is the first value.
        """
        mean, total, found = 0.0, 0.0, []
        for value in self.values:
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
            found.append(mean / total)
        return found


@dataclass(frozen=True)
class Panel:
    """The curves of one metric."""

    name: str
    curves: tuple[Curve, ...]


def find_panels(
    history: Mapping[str, Sequence[Any]],
    epochs_of: Callable[[str], Sequence[int]],
    metrics: str | Sequence[str] | None = None,
) -> list[Panel]:
    """Return a panel for each metric that has values, with training and validation together.

    Parameters
    ----------
    metrics
        Metrics to show, in this order, without ``val_``; None: all.

    Raises
    ------
    InputError
        There is no metric with that name.
    """
    names = list(dict.fromkeys(name.removeprefix(_VALIDATION) for name in history))
    wanted = [metrics] if isinstance(metrics, str) else metrics
    if wanted is not None:
        wanted = list(wanted)
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            raise InputError(
                f"`metrics` must be chosen from {', '.join(map(repr, names))}, not {metrics!r}"
            )
    panels = []
    for name in wanted or names:
        keys = [key for key in (name, _VALIDATION + name) if history.get(key)]
        curves = [curve for key in keys for curve in _cut(history[key], list(epochs_of(key)), key)]
        if curves:
            panels.append(Panel(name, tuple(curves)))
    return panels


def check_smoothing(smooth: Any) -> float:
    """Check the argument ``smooth``, a weight of at least 0 and less than 1."""
    weight = as_number(smooth)
    if weight is None or not 0 <= weight < 1:
        raise InputError(f"`smooth` must be at least 0 and below 1, e.g. 0.6, not {smooth!r}")
    return weight


def _cut(series: Sequence[Any], epochs: list[int], key: str) -> Iterator[Curve]:
    """Yield one curve, or one for each of a metric's several values.

    Yield nothing if a callback added values in only some epochs: the history does not record which
    ones.
    """
    if len(series) != len(epochs):
        return
    is_validation = key.startswith(_VALIDATION)
    label = "validation" if is_validation else "training"
    if not isinstance(series[0], Sequence):
        yield Curve(label, epochs, [float(value) for value in series], is_validation)
        return
    for number in range(len(series[0])):
        values = [float(value[number]) for value in series]
        yield Curve(f"{label} {number}", epochs, values, is_validation)
