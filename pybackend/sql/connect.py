"""Connections for the argument `con`: of Python's drivers, of a Spark session, or of DBI in R."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pybackend.core.errors import InputError
from pybackend.core.words import show
from pybackend.sql.database import Connection, list_rows
from pybackend.sql.duckdb import DuckdbConnection
from pybackend.sql.operations import WeightsPart
from pybackend.sql.postgres import PostgresConnection, check_version
from pybackend.sql.spark import SparkConnection
from pybackend.sql.sqlite import SqliteConnection

_KINDS = {
    "duckdb": DuckdbConnection,
    "_duckdb": DuckdbConnection,
    "psycopg": PostgresConnection,
    "sqlite3": SqliteConnection,
}


def connect(con: Any) -> Connection:
    """Return the connection for the argument ``con``; `InputError` for a type or a version that is
    not supported.
    """
    kind = type(con)
    package = kind.__module__.partition(".")[0]
    if package == "pyspark" and hasattr(con, "createDataFrame"):
        return SparkConnection(con)
    if isinstance(con, Connection) or (package in _KINDS and hasattr(con, "execute")):
        database = con if isinstance(con, Connection) else _KINDS[package](con)
        database.check()
        return database
    raise InputError(
        f"`con` must be a connection of duckdb, psycopg or sqlite3, or a Spark session, not "
        f"{show(None) if con is None else f'a {kind.__module__}.{kind.__qualname__}'}"
    )


# DBI connections in R: R runs the statements that Python generates.

_STAGED = "tfdist_staged_weights"
_ASKS = ("SELECT", "WITH", "EXPLAIN")


class _DBI(Connection):
    """Connection in R, with functions of R. ``run`` takes a statement, the values for its
    placeholders, and whether to return its rows, as a list of columns. ``write`` takes a name,
    column names and columns, and creates a temporary table. ``is_transacting`` takes nothing.
    """

    def __init__(
        self, run: Callable[..., Any], write: Callable[..., Any], is_transacting: Callable[[], bool]
    ) -> None:
        super().__init__(None)
        self._call, self._write, self._is_transacting = run, write, is_transacting

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        marked = self._mark(sql) if values else sql
        columns = self._call(marked, list(values), sql.startswith(_ASKS)) or []
        return list(zip(*columns, strict=True))

    def _mark(self, sql: str) -> str:
        """Replace question marks with the driver's placeholders."""
        return sql

    def try_view(self, view: str) -> None:
        """Compute a row into a temporary table, so that R need not read its columns' types."""
        self.execute(f"CREATE TEMPORARY TABLE tfdist_tried AS SELECT * FROM {view} LIMIT 1")
        self.execute("DROP TABLE tfdist_tried")

    def _is_in_transaction(self) -> bool:
        return bool(self._is_transacting())

    def _stage(self, table: str, columns: dict[str, Any], select: str) -> None:
        """Let R write columns into a temporary table, from which the rows of a table are selected.

        R's drivers write whole tables fast, but have no arrays: numbers are text there.
        """
        self._write(_STAGED, list(columns), list(columns.values()))
        self.execute(f"INSERT INTO {table} SELECT {select} FROM {_STAGED}")
        self.execute(f"DROP TABLE {_STAGED}")


def _columns_of(parts: Sequence[WeightsPart]) -> dict[str, Any]:
    rows = list(list_rows(parts))
    return {
        "part": [part for part, *_ in rows],
        "place": np.array([place for _, place, *_ in rows], np.int32),
        "numbers": [numbers for *_, numbers, _ in rows],
        "kernel": np.array([is_kernel for *_, is_kernel in rows]),
    }


class RDuckdb(_DBI, DuckdbConnection):
    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        numbers = "CAST('[' || numbers || ']' AS FLOAT[])"
        self._stage(table, _columns_of(parts), f"part, place, {numbers}")


class RPostgres(_DBI, PostgresConnection):
    def check(self) -> None:
        check_version(int(self.execute("SELECT current_setting('server_version_num')")[0][0]))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with Connection.transaction(self):
            self._prepare()
            yield

    def _mark(self, sql: str) -> str:
        first, *others = sql.split("?")
        return first + "".join(f"${n}{text}" for n, text in enumerate(others, 1))

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._store_whole(table)
        kernel = "CASE WHEN kernel THEN CAST('[' || numbers || ']' AS vector) END"
        chosen = f", {kernel}" if self.has_vectors else ""
        numbers = "CAST('{' || numbers || '}' AS real[])"
        self._stage(table, _columns_of(parts), f"part, place, {numbers}{chosen}")


class RSqlite(_DBI, SqliteConnection):
    try_view = SqliteConnection.try_view  # which computes no row
    transaction = Connection.transaction

    def _add_functions(self) -> None:
        """Do nothing: R has already loaded an extension with these functions."""

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        if not parts:
            return
        numbers = np.concatenate([part.numbers for part in parts])
        columns = {
            "part": [part.name for part in parts for _ in part.numbers],
            "i": numbers[:, 0].astype(np.int32),
            "o": numbers[:, 1].astype(np.int32),
            "x": numbers[:, 2].astype(np.float64),
        }
        self._stage(table, columns, "part, i, o, x")


_R_KINDS = {"duckdb": RDuckdb, "postgresql": RPostgres, "sqlite": RSqlite}


def connect_dbi(dialect: str, *functions: Callable[..., Any]) -> Connection:
    """Return an R connection for `deploy_model`; the functions are the arguments of `_DBI`."""
    return _R_KINDS[dialect](*functions)
