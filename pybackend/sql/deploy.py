"""Deploy a model to a database: as a view over a table, or for the rows of a single query."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pybackend.core.errors import DatabaseError, InputError
from pybackend.core.job.call_options import Features, PredictionType
from pybackend.core.job.storage_options import ColumnEncoding
from pybackend.core.quiet import quiet_about_traces
from pybackend.core.words import show
from pybackend.sql import operations as ops
from pybackend.sql.compile import PredictionColumns, SqlModel, answer, ask, check_length, check_name
from pybackend.sql.connect import connect
from pybackend.sql.database import Connection, SqlWriter
from pybackend.sql.operations import Array, Graph, Question, WeightsPart, list_columns

TABLE = "tfdist_models"
# Beginnings of type names in all dialects. Other types, such as user-defined ones, are not checked.
_NUMBER = re.compile(
    r"(u?(tiny|small|big|huge)?int(eger)?|float|double( precision)?|real|decimal|numeric"
    r"|bool(ean)?)(\(.*\))?$"
)
_NO_NUMBER = re.compile(
    r"(text|varchar|char|string|enum|blob|bytea|binary|uuid|date|time|interval|json|struct|map|row)"
)
# Types that PostgreSQL does not cast to real numbers directly.
_CASTS = {"boolean": "integer", "boolean[]": "integer[]", "vector": "real[]", "halfvec": "real[]"}
# Characters of a type's name that errors show: a struct's name lists its fields.
_SHOWN = 40
# Number of columns that errors show.
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Deployment:
    """A model that was deployed to a database.

    Attributes
    ----------
    name
        Name of the view.
    version
        Version number, starting at 1 and increasing with each deployment under the same name.
    view, weights
        Names of this version's view and of its weights table.
    difference
        Largest difference between the database's and Keras's numbers for the same rows.
    """

    name: str
    version: int
    view: str
    weights: str
    difference: float


def deploy_model(
    con: Any,
    model: Any,
    name: str,
    *,
    table: str | Sequence[str],
    key: str | Sequence[str],
    features: str | Features | None = None,
    type: PredictionType | None = None,
    levels: Sequence[Any] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None = None,
) -> Deployment:
    """Deploy a trained model to a database: ``SELECT * FROM name`` returns its predictions.

    Everything happens in one transaction, in which the database computes predictions for a few rows
    and compares them with Keras's. If anything fails, nothing is left behind. (Spark has no
    transactions: whatever was created is dropped again.)

    Another deployment under the same name creates the next version. ``name`` shows the newest
    version, and ``name_v1``, ``name_v2`` and so on remain available. `undeploy_model` removes them.
    The table ``tfdist_models`` records each deployment and its time. To deploy, you need permission
    to create tables and views, and to read that table and insert into it. In PostgreSQL,
    deployments wait for each other, and grants on ``name`` are retained; grants on its columns, and
    its comment, are lost if the columns change.

    Parameters
    ----------
    con
        A connection of duckdb, psycopg (3) or sqlite3 that is not within a transaction, or a Spark
        session.
    name
        Name of the view.
    model, table, key, features, type, levels, categories, encode
        As in `to_sql`.

    Returns
    -------
    Deployment
        The version, and the difference from Keras.

    Raises
    ------
    InputError
        An argument is invalid, or a layer cannot be translated to SQL; the message names it. The
        table and its columns are looked up first.
    DatabaseError
        The database rejected a statement, or computes different numbers.
    """
    check_name("name", name)
    database = connect(con)
    wanted = PredictionColumns(features, type, levels, categories, encode)
    question = ask(model, database.dialect, table, key, wanted)
    check_length(database.dialect, _weights_of(_view_of(name, 1)))

    check = DatabaseCheck(question.model, question.graph)
    with database.transaction():
        # Before anything is created: errors that name the argument, also where a database would
        # only notice when the view is read.
        check_source(database, question)
        question = look_up_types(database, question)
        registry = Registry(database)
        version, is_shown = registry.next_version(name), bool(registry.live_versions(name))
        if not is_shown:
            database.check_free(database.quote(name))
        view = _view_of(name, version)
        weights = _weights_of(view)
        check_length(database.dialect, weights)
        question = replace(question, weights=weights)
        made = _answer(database, question)
        database.create_weights(database.quote(weights), made.parts)
        difference = check.compare(database, question)
        database.create_view(database.quote(view), made.query)
        database.try_view(database.quote(view))
        _show(database, name, view, is_new=not is_shown)
        registry.add(name, version, "deploy", difference)
    return Deployment(name, version, view, weights, difference)


def undeploy_model(con: Any, name: str, *, version: int | None = None) -> None:
    """Remove a deployed model from a database.

    Parameters
    ----------
    con
        As in `deploy_model`.
    name
        Name that was given to `deploy_model`.
    version
        Version to remove. If it is the newest, ``name`` then shows the previous version. None
        (default): remove all versions, and the view ``name`` itself.

    Raises
    ------
    InputError
        No such model is deployed.
    DatabaseError
        The database rejected the removal, for example because another view depends on the model's
        view. Nothing was changed.
    """
    check_name("name", name)
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise InputError(f"`version` must be a whole number or {show(None)}, not {show(version)}")
    database = connect(con)
    with database.transaction():
        registry = Registry(database)
        live = registry.live_versions(name)
        if not live:
            raise InputError(f"no model is deployed under the name {show(name)}")
        if version is not None and version not in live:
            listed = ", ".join(map(str, live))
            raise InputError(f"{show(name)} has no version {version}; its versions: {listed}")
        gone = live if version is None else [version]
        left = [number for number in live if number not in gone]
        if not left:
            database.execute(f"DROP VIEW IF EXISTS {database.quote(name)}")
        elif left[-1] != live[-1]:
            _show(database, name, _view_of(name, left[-1]), is_new=False)
        for number in gone:
            view = _view_of(name, number)
            # They may have been dropped by hand.
            database.execute(f"DROP VIEW IF EXISTS {database.quote(view)}")
            database.execute(f"DROP TABLE IF EXISTS {database.quote(_weights_of(view))}")
            registry.add(name, number, "undeploy", None)


def _answer(database: Connection, question: Question) -> SqlModel:
    return answer(database.dialect, question, database.has_vectors)


def _view_of(name: str, version: int) -> str:
    return f"{name}_v{version}"


def _weights_of(view: str) -> str:
    return f"{view}_weights"


def _show(database: Connection, name: str, view: str, *, is_new: bool) -> None:
    query = f"SELECT * FROM {database.quote(view)}"
    if is_new:
        database.create_view(database.quote(name), query)
    else:
        database.replace_view(database.quote(name), query)


class Registry:
    """Log of deployments in a database: a table to which rows are only added."""

    def __init__(self, database: Connection) -> None:
        self._database = database
        database.take_turns()
        text, double = database.text_type, database.double_type
        database.execute(
            f"CREATE TABLE IF NOT EXISTS {TABLE} (name {text}, version integer, action {text}, "
            f"done_at {text}, difference {double})"
        )

    def next_version(self, name: str) -> int:
        """Return the number of the next deployment; no number is used twice."""
        return max((version for version, _ in self._events(name)), default=0) + 1

    def live_versions(self, name: str) -> list[int]:
        events = self._events(name)
        gone = {version for version, action in events if action == "undeploy"}
        return sorted({version for version, _ in events} - gone)

    def add(self, name: str, version: int, action: str, difference: float | None) -> None:
        """Record that a version was deployed ("deploy") or removed ("undeploy")."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        row = (name, version, action, at, difference)
        self._database.execute(f"INSERT INTO {TABLE} VALUES (?, ?, ?, ?, ?)", row)

    def _events(self, name: str) -> list[tuple[int, str]]:
        query = f"SELECT version, action FROM {TABLE} WHERE name = ?"
        found = self._database.execute(query, (name,))
        return [(int(version), str(action)) for version, action in found]


def look_up_types(database: Connection, question: Question) -> Question:
    """Return the question with the types to which PostgreSQL must cast features.

    `InputError`: a column has neither numbers nor arrays of numbers.
    """
    columns = [name for name in list_columns(question.features) if name not in question.encodings]
    if not columns:
        return question
    found = database.types_of(question.source, [database.quote(name) for name in columns])
    types = dict(zip(columns, (str(kind).lower() for kind in found), strict=True))
    for given in question.features.values():
        for name in list_columns(given):
            kind = types.get(name, "")  # encoded columns are not looked up
            if not isinstance(given, str) and (_NO_NUMBER.match(kind) or _is_array(kind)):
                raise _refuse(name, kind, "encode it as a number")
            if isinstance(given, str) and not _may_have_arrays(database.dialect, kind):
                raise _refuse(name, kind, "it must contain arrays of numbers, or be in a list")
    casts = {name: _CASTS[kind] for name, kind in types.items() if kind in _CASTS}
    return replace(question, casts=casts if database.dialect == "postgresql" else {})


def _is_array(kind: str) -> bool:
    return kind.endswith("]") or kind.startswith("array<")


def _may_have_arrays(dialect: str, kind: str) -> bool:
    is_json = dialect == "sqlite" and kind == "text"
    element = re.sub(r"^array<|[\[>].*$", "", kind)
    return is_json or not (_NUMBER.match(kind) or _NO_NUMBER.match(element))


def _refuse(name: str, kind: str, hint: str) -> InputError:
    shown = kind if len(kind) <= _SHOWN else f"{kind[:_SHOWN]}..."
    return InputError(f"`features` has the column {show(name)}, which has type {shown}: {hint}")


def check_source(database: Connection, question: Question) -> None:
    """Raise `InputError` for a table that cannot be read or lacks columns, with the database's
    error.
    """
    source = question.source
    wanted = {"key": [*question.keys], "features": list_columns(question.features)}
    columns = database.list_columns(source)
    if columns is not None:
        for argument, names in wanted.items():
            check_listed(argument, names, columns, source)
        return
    for argument, names in {"table": ["1"], **wanted}.items():
        shown = ", ".join(names if argument == "table" else map(database.quote, names))
        try:
            database.execute(f"SELECT {shown} FROM {source} s WHERE 1 = 0")
        except DatabaseError as error:
            where = "" if argument == "table" else f" from {source}"
            raise InputError(f"`{argument}` cannot be read{where}: {error.__cause__}") from error


def check_listed(argument: str, names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Reject names that are not among columns; ignore case, which depends on the database."""
    known = {column.lower() for column in columns}
    for name in names:
        if name.lower() not in known:
            listed = ", ".join(map(show, columns[:_MOST_SHOWN]))
            more = ", ..." if len(columns) > _MOST_SHOWN else ""
            raise InputError(
                f"`{argument}`: {where} has no column {show(name)}; it has {listed}{more}"
            )


def augment(
    con: Any,
    model: Any,
    query: str,
    key: Sequence[str],
    *,
    columns: Sequence[str],
    features: Any,
    type: str | None,
    levels: Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: Mapping[str, ColumnEncoding] | None = None,
) -> str:
    """Return SQL for a query's rows with a model's predictions, without running it.

    The weights are written to a temporary table, once for each model and connection. ``columns``
    are those of the query; ``key`` lists those to show in addition to the predictions.
    """
    database = connect(con)
    wanted = PredictionColumns(features, type, levels, categories, encode)
    question = ask(model, database.dialect, ops.SourceQuery(query), key, wanted)
    check_listed("features", list_columns(question.features), columns, "the query")
    with database.transaction():
        question = look_up_types(database, question)
        parts = _answer(database, question).parts
        weights = f"tfdist_weights_{_hash(parts)}"
        database.keep_weights(database.quote(weights), parts)
        question = replace(question, weights=weights)
        return _answer(database, question).query


def _hash(parts: Sequence[WeightsPart]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.name} {part.numbers.shape} {part.is_kernel}".encode())
        digest.update(part.numbers.tobytes())
    return digest.hexdigest()[:24]


# Check that a database computes the same as Keras.

_ROWS = 3
# Most numbers of an output that are compared, evenly spread.
_MOST_NUMBERS = 32
# Sums in another order differ by about 1e-6; a wrong formula or weight by more than these.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


class DatabaseCheck:
    """Random rows for a model, and Keras's predictions for them."""

    def __init__(self, model: Any, graph: Graph) -> None:
        import keras

        rng = np.random.default_rng(0)
        self._graph = graph
        self._rows = [
            _draw(rng, _count_entries(graph, node.name), node.size, tensor.dtype)
            for node, tensor in zip(graph.inputs, model.inputs, strict=True)
        ]
        shaped = [
            rows.reshape(_ROWS, *tensor.shape[1:]).astype(tensor.dtype)
            for rows, tensor in zip(self._rows, model.inputs, strict=True)
        ]
        given = shaped[0] if len(shaped) == 1 else keras.tree.pack_sequence_as(model.input, shaped)
        with quiet_about_traces():
            outputs = keras.tree.flatten(model.predict(given, verbose=0))
        self._expected = [np.asarray(output, np.float64).reshape(_ROWS, -1) for output in outputs]

    def compare(self, database: Connection, question: Question) -> float:
        """Return the largest difference between the database's numbers and Keras's; raise
        `DatabaseError` if it is larger than a rounding error.
        """
        shown, wanted = list[ops.Shown](), list[Array]()
        for number, values in enumerate(self._expected):
            count = values.shape[1]
            for index in np.unique(np.linspace(0, count - 1, _MOST_NUMBERS, dtype=np.int64)):
                shown.append(ops.Shown(f"x{len(shown)}", number, int(index)))
                wanted.append(values[:, index])
        features = {node.name: f"i{n}" for n, node in enumerate(self._graph.inputs)}
        rows = self._write_source(database.writer)
        tried = replace(question, source=rows, keys=("n",), features=features, shown=tuple(shown))
        tried = replace(tried, encodings={}, casts={})  # the rows are numbers
        made = _answer(database, tried)
        found = sorted(database.execute(made.query), key=lambda row: int(row[0]))
        got = np.array([row[1:] for row in found], np.float64).T
        return _compare(database.dialect, got, np.array(wanted))

    def _write_source(self, writer: type[SqlWriter]) -> str:
        rows = []
        for number in range(_ROWS):
            arrays = [f"{writer.array_of(x[number])} AS i{n}" for n, x in enumerate(self._rows)]
            rows.append(f"SELECT {number} AS n, {', '.join(arrays)}")
        return f"({' UNION ALL '.join(rows)})"


def _draw(rng: np.random.Generator, entries: int | None, size: int, dtype: str) -> Array:
    """Draw random numbers for an input; integers for integer inputs and lookups."""
    if entries is None and not dtype.startswith("float"):
        entries = 2 if dtype == "bool" else 100
    if entries is None:
        return rng.normal(size=(_ROWS, size)).astype(np.float32)
    return rng.integers(0, entries, (_ROWS, size)).astype(np.float32)


def _count_entries(graph: Graph, name: str) -> int | None:
    """Return the size of the smallest table in which an input's numbers are looked up."""
    found: list[int | None] = []
    for node in graph.nodes.values():
        if name not in node.inputs:
            continue
        if isinstance(node.operation, ops.Lookup):
            found.append(len(node.operation.table))
        elif isinstance(node.operation, (ops.Gather, ops.Concatenate)):
            found.append(_count_entries(graph, node.name))
    known = [count for count in found if count is not None]
    return min(known, default=None)


def _compare(dialect: str, got: Array, wanted: Array) -> float:
    if got.shape == wanted.shape and np.allclose(got, wanted, _RELATIVE, _ABSOLUTE):
        return float(np.abs(got - wanted).max())
    if got.shape != wanted.shape:
        said = f"{got.shape[-1]} of {wanted.shape[1]} rows"
    else:
        index = np.unravel_index(np.argmax(np.abs(got - wanted)), got.shape)
        said = f"{got[index]} instead of Keras's {wanted[index]}"
    raise DatabaseError(
        f"{dialect} does not compute what Keras does: {said}. Nothing was deployed. Check whether "
        "Keras predicts the same with TF_ENABLE_ONEDNN_OPTS=0 in the environment: some TensorFlow "
        "2.21 kernels are wrong for single-channel convolutions with strides. If it does, report "
        "this, with the model's summary"
    )
