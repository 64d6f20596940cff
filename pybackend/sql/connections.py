"""Connections to databases: statements, transactions, and bulk inserts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from threading import Thread
from typing import Any

import numpy as np

from pybackend.core.errors import DatabaseError, InputError, TfdistError
from pybackend.core.words import either, show
from pybackend.sql.query import WeightsPart

_MATHEMATICAL = {"exp": math.exp, "ln": math.log, "sqrt": math.sqrt, "tanh": math.tanh}
# Characters of a statement that errors show.
_SHOWN = 60
# Seconds between two checks for an interrupt, and for its effect.
_PAUSE = 0.05
# Number of an advisory lock in PostgreSQL: any that other applications do not use.
_TURN = 7_306_372_281_559_187_053
# Privileges on a view in PostgreSQL.
_GRANTS = (
    "SELECT CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END, "
    "g.privilege_type, g.is_grantable FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS g "
    "WHERE c.oid = to_regclass(?)"
)


class Connection:
    """Connection of a driver that follows Python's database API (PEP 249).

    Attributes
    ----------
    dialect
        SQL dialect of the database.
    has_vectors
        True if the weights table has a column of pgvector's type.
    text_type, double_type
        Names of the types in the database.
    """

    dialect: str
    has_vectors = False
    text_type, double_type = "text", "double precision"

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def check(self) -> None:
        """Reject a database that is too old for the queries.

        Raises
        ------
        InputError
            The database is too old.
        """

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with values for its question marks, and return its rows.

        Raises
        ------
        DatabaseError
            The database rejected the statement.
        """
        with self._named(sql):
            return self._run(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run statements in a transaction: all of them take effect, or none.

        Raises
        ------
        InputError
            The connection is already within a transaction.
        """
        if self._is_in_transaction():
            raise InputError("the connection is in a transaction: commit it or roll it back first")
        self.execute("BEGIN")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with suppress(DatabaseError):  # the database may have rolled back already
                self.execute("ROLLBACK")
            raise

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        """Create the weights table, by its quoted name, and fill it."""
        self.execute(f"CREATE TABLE {table} ({self._columns}){self._options}")
        self._fill(table, parts)

    def keep_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        """Create a weights table that only this connection can see, unless it exists."""
        self.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {table} ({self._columns}){self._options}"
        )
        if not self.execute(f"SELECT 1 FROM {table} LIMIT 1"):
            self._fill(table, parts)

    def types_of(self, source: str, columns: Sequence[str]) -> list[str]:
        """Return the names of the types of quoted columns of a table or query."""
        types = ", ".join(self._type_of.format(f"r.{column}") for column in columns)
        rows = f"SELECT {', '.join(columns)} FROM {source} AS s {self._sample}"
        # This always has a row.
        (found,) = self.execute(
            f"SELECT {types} FROM (SELECT 1) AS o LEFT JOIN ({rows}) AS r ON 1=1"
        )
        return [str(kind) for kind in found]

    _type_of, _sample = "typeof({})", "WHERE 1 = 0"

    def create_view(self, view: str, query: str) -> None:
        """Create a view by its quoted name; raise an error if the name exists."""
        self.execute(f"CREATE VIEW {view} AS {query}")

    def list_columns(self, table: str) -> list[str] | None:
        """Return the columns of a table by its quoted name; None if only a query can find them.

        Raises
        ------
        InputError
            The table does not exist, or a view cannot read it.
        """
        return None

    def check_free(self, view: str) -> None:
        """Reject the quoted name of a view if it exists; most databases do so on creation.

        Raises
        ------
        InputError
            The name exists.
        """

    def try_view(self, view: str) -> None:
        """Compute a row of a view: some databases look up tables and columns only then."""
        self.execute(f"SELECT * FROM {view} LIMIT 1")

    def take_turns(self) -> None:
        """Wait until other deployments to the database have ended, if it has locks for this."""

    def replace_view(self, view: str, query: str) -> None:
        """Replace the query of a view."""
        self.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")

    @property
    def _columns(self) -> str:
        """Columns of the weights table."""
        raise NotImplementedError

    _options = ""

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        raise NotImplementedError

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        cursor = self.raw.execute(sql, values)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def _is_in_transaction(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def _named(self, sql: str) -> Iterator[None]:
        """Convert the driver's errors to a `DatabaseError` that includes the statement."""
        try:
            yield
        except TfdistError:
            raise
        except Exception as error:
            begun = " ".join(sql[:_SHOWN].split())
            raise DatabaseError(f"{self.dialect} rejected {begun} ...: {error}") from error


class DuckDB(Connection):
    """Connection from the package ``duckdb``."""

    dialect = "duckdb"

    def check(self) -> None:
        version = self.execute("SELECT version()")[0][0]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < (1, 3):
            raise InputError(f"DuckDB must be 1.3 or newer, not {version}")

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        # On a thread, so that Ctrl-C can interrupt all threads of DuckDB. DuckDB's own handling of
        # Ctrl-C waits until its other threads have finished their parts of the statement.
        rows: Future[list[Any]] = Future()

        def run() -> None:
            if not rows.set_running_or_notify_cancel():
                return
            try:
                rows.set_result(self.raw.execute(sql, list(values)).fetchall())
            except BaseException as error:
                rows.set_exception(error)

        try:
            Thread(target=run).start()
            while wait([rows], _PAUSE).not_done:
                pass  # a signal that arrives just before a wait does not end it
            return [tuple(row) for row in rows.result()]
        except KeyboardInterrupt:
            if not rows.cancel():
                while wait([rows], _PAUSE).not_done:
                    self.raw.interrupt()  # has no effect before the statement has begun
            raise

    def _is_in_transaction(self) -> bool:
        """Compare two transaction ids, which differ outside a transaction."""
        numbers = {self._run("SELECT txid_current()", ())[0][0] for _ in range(2)}
        return len(numbers) == 1

    @property
    def _columns(self) -> str:
        return "part VARCHAR, place INTEGER, numbers FLOAT[]"

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        import pyarrow as pa

        for part in parts:
            rows, width = part.numbers.shape
            offsets = np.arange(rows + 1, dtype=np.int32) * width
            numbers = pa.array(np.ascontiguousarray(part.numbers, np.float32).ravel())
            staged = pa.table(
                {
                    "place": pa.array(np.arange(rows, dtype=np.int32)),
                    "numbers": pa.ListArray.from_arrays(pa.array(offsets), numbers),
                }
            )
            name = "tfdist_staged_weights"
            self.raw.register(name, staged)
            try:
                self.execute(
                    f"INSERT INTO {table} SELECT ?, place, numbers FROM {name}", [part.name]
                )
            finally:
                self.raw.unregister(name)


class Postgres(Connection):
    """Connection from the package ``psycopg``."""

    dialect = "postgresql"

    def check(self) -> None:
        if self.raw.closed:
            raise InputError("`con` is closed: connect again")
        with self._named("SELECT version()"):
            version = self.raw.info.server_version
        if version < 120000:
            raise InputError(f"PostgreSQL must be 12 or newer, not {version // 10000}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._is_in_transaction():
            raise InputError("the connection is in a transaction: commit it or roll it back first")
        with self._named("COMMIT"), self.raw.transaction():
            self._prepare()
            yield

    def _prepare(self) -> None:
        """Change settings until the end of the transaction."""
        self.execute("SET LOCAL client_min_messages = warning")  # no notices of existing tables
        known = "SELECT 1 FROM pg_extension WHERE extname = 'vector'"
        self.has_vectors = bool(self.execute(known))

    _type_of = "CAST(pg_typeof({}) AS text)"

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        super().create_weights(table, parts)
        self.execute(f"ANALYZE {table}")

    @property
    def _columns(self) -> str:
        # Long rows are compressed and stored out of line by default: this costs more than it saves.
        kernel = ", kernel vector" if self.has_vectors else ""
        return f"part text, place integer, numbers real[]{kernel}, PRIMARY KEY (part, place)"

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self.execute(f"ALTER TABLE {table} ALTER COLUMN numbers SET STORAGE EXTERNAL")
        with (
            self._named("COPY"),
            self.raw.cursor() as cursor,
            cursor.copy(f"COPY {table} FROM STDIN") as copy,
        ):
            for row in list_rows(parts):
                fields = [row.part, str(row.place), f"{{{row.numbers}}}"]
                if self.has_vectors:
                    fields.append(f"[{row.numbers}]" if row.is_kernel else "\\N")
                copy.write("\t".join(fields) + "\n")

    def take_turns(self) -> None:
        """Take a lock until the end of the transaction."""
        self.execute(f"SELECT pg_advisory_xact_lock({_TURN})")

    def replace_view(self, view: str, query: str) -> None:
        """Replace the query; grants are retained, dependent views only if the columns are equal."""
        grants = self.execute(_GRANTS, [view])
        self.execute("SAVEPOINT tfdist")
        try:
            super().replace_view(view, query)
        except DatabaseError:
            self.execute("ROLLBACK TO tfdist")
            self.execute(f"DROP VIEW {view}")
            self.create_view(view, query)
            for role, privilege, may_grant in grants:
                option = " WITH GRANT OPTION" if may_grant else ""
                self.execute(f"GRANT {privilege} ON {view} TO {role}{option}")

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        # Without values the driver does not look for placeholders, which names may contain.
        cursor = self.raw.execute(sql.replace("?", "%s") if values else sql, values or None)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def _is_in_transaction(self) -> bool:
        return bool(self.raw.info.transaction_status.name != "IDLE")


class SQLite(Connection):
    """Connection from Python's ``sqlite3``."""

    dialect = "sqlite"

    def check(self) -> None:
        version = self.execute("SELECT sqlite_version()")[0][0]
        if tuple(map(int, version.split("."))) < (3, 38):
            raise InputError(f"SQLite must be 3.38 or newer, not {version}")
        self._add_functions()

    def _add_functions(self) -> None:
        """Add mathematical functions, which the SQLite in TensorFlow lacks."""
        for name, function in _MATHEMATICAL.items():
            with suppress(DatabaseError):
                self.execute(f"SELECT {name}(1.0)")
                continue
            self.raw.create_function(name, 1, function, deterministic=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # Otherwise Python begins and ends transactions implicitly.
        before = self.raw.isolation_level
        if not self._is_in_transaction():
            self.raw.isolation_level = None
        try:
            with super().transaction():
                yield
        finally:
            self.raw.isolation_level = before

    _options = " WITHOUT ROWID"
    # In SQLite, values have types; columns do not.
    _sample = "LIMIT 1"

    @property
    def _columns(self) -> str:
        return "part TEXT, i INTEGER, o INTEGER, x REAL, PRIMARY KEY (part, i, o)"

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        insert = f"INSERT INTO {table} VALUES (?, ?, ?, ?)"
        for part in parts:
            places = part.numbers[:, :2].astype(np.int64).T.tolist()
            numbers = part.numbers[:, 2].tolist()
            with self._named(insert):
                self.raw.executemany(insert, zip(repeat(part.name), *places, numbers))

    def try_view(self, view: str) -> None:
        """Only plan the query: SQLite would compute all rows before it returns one."""
        self.execute(f"EXPLAIN SELECT * FROM {view}")

    def replace_view(self, view: str, query: str) -> None:
        self.execute(f"DROP VIEW IF EXISTS {view}")
        self.create_view(view, query)

    def _is_in_transaction(self) -> bool:
        return bool(self.raw.in_transaction)


class Spark(Connection):
    """Spark session, classic or Connect; after a failure, changes are undone one by one."""

    dialect = "spark"
    text_type, double_type = "string", "double"

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._undo: list[str] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo each statement after a failure, because Spark has no transactions."""
        self._undo.clear()
        try:
            yield
        except BaseException:
            for statement in reversed(self._undo):
                with suppress(DatabaseError):
                    self.execute(statement)
            raise

    def types_of(self, source: str, columns: Sequence[str]) -> list[str]:
        """Return the types, which Spark knows without running a job."""
        query = f"SELECT {', '.join(columns)} FROM {source}"
        with self._named(query):
            return [kind for _, kind in self.raw.sql(query).dtypes]

    def list_columns(self, table: str) -> list[str]:
        """Look the table up in the catalog, because a failed query would print Spark's log."""
        if table.startswith("("):
            return list(self.raw.sql(f"SELECT * FROM {table}").columns)
        with self._named(f"DESCRIBE {table}"):
            if not self.raw.catalog.tableExists(table):
                raise InputError(f"`table`: Spark has no table or view {table}")
            if self.raw.catalog.getTable(table).isTemporary:
                write = either(
                    "df.write.saveAsTable(name)", "sparklyr::spark_write_table(data, name)"
                )
                raise InputError(
                    f"`table`: {table} is a temporary view, which no other view can read: write "
                    f"its rows into a table, with {write}"
                )
            return list(self.raw.table(table).columns)

    def check_free(self, view: str) -> None:
        """Look the name up now: Spark would find it only seconds later, after the weights."""
        with self._named(f"DESCRIBE {view}"):
            if self.raw.catalog.tableExists(view):
                raise InputError(
                    f"`name`: a table or view {view} already exists in Spark: choose another name"
                )

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._undo.append(f"DROP TABLE IF EXISTS {table}")
        with self._named("CREATE TABLE"):
            self._make_frame(parts).write.saveAsTable(table)

    def keep_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._make_frame(parts).createOrReplaceTempView(table.strip("`"))

    def _make_frame(self, parts: Sequence[WeightsPart]) -> Any:
        rows = [
            (part.name, place, row.tolist())
            for part in parts
            for place, row in enumerate(part.numbers.astype(np.float64))
        ]
        schema = "part string, place int, numbers array<double>"
        return self.raw.createDataFrame(rows, schema).coalesce(1)

    def create_view(self, view: str, query: str) -> None:
        super().create_view(view, query)
        self._undo.append(f"DROP VIEW IF EXISTS {view}")

    def replace_view(self, view: str, query: str) -> None:
        before = self.execute(f"SHOW CREATE TABLE {view}")[0][0]
        super().replace_view(view, query)
        self._undo.append(before.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.raw.sql(sql, args=list(values) or None).collect()]


@dataclass(frozen=True)
class Row:
    """Row of the weights table, with its numbers as comma-separated text."""

    part: str
    place: int
    numbers: str
    is_kernel: bool


def list_rows(parts: Sequence[WeightsPart]) -> Iterator[Row]:
    """Yield all rows of parts."""
    for part in parts:
        for place, numbers in enumerate(part.numbers.astype(np.float32)):
            yield Row(part.name, place, ",".join(map(repr, numbers.tolist())), part.is_kernel)


_KINDS = {"duckdb": DuckDB, "_duckdb": DuckDB, "psycopg": Postgres, "sqlite3": SQLite}


def connect(con: Any) -> Connection:
    """Return the connection for the argument ``con``.

    Raises
    ------
    InputError
        ``con`` is not a supported connection.
    """
    kind = type(con)
    package = kind.__module__.partition(".")[0]
    if package == "pyspark" and hasattr(con, "createDataFrame"):
        return Spark(con)
    if isinstance(con, Connection) or (package in _KINDS and hasattr(con, "execute")):
        database = con if isinstance(con, Connection) else _KINDS[package](con)
        database.check()
        return database
    raise InputError(
        f"`con` must be a connection of duckdb, psycopg or sqlite3, or a Spark session, not "
        f"{show(None) if con is None else f'a {kind.__module__}.{kind.__qualname__}'}"
    )
