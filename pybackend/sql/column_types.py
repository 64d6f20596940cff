"""Types of the columns that a model takes: those that hold no numbers are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace

from pybackend.errors import InputError
from pybackend.sql.compile import DIALECTS
from pybackend.sql.connections import Connection
from pybackend.sql.query import Question, list_columns

# Names of types begin so in all dialects. Others, as a user's own, are left to the database.
_NUMBER = re.compile(
    r"(u?(tiny|small|big|huge)?int(eger)?|float|double( precision)?|real|decimal|numeric"
    r"|bool(ean)?)(\(.*\))?$"
)
_NO_NUMBER = re.compile(
    r"(text|varchar|char|string|enum|blob|bytea|binary|uuid|date|time|interval|json|struct|map|row)"
)
# What PostgreSQL does not cast to real numbers at once.
_CASTS = {
    "boolean": "integer",
    "boolean[]": "integer[]",
    "vector": "real[]",
    "halfvec": "real[]",
}
_SHOWN = 40


def look_up_types(database: Connection, question: Question) -> Question:
    """The question, with what its features must be cast to first.

    Raises
    ------
    InputError
        Names a column that does not hold numbers, or arrays of them.
    DatabaseError
        There is no such table or column.
    """
    given = question.features.values()
    arrays = [one for one in given if isinstance(one, str) and one not in question.encodings]
    lists = [one for one in given if not isinstance(one, str)]
    columns = [name for name in list_columns(question.features) if name not in question.encodings]
    if not columns:
        return question
    quote = DIALECTS[database.dialect].quote
    found = database.types_of(question.source, [quote(name) for name in columns])
    types = dict(zip(columns, (str(kind).lower() for kind in found), strict=True))
    for names in lists:
        for name in (name for name in names if name in types):
            if _NO_NUMBER.match(types[name]) or _is_array(types[name]):
                raise _refuse(name, types[name], "encode it as a number")
    for name in arrays:
        is_json = database.dialect == "sqlite" and types[name] == "text"
        element = re.sub(r"^array<|[\[>].*$", "", types[name])
        if _NUMBER.match(types[name]) or (_NO_NUMBER.match(element) and not is_json):
            raise _refuse(name, types[name], "it must hold arrays of numbers, or be in a list")
    casts = {name: _CASTS[kind] for name, kind in types.items() if kind in _CASTS}
    return replace(question, casts=casts if database.dialect == "postgresql" else {})


def _is_array(kind: str) -> bool:
    return kind.endswith("]") or kind.startswith("array<")


def _refuse(name: str, kind: str, hint: str) -> InputError:
    shown = kind if len(kind) <= _SHOWN else f"{kind[:_SHOWN]}..."
    return InputError(f"`features` has the column {name!r}, which is of the type {shown}: {hint}")
