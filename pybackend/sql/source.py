"""The table that a model is deployed beside: looked at before anything is made."""

from __future__ import annotations

from collections.abc import Sequence

from pybackend.errors import DatabaseError, InputError
from pybackend.sql.compile import DIALECTS
from pybackend.sql.connections import Connection
from pybackend.sql.query import Question, list_columns

# Columns, in errors.
_MOST_SHOWN = 20


def check_source(database: Connection, question: Question) -> None:
    """Reject a table that cannot be read, or has no such columns.

    Raises
    ------
    InputError
        Names the argument, and says what the database has said.
    """
    source, quote = question.source, DIALECTS[database.dialect].quote
    wanted: dict[str, Sequence[str]] = {
        "key": question.keys,
        "features": list_columns(question.features),
    }
    columns = database.list_columns(source)
    if columns is not None:
        for argument, names in wanted.items():
            check_listed(argument, names, columns, source)
        return
    for argument, names in {"table": ["1"], **wanted}.items():
        shown = ", ".join(names if argument == "table" else map(quote, names))
        try:
            database.execute(f"SELECT {shown} FROM {source} s WHERE 1 = 0")
        except DatabaseError as error:
            place = "" if argument == "table" else f" from {source}"
            raise InputError(f"`{argument}` cannot be read{place}: {error.__cause__}") from error


def check_listed(argument: str, names: Sequence[str], columns: Sequence[str], place: str) -> None:
    """Reject names that are not among columns; whether upper or lower case, a database decides."""
    known = {column.lower() for column in columns}
    for name in names:
        if name.lower() not in known:
            listed = ", ".join(map(repr, columns[:_MOST_SHOWN]))
            more = ", ..." if len(columns) > _MOST_SHOWN else ""
            raise InputError(f"`{argument}`: {place} has no column {name!r}; it has {listed}{more}")
