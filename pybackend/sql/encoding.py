"""Category columns in a database, encoded as numbers as in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pybackend.core.data.columns import ONE_HOT, ColumnSpec, encoding_of
from pybackend.sql.query import Encoding, Question, free_prefix, list_columns
from pybackend.sql.writer import SqlWriter


@dataclass(frozen=True)
class _Coded:
    """Column whose categories are encoded as numbers: its names and SQL."""

    code: str
    names: tuple[str, ...]
    shown: tuple[str, ...]


def find_encodings(
    columns: Iterable[str], categories: Mapping[str, Sequence[Any]] | None, encode: Any
) -> dict[str, Encoding]:
    """Return the encodings of the columns that have categories, with the same rules as training."""
    spec = ColumnSpec(encode=encode)
    return {
        column: Encoding(tuple(categories[column]), encoding_of(spec, column) == ONE_HOT)
        for column in columns
        if categories and column in categories
    }


def encode_source(question: Question, dialect: type[SqlWriter]) -> Question:
    """Return the `Question` with a source in which categories are numbers, other values NULL."""
    if not question.encodings:
        return question
    quote = dialect.quote
    used = list_columns(question.features)
    plain = [c for c in used if c not in question.encodings]
    kept = [quote(name) for name in dict.fromkeys([*question.keys, *plain])]
    prefix = free_prefix([*question.keys, *used])
    coded = {
        column: _code(encoding, f"{prefix}{number}", quote)
        for number, (column, encoding) in enumerate(question.encodings.items())
    }
    cases = [
        f"CASE {quote(column)} {_list_cases(question.encodings[column], dialect)} END "
        f"AS {quote(one.code)}"
        for column, one in coded.items()
    ]
    shown = [sql for one in coded.values() for sql in one.shown]
    inner = f"SELECT {', '.join([*kept, *cases])} FROM {question.source} s"
    features = {
        key: given
        if isinstance(given, str) and given not in coded
        else tuple(n for c in _as_tuple(given) for n in (coded[c].names if c in coded else (c,)))
        for key, given in question.features.items()
    }
    source = f"(SELECT {', '.join([*kept, *shown])} FROM ({inner}) s)"
    return replace(question, source=source, features=features, encodings={})


def _code(encoding: Encoding, code: str, quote: Any) -> _Coded:
    column = quote(code)
    if not encoding.is_one_hot:
        return _Coded(code, (code,), (column,))
    names = tuple(f"{code}_{place}" for place in range(len(encoding.values)))
    shown = tuple(
        f"CASE WHEN {column} = {place} THEN 1 WHEN {column} IS NOT NULL THEN 0 END AS {quote(name)}"
        for place, name in enumerate(names)
    )
    return _Coded(code, names, shown)


def _list_cases(encoding: Encoding, dialect: type[SqlWriter]) -> str:
    def literal(value: Any) -> str:
        return dialect.text(value) if isinstance(value, str) else str(value).upper()

    return " ".join(
        f"WHEN {literal(value)} THEN {place}" for place, value in enumerate(encoding.values)
    )


def _as_tuple(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given
