"""Translate a model to a query that computes its predictions in a database: `to_sql`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pybackend.core.api.model_columns import check_levels, check_type, predictions_of
from pybackend.core.api.scoring import check_model
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.columns import ONE_HOT, ColumnSpec, encoding_of
from pybackend.core.data.predictions import Predictions
from pybackend.core.errors import InputError
from pybackend.core.job.call_options import Features, PredictionType
from pybackend.core.job.storage_options import ColumnEncoding, DataOptions, check_data_options
from pybackend.core.words import REST, setting, show
from pybackend.sql import operations as ops
from pybackend.sql.database import SqlWriter
from pybackend.sql.duckdb import DuckdbWriter
from pybackend.sql.oracle import OracleWriter, write_package
from pybackend.sql.postgres import PostgresWriter
from pybackend.sql.spark import SparkWriter
from pybackend.sql.sqlite import SqliteWriter

Dialect = Literal["duckdb", "postgresql", "sqlite", "spark", "oracle"]
DIALECTS: dict[str, type[SqlWriter]] = {
    "duckdb": DuckdbWriter,
    "postgresql": PostgresWriter,
    "sqlite": SqliteWriter,
    "spark": SparkWriter,
    "oracle": OracleWriter,
}
# Longest name in PostgreSQL.
_MOST_BYTES = 63


@dataclass(frozen=True)
class SqlModel:
    """A model as SQL.

    Attributes
    ----------
    dialect
        SQL dialect.
    query
        A SELECT of the key and the predictions of each row. It reads the weights table.
    weights
        Name of the weights table. Its columns are ``part`` (text), ``place`` (integer) and
        ``numbers`` (an array of float32; of float64 in Spark), with pgvector also ``kernel`` (a
        vector); in SQLite ``part``, ``i`` and ``o`` (integers) and ``x`` (real).
    parts
        Rows of the table, by ``name``: row n of the array ``numbers`` is the row with place n. In
        SQLite, each row consists of i, o and x. A vector repeats the numbers of parts with
        ``is_kernel``.
    key, shown
        Key columns and prediction columns of the query.
    """

    dialect: str
    query: str = field(repr=False)
    weights: str
    parts: tuple[ops.WeightsPart, ...] = field(repr=False)
    key: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Return the rows of the weights table.

        SQLite and Oracle: (part, i, o, x). The others: (part, place, numbers).
        """
        for part in self.parts:
            for place, numbers in enumerate(part.numbers.tolist()):
                if self.dialect in ("sqlite", "oracle"):
                    i, o, x = numbers
                    yield part.name, int(i), int(o), x
                else:
                    yield part.name, place, numbers

    def package(self, name: str) -> str:
        """Return a script for Oracle: the weights table, and a package with INIT and SCORE.

        SCORE takes a key and returns the first column of predictions. INIT raises an error if the
        table does not have all of its `rows`, which you insert between creating the table and
        calling INIT. The script was not tested in Oracle.

        Raises
        ------
        InputError
            The dialect is not Oracle, or the key has several columns.
        """
        if self.dialect != "oracle":
            raise InputError(
                f"package() only supports {setting(dialect='oracle')}, not {show(self.dialect)}"
            )
        if len(self.key) != 1:
            raise InputError("package() needs a single-column `key`")
        check_name("name", name)
        count = sum(len(part.numbers) for part in self.parts)
        return write_package(name, self.query, self.key[0], self.shown[0], self.weights, count)


def to_sql(
    model: Any,
    dialect: Dialect,
    *,
    table: str | Sequence[str],
    key: str | Sequence[str],
    features: str | Features | None = None,
    type: PredictionType | None = None,
    levels: Sequence[Any] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None = None,
    weights: str = "model_weights",
    has_vectors: bool = False,
) -> SqlModel:
    """Translate a trained Keras model to SQL.

    The query computes the model for each row separately, so a condition on the key costs only the
    rows that it selects (except in SQLite, which computes all rows first). Numbers are float32 or
    better, as in Keras, but are added in a different order: expect differences of about 1e-6. A row
    has NULL predictions if a feature is NULL, not a number, infinite or too large for float32, or
    if an array has the wrong length. PostgreSQL does not automatically cast booleans and pgvector
    vectors to real numbers: `deploy_model` adds the casts, but here you need a view.

    Parameters
    ----------
    model
        A Keras model of supported layers, Sequential or functional, or a `TrainResult`.
    dialect
        ``"duckdb"``, ``"postgresql"``, ``"sqlite"``, ``"spark"`` or ``"oracle"``. The SQL for
        Oracle was parsed and, after translation, run in DuckDB, but never in Oracle.

        Names are quoted, so they are case-sensitive: a table created as ``digits``, without quotes,
        is ``"DIGITS"`` in Oracle and ``"digits"`` in PostgreSQL.
    table
        Table with the rows. A list for a name in a schema: ``["public", "digits"]``.
    key
        Columns to show with the predictions. In Oracle they must identify the rows: rows that share
        a key or lack one have NULL predictions.
    features
        A column of arrays in row-major order (JSON text in SQLite); or a list of columns with one
        number each, which Oracle requires; or a mapping from the model's inputs to either. None
        (default): the columns used in training, if ``model`` is a `TrainResult`.
    type, levels
        As in `predict_spark`, with the same column names.
    categories, encode
        As in `predict_spark`: columns of text, or of numbers that are codes, as encoded in
        training. A row with a value outside the categories has NULL predictions.
    weights
        Name of the weights table.
    has_vectors
        True if PostgreSQL has pgvector.

    Returns
    -------
    SqlModel
        Its ``query`` reads the table ``weights``. ``rows()`` returns the rows of that table: (part,
        i, o, x) in SQLite and Oracle, (part, place, numbers) elsewhere. For Oracle,
        ``package(name)`` returns a script that creates this table and a package.

    Raises
    ------
    InputError
        An argument is invalid, or a layer cannot be translated to SQL. The message names it.
    """
    wanted = PredictionColumns(features, type, levels, categories, encode)
    question = ask(model, dialect, table, key, wanted)
    check_name("weights", weights)
    return answer(dialect, replace(question, weights=weights), has_vectors)


@dataclass(frozen=True)
class PredictionColumns:
    """Arguments of `to_sql` for the columns that a model reads and returns."""

    features: Any
    type: str | None
    levels: Sequence[Any] | None
    categories: Mapping[str, Sequence[Any]] | None
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None


def ask(
    model: Any,
    dialect: str,
    table: str | Sequence[str] | ops.SourceQuery,
    key: str | Sequence[str],
    wanted: PredictionColumns,
) -> ops.Question:
    """Return the question that the arguments of `to_sql` ask, without the name of a weights
    table.
    """
    if dialect not in DIALECTS:
        listed = ", ".join(map(show, DIALECTS))
        raise InputError(f"`dialect` must be one of {listed}, not {show(dialect)}")
    check_type(wanted.type)
    names = check_levels(wanted.levels)
    relation = (
        f"({table.sql})" if isinstance(table, ops.SourceQuery) else _quote_table(dialect, table)
    )
    keys = _check_columns("key", key)
    check_model(model)
    check_data_options(DataOptions(categories=wanted.categories, encode=wanted.encode))
    result = model if isinstance(model, TrainResult) else None
    known = check_levels(result.levels) if result else None
    features, categories, encode = wanted.features, wanted.categories, wanted.encode
    if features is None:
        features = _features_of(result)
        categories = model.categories if categories is None else categories
        encode = model.encode if encode is None else encode
    keras_model = result.model if result else model

    from pybackend.sql.lower import (
        add_probabilities,  # imports Keras
        lower_model,  # imports Keras
    )

    # Layers first: those that cannot become SQL are named, independently of the outputs' meaning.
    graph = ops.simplify(lower_model(keras_model))
    predictions = predictions_of(keras_model, wanted.type, names, known)
    if predictions.are_logits and (predictions.has_class or predictions.has_numbers):
        keras_model = add_probabilities(keras_model)
        graph = ops.simplify(lower_model(keras_model))
    shown = _list_shown(predictions)
    _check_shown(dialect, keys, shown)
    encodings = _find_encodings(ops.list_columns(features), categories, encode)
    found = _match_features(graph, features, encodings)
    return ops.Question(graph, relation, keys, found, shown, "", encodings, model=keras_model)


def answer(dialect: str, question: ops.Question, has_vectors: bool) -> SqlModel:
    kind = DIALECTS[dialect]
    writer = kind(_encode_source(question, kind), has_vectors)
    query = writer.write()
    shown = tuple(column.name for column in question.shown)
    return SqlModel(dialect, query, question.weights, tuple(writer.parts), question.keys, shown)


def _check_shown(dialect: str, keys: Sequence[str], shown: Sequence[ops.Shown]) -> None:
    """Reject result columns whose names a database would confuse or truncate."""
    names = [*keys, *(column.name for column in shown)]
    counts = Counter(name.lower() for name in names)
    for name in names:
        check_length(dialect, name)
        if counts[name.lower()] > 1:
            raise InputError(
                f"the result would have two columns named {show(name)}, because databases do not "
                "distinguish upper and lower case: rename the key, pass other `levels`, or give "
                "the model's outputs other names"
            )


def check_length(dialect: str, name: str) -> None:
    """Reject a name that PostgreSQL would truncate without an error."""
    length = len(name.encode())
    if dialect == "postgresql" and length > _MOST_BYTES:
        raise InputError(
            f"PostgreSQL names can have at most {_MOST_BYTES} bytes; {show(name)} has {length}"
        )


def _quote_table(dialect: str, table: str | Sequence[str]) -> str:
    parts = [table] if isinstance(table, str) else list(table)
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise InputError(
            f"`table` must be a name, or a list of a schema and a name, not {show(table)}"
        )
    for part in parts:
        check_length(dialect, check_name("table", part))
    return ".".join(map(DIALECTS[dialect].quote, parts))


def check_name(argument: str, name: str) -> str:
    """Return a name, or reject it if no database accepts it."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"`{argument}` must be a name, not {show(name)}")
    return name


def _check_columns(argument: str, columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return column names; there must be at least one, and no duplicates."""
    given = (columns,) if isinstance(columns, str) else columns
    names = tuple(check_name(argument, name) for name in given)
    if not names or len({name.lower() for name in names}) < len(names):
        raise InputError(
            f"`{argument}` must be the names of different columns, not {show(columns)}"
        )
    return names


def _features_of(result: TrainResult | None) -> Any:
    """Return the columns that were the inputs in a training run."""
    if result is None or result.features is None:
        raise InputError("`features` is needed: the columns that make up the model's input")
    if result.tensors:
        raise InputError(
            "`features` is needed: training read its columns with `tensors`, which SQL does not "
            "support; pass a column of arrays of numbers"
        )
    return result.features


def _match_features(
    graph: ops.Graph,
    features: str | Sequence[str] | Mapping[str, str | Sequence[str]],
    encodings: Mapping[str, ops.Encoding],
) -> dict[str, str | tuple[str, ...]]:
    names = [node.name for node in graph.inputs]
    if not isinstance(features, Mapping):
        if len(names) > 1:
            raise InputError(
                f"the model has the inputs {', '.join(names)}: pass "
                f"{setting(features=dict.fromkeys(names, REST))}"
            )
        features = {names[0]: features}
    if set(features) != set(names):
        given, wanted = ", ".join(map(show, features)), ", ".join(map(show, names))
        raise InputError(f"`features` has the inputs {given}, but the model's are {wanted}")
    found: dict[str, str | tuple[str, ...]] = {}
    for node in graph.inputs:
        columns = features[node.name]
        if isinstance(columns, str) and columns not in encodings:
            found[node.name] = check_name("features", columns)
            continue
        columns = [columns] if isinstance(columns, str) else columns
        listed = tuple(check_name("features", name) for name in columns)
        numbers = sum(encodings[name].width if name in encodings else 1 for name in listed)
        if numbers != node.size:
            raise InputError(
                f"`features` has {numbers} columns for the input {show(node.name)}, which takes "
                f"{node.size} numbers; specify a single column of arrays by its name, not in a list"
            )
        found[node.name] = listed
    return found


def _list_shown(predictions: Predictions) -> tuple[ops.Shown, ...]:
    names = [field.name for field in predictions.fields]
    if not (predictions.has_class or predictions.has_numbers):
        return tuple(ops.Shown(name, index) for index, name in enumerate(names))
    shown = []
    if predictions.has_class:
        shown.append(ops.Shown(names.pop(0), 0, is_class=True, levels=predictions.levels))
    if predictions.has_numbers:
        size = predictions.outputs[0].shape[0]
        indices = [-1, 0] if size == 1 else range(len(names))
        shown += [ops.Shown(name, 0, index) for name, index in zip(names, indices, strict=True)]
    return tuple(shown)


# Category columns, encoded as numbers as in training.


def _find_encodings(
    columns: Iterable[str], categories: Mapping[str, Sequence[Any]] | None, encode: Any
) -> dict[str, ops.Encoding]:
    """Return the encodings of the columns that have categories, with the same rules as training."""
    spec = ColumnSpec(encode=encode)
    return {
        column: ops.Encoding(tuple(categories[column]), encoding_of(spec, column) == ONE_HOT)
        for column in columns
        if categories and column in categories
    }


def _encode_source(question: ops.Question, dialect: type[SqlWriter]) -> ops.Question:
    """Return the question with a source in which categories are numbers, and other values NULL."""
    if not question.encodings:
        return question
    quote, used = dialect.quote, ops.list_columns(question.features)
    plain = [name for name in used if name not in question.encodings]
    retained = [quote(name) for name in dict.fromkeys([*question.keys, *plain])]
    prefix = ops.free_prefix([*question.keys, *used])
    codes, shown = list[str](), list[str]()
    numbers: dict[str, tuple[str, ...]] = {}  # columns with the numbers of an encoded column
    for index, (column, encoding) in enumerate(question.encodings.items()):
        code = f"{prefix}{index}"
        cases = _list_cases(encoding, dialect)
        codes.append(f"CASE {quote(column)} {cases} END AS {quote(code)}")
        if not encoding.is_one_hot:
            numbers[column] = (code,)
            shown.append(quote(code))
            continue
        numbers[column] = tuple(f"{code}_{n}" for n in range(len(encoding.values)))
        shown += [
            f"CASE WHEN {quote(code)} = {n} THEN 1 WHEN {quote(code)} IS NOT NULL THEN 0 END "
            f"AS {quote(name)}"
            for n, name in enumerate(numbers[column])
        ]
    features = dict(question.features)
    for key, given in features.items():
        if not isinstance(given, str) or given in numbers:
            columns = (given,) if isinstance(given, str) else given
            listed = (numbers.get(column, (column,)) for column in columns)
            features[key] = tuple(name for names in listed for name in names)
    inner = f"SELECT {', '.join([*retained, *codes])} FROM {question.source} s"
    source = f"(SELECT {', '.join([*retained, *shown])} FROM ({inner}) s)"
    return replace(question, source=source, features=features, encodings={})


def _list_cases(encoding: ops.Encoding, dialect: type[SqlWriter]) -> str:
    literals = (dialect.text(x) if isinstance(x, str) else str(x).upper() for x in encoding.values)
    return " ".join(f"WHEN {literal} THEN {code}" for code, literal in enumerate(literals))
