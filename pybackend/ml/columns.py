"""Convert a model's outputs to the columns of pyspark's classifiers and regressors.

This uses plain Spark SQL, so that nothing runs before Spark needs the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.core.data.predictions import Output
from pybackend.core.errors import InputError
from pybackend.core.words import show, term
from pybackend.sql.spark import let

# Names of the columns with the model's outputs. SQL never contains the user's names, because Spark
# replaces ``${...}`` in SQL.
_GIVEN = ".given"
_DOUBLES = f"CAST(`{_GIVEN}0` AS array<double>)"


@dataclass(frozen=True)
class Names:
    """Names of the columns; an empty name omits its column."""

    prediction: str
    probability: str
    raw: str


@dataclass(frozen=True)
class Classes:
    """Classes that a model's only output represents.

    Attributes
    ----------
    count
        Number of classes; 0 if the output does not represent classes.
    are_logits
        Whether a softmax or sigmoid is needed to convert the numbers to probabilities.
    levels
        Names of the classes, if known.
    """

    count: int
    are_logits: bool = False
    levels: Sequence[str] | None = None


def add_columns(
    frame: Any, kept: Sequence[str], outputs: Sequence[Output], classes: Classes, names: Names
) -> Any:
    """Replace the columns of the model's outputs with the columns of a pipeline.

    Parameters
    ----------
    frame
        DataFrame with the columns ``kept``, and those of ``predict_spark(type="raw")``.

    Raises
    ------
    InputError
        ``kept`` has a column with one of the names.
    """
    given = [".pred"]
    if len(outputs) > 1:
        given = [f".pred_{output.name}" for output in outputs]
        added = {
            f"{names.prediction}_{o.name}": _number(o, place) for place, o in enumerate(outputs)
        }
        vectors = [name for name, o in zip(added, outputs, strict=True) if o.depth == 1]
    elif not classes.count:
        added = {names.prediction: _number(outputs[0], 0)}
        vectors = [names.prediction] if outputs[0].depth == 1 else []
    else:
        raw, probability, chosen = _classify(outputs[0], classes)
        added = {names.raw: raw, names.probability: probability, names.prediction: chosen}
        vectors = [names.raw, names.probability]
    added = {name: sql for name, sql in added.items() if name}
    _reject_taken_names(kept, list(added))
    columns = [frame[_quote(name)].alias(f"{_GIVEN}{place}") for place, name in enumerate(given)]
    staged = frame.select(*(frame[_quote(name)] for name in kept), *columns).selectExpr(
        "*", *(f"{sql} AS `.new{place}`" for place, sql in enumerate(added.values()))
    )
    metadata = {names.prediction: _describe(classes)} if classes.count else {}
    new = [
        _finish(staged[f"`.new{place}`"], name, name in vectors, metadata.get(name))
        for place, name in enumerate(added)
    ]
    return staged.select(*(staged[_quote(name)] for name in kept), *new)


def _number(output: Output, place: int) -> str:
    """Return the SQL for an output without classes: one number, a vector, or nested arrays."""
    wanted = {0: "double", 1: "array<double>"}.get(output.depth)
    return f"CAST(`{_GIVEN}{place}` AS {wanted})" if wanted else f"`{_GIVEN}{place}`"


def _classify(output: Output, classes: Classes) -> tuple[str, str, str]:
    """Return the SQL for the raw numbers, the probabilities and the class."""
    if output.depth == 0:
        number = f"CAST(`{_GIVEN}0` AS double)"
        if classes.are_logits:
            sigmoid = f"1 / (1 + exp(-{number}))"
            raw, probability = f"array(-{number}, {number})", f"array(1 - {sigmoid}, {sigmoid})"
        else:
            raw = probability = f"array(1 - {number}, {number})"
        border = 0 if classes.are_logits else 0.5
        return raw, probability, f"CAST({number} > {border}D AS double)"
    probability = _softmax(_DOUBLES) if classes.are_logits else _DOUBLES
    chosen = let("r", _DOUBLES, "CAST(array_position(r, array_max(r)) - 1 AS double)")
    return _DOUBLES, probability, chosen


def _softmax(numbers: str) -> str:
    quotients = let("s", "aggregate(e, 0D, (a, v) -> a + v)", "transform(e, v -> v / s)")
    powers = let("e", "transform(r, v -> exp(v - m))", quotients)
    return let("r", numbers, let("m", "array_max(r)", powers))


def _finish(column: Any, name: str, is_vector: bool, metadata: dict[str, Any] | None) -> Any:
    if is_vector:
        from pyspark.ml.functions import array_to_vector

        column = array_to_vector(column)
    return column.alias(name, metadata=metadata) if metadata else column.alias(name)


def _describe(classes: Classes) -> dict[str, Any]:
    """Return Spark ML metadata for a column of classes, in which `IndexToString` finds names."""
    known = {"vals": list(classes.levels)} if classes.levels else {"num_vals": classes.count}
    return {"ml_attr": {"type": "nominal", **known}}


def _reject_taken_names(kept: Sequence[str], added: Sequence[str]) -> None:
    """Reject names that Spark considers equal, because it ignores case."""
    taken = {name.lower() for name in kept}
    for name in added:
        if name.lower() in taken:
            raise InputError(
                f"the {term('DataFrame')} would have two columns named {show(name)}: rename the "
                "prediction columns with setPredictionCol(), setProbabilityCol() and "
                f"setRawPredictionCol(), or drop the column of the {term('DataFrame')}"
            )
        taken.add(name.lower())


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
