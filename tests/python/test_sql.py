"""Models as SQL: databases compute the same as Keras, also for unusual rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import sqlglot
from databases import ARRAYS, literal, numbers_of, open_duckdb, open_postgres
from replicas import named
from sql_models import MODELS, OPERATIONS, make

from pybackend import InputError, to_sql
from pybackend.core.api.train_result import TrainResult
from pybackend.core.model.inputs_outputs import name_inputs
from pybackend.sql.builder import FUNCTIONS
from pybackend.sql.compile import DIALECTS as DIALECTS_OF
from pybackend.sql.compile import answer
from pybackend.sql.connect import connect
from pybackend.sql.database import Connection
from pybackend.sql.lower import lower_model
from pybackend.sql.operations import Question, Shown, simplify
from pybackend.sql.oracle import OracleWriter

L = keras.layers
DIALECTS = ["duckdb", "sqlite", "postgresql", "pgvector"]


@pytest.fixture(scope="module", params=DIALECTS)
def database(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A connection of each kind; objects that tests create have unique names."""
    if request.param == "sqlite":
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as raw:
            yield connect(raw)
        return
    opened = open_duckdb() if request.param == "duckdb" else open_postgres(request.param)
    with opened as raw:
        yield connect(raw)


def fill(database: Connection, columns: dict[str, str], rows: list[list[str]]) -> str:
    """Create a table with a new name from SQL values; return its name."""
    fill.count = getattr(fill, "count", 0) + 1
    name = f"rows{fill.count}"
    listed = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
    database.execute(f"CREATE TABLE {name} ({listed})")
    for row in rows:
        database.execute(f"INSERT INTO {name} VALUES ({', '.join(row)})")
    return name


def compute(database: Connection, model: Any, table: str, **arguments: Any) -> list[Any]:
    """Return the query's result, in the order of the key ``id``."""
    weights = f"{table}_weights"
    given = {"table": table, "key": "id", "features": "f", **arguments}
    with database.transaction():
        made = to_sql(
            model, database.dialect, weights=weights, has_vectors=database.has_vectors, **given
        )
        database.create_weights(weights, made.parts)
        return sorted(database.execute(made.query), key=lambda row: row[0])


def fill_arrays(database: Connection, inputs: list[Any]) -> str:
    """Create a table with an array for each input: columns f, f1, f2, ..."""
    kind = ARRAYS[database.dialect]
    names = ["f", *(f"f{n}" for n in range(1, len(inputs)))]
    rows = [
        [str(number), *(literal(database.dialect, x[number]) for x in inputs)]
        for number in range(len(inputs[0]))
    ]
    return fill(database, {"id": "integer", **dict.fromkeys(names, kind)}, rows)


@pytest.mark.parametrize("name", named(MODELS, [*OPERATIONS, "dense", "large numbers"]))
def test_a_database_computes_what_keras_does(database: Connection, name: str) -> None:
    model, inputs, outputs = make(name)
    table = fill_arrays(database, inputs)
    features: Any = "f"
    if len(inputs) > 1:
        features = {name: f"f{n}" if n else "f" for n, name in enumerate(name_inputs(model))}
    found = compute(database, model, table, features=features, type="raw")
    for number, row in enumerate(found):
        for got, wanted in zip(row[1:], outputs, strict=True):
            np.testing.assert_allclose(
                numbers_of(got), wanted[number].ravel(), rtol=1e-4, atol=2e-5
            )


@pytest.fixture(scope="module")
def classifier() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), L.Dense(4, activation="relu"), L.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def result_of(model: Any, **known: Any) -> TrainResult:
    """Return the result of a training of this model."""
    return TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0, decode=lambda _: model, **known)


TOWNS = ["o'slo", "$\\{x}&", "Rome"]
KNOWN: dict[str, Any] = {
    "features": ["size", "town", "grade"],
    "categories": {"town": TOWNS, "grade": [7, 2], "label": ["no", "yes"]},
    "encode": {"town": "one_hot", "grade": "integer"},
}
# Whether the last two rows are complete: NULL, and a value outside the categories.
PEOPLE = [
    (0.5, TOWNS[0], 2),
    (-1.0, TOWNS[1], 7),
    (2.0, TOWNS[2], 2),
    (None, TOWNS[0], 2),
    (1.0, None, 7),
    (1.0, "Paris", 7),
    (1.0, TOWNS[0], 3),
]


def encode_people() -> Any:
    """Return the values of a training for the complete rows."""
    rows = [[s, *(town == t for t in TOWNS), [7, 2].index(g)] for s, town, g in PEOPLE[:3]]
    return np.array(rows, "float32")


def fill_people(database: Connection) -> str:
    quote = DIALECTS_OF[database.dialect].text
    rows = [
        [
            str(n),
            *("NULL" if v is None else quote(v) if isinstance(v, str) else str(v) for v in row),
        ]
        for n, row in enumerate(PEOPLE)
    ]
    kinds = {"id": "integer", "size": "real", "town": database.text_type, "grade": "integer"}
    return fill(database, kinds, rows)


def build_of_categories() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((5,)), L.Dense(4, activation="tanh"), L.Dense(2)])


def test_categories_are_encoded_as_in_the_training(database: Connection) -> None:
    model = build_of_categories()
    wanted = model.predict(encode_people(), verbose=0)
    for given in (
        compute(database, model, fill_people(database), type="raw", **KNOWN),
        compute(
            database, result_of(model, **KNOWN), fill_people(database), type="raw", features=None
        ),
    ):
        found = [np.array(numbers_of(row[1])) for row in given[:3]]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
        assert all(row[1] is None for row in given[3:])


def test_a_column_of_codes_may_be_an_input_by_itself(database: Connection) -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int32"), L.Embedding(3, 2), L.Flatten()])
    found = compute(
        database,
        model,
        fill_people(database),
        features="town",
        categories={"town": TOWNS},
        type="raw",
    )
    wanted = model.predict(np.array([[0], [1], [2], [0]]), verbose=0)
    numbers = [np.array(numbers_of(row[1])) for row in found[:4]]
    np.testing.assert_allclose(numbers, wanted, atol=1e-6)
    assert [row[1] is None for row in found[4:]] == [True, True, False]
    with pytest.raises(InputError, match="`features` has 3 columns for the input"):
        to_sql(
            model,
            database.dialect,
            table="t",
            key="id",
            features=["town"],
            categories={"town": TOWNS},
            encode="one_hot",
        )


def test_oracle_encodes_categories() -> None:
    model = keras.Sequential([*build_of_categories().layers, L.Dense(1)])
    wanted = model.predict(encode_people(), verbose=0)
    with open_duckdb() as raw:
        database = connect(raw)
        table = fill_people(database)
        made = to_sql(model, "oracle", table=table, key="id", type="raw", weights="w", **KNOWN)
        raw.execute("CREATE TABLE w (part VARCHAR, i INTEGER, o INTEGER, x DOUBLE)")
        raw.executemany("INSERT INTO w VALUES (?, ?, ?, ?)", list(made.rows()))
        found = sorted(raw.execute(translate(made.query)).fetchall())
    np.testing.assert_allclose([row[1] for row in found[:3]], wanted[:, 0], atol=2e-5)
    assert [row[1] for row in found[3:]] == [None] * 4


def softmax(scores: Any) -> Any:
    return keras.ops.convert_to_numpy(keras.ops.softmax(scores))


X = np.random.default_rng(2).normal(size=(4, 3)).astype("float32")


def test_classes_have_their_names_and_numbers(database: Connection, classifier: Any) -> None:
    scores = classifier.predict(X, verbose=0)
    levels = ["o'ne", 't"wo', "thr\\ee é"]
    found = compute(database, classifier, fill_arrays(database, [X]), levels=levels)
    assert [row[1] for row in found] == [levels[place] for place in scores.argmax(axis=1)]
    np.testing.assert_allclose([row[2:] for row in found], softmax(scores), atol=1e-5)
    found = compute(database, classifier, fill_arrays(database, [X]), type="class")
    assert [row[1:] for row in found] == [(place,) for place in scores.argmax(axis=1)]


def test_one_probability_is_that_of_the_second_class(database: Connection) -> None:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy")
    second = model.predict(X, verbose=0)[:, 0]
    found = compute(database, model, fill_arrays(database, [X]), levels=["no", "yes"])
    assert [row[1] for row in found] == ["yes" if p > 0.5 else "no" for p in second]
    np.testing.assert_allclose([row[2:] for row in found], np.c_[1 - second, second], atol=1e-6)
    model.layers[-1].activation = keras.activations.linear
    logits = keras.Sequential([keras.Input((3,)), model.layers[-1]])
    logits.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    found = compute(database, logits, fill_arrays(database, [X]), type="prob")
    np.testing.assert_allclose([row[1:] for row in found], np.c_[1 - second, second], atol=1e-6)


def test_rows_without_all_numbers_have_no_prediction(database: Connection, classifier: Any) -> None:
    scores = classifier.predict(X, verbose=0)
    kind = ARRAYS[database.dialect]
    whole = literal(database.dialect, [1.0, 2.0, 3.0])
    holed, infinite = whole.replace("2.0", "null"), whole.replace("2.0", "9e999")
    large = whole.replace("2.0", "-1e39")
    if database.dialect != "sqlite":
        kind = "double precision[]"
        infinite = whole.replace("2.0", "CAST('nan' AS double precision)")
    arrays = [literal(database.dialect, x) for x in (X[0], [1.0, 2.0], X[1])]
    listed = [*arrays, "NULL", holed, infinite, large]
    rows = [[str(n), array] for n, array in enumerate(listed)]
    table = fill(database, {"id": "integer", "f": kind}, rows)
    found = compute(database, classifier, table)
    classes = [scores[0].argmax(), None, scores[1].argmax(), *[None] * 4]
    assert [row[1] for row in found] == classes
    assert all(value is None for row in found if row[1] is None for value in row[1:])


def test_features_may_be_columns_of_their_own(database: Connection, classifier: Any) -> None:
    scores = classifier.predict(X, verbose=0)
    names = ["value", 'q"q', "; DROP TABLE x; --"]
    columns = {"id": "integer", **{name.replace('"', '""'): "real" for name in names}}
    rows = [[str(n), *map(repr, map(float, x))] for n, x in enumerate(X)]
    table = fill(database, columns, [*rows, ["4", "1.0", "NULL", "2.0"]])
    found = compute(database, classifier, table, features=names, type="prob")
    np.testing.assert_allclose([row[1:] for row in found[:4]], softmax(scores), atol=1e-5)
    assert found[4][1:] == (None, None, None)


def test_the_query_may_be_part_of_another(database: Connection, classifier: Any) -> None:
    table = fill_arrays(database, [X])
    weights = f"{table}_weights"
    with database.transaction():
        made = to_sql(
            classifier, database.dialect, table=table, key="id", features="f", weights=weights
        )
        database.create_weights(weights, made.parts)
        one = database.execute(f"SELECT * FROM ({made.query}) AS q WHERE id = 2")
    expected = softmax(classifier.predict(X[2:3], verbose=0))[0]
    np.testing.assert_allclose(one[0][2:], expected, atol=1e-5)


@pytest.mark.parametrize("name", named(OPERATIONS, ["functions"]))
def test_oracles_text_computes_what_keras_does(name: str) -> None:
    """Without an Oracle, its SQL is parsed, and a translation's result in DuckDB compared."""
    model, inputs, outputs = make(name)
    features = {
        name: [f"f{number}_{place}" for place in range(x[0].size)]
        for number, (name, x) in enumerate(zip(name_inputs(model), inputs, strict=True))
    }
    # A number for each column: SQL without arrays has no other features.
    graph = simplify(lower_model(model))
    shown = [
        Shown(f"x{number}_{place}", number, place)
        for number, output in enumerate(outputs)
        for place in range(output[0].size)
    ]
    columns = {name: tuple(given) for name, given in features.items()}
    question = Question(graph, "given", ("id",), columns, tuple(shown), "model_weights")
    made = answer("oracle", question, has_vectors=False)
    with open_duckdb() as raw:
        listed = ", ".join(f"{name} double" for given in features.values() for name in given)
        raw.execute(f"CREATE TABLE given (id integer, {listed})")
        for number in range(len(inputs[0])):
            row = [number, *(float(value) for x in inputs for value in x[number].ravel())]
            raw.execute(f"INSERT INTO given VALUES ({', '.join('?' * len(row))})", row)
        row[:2] = [99, None]
        raw.execute(f"INSERT INTO given VALUES ({', '.join('?' * len(row))})", row)
        raw.execute("CREATE TABLE model_weights (part text, i integer, o integer, x double)")
        for part in made.parts:
            rows = [[part.name, *row] for row in part.numbers.tolist()]
            raw.executemany("INSERT INTO model_weights VALUES (?, ?, ?, ?)", rows)
        found = sorted(raw.execute(translate(made.query)).fetchall())
    wanted = np.concatenate([output.reshape(len(output), -1) for output in outputs], axis=1)
    assert found.pop() == (99, *[None] * len(shown))
    np.testing.assert_allclose([row[1:] for row in found], wanted, rtol=1e-4, atol=2e-5)


def translate(query: str) -> str:
    """Return Oracle's SQL, which must be a valid query, as DuckDB's."""
    (parsed,) = sqlglot.parse(query, dialect="oracle")
    assert isinstance(parsed, sqlglot.exp.Select)
    return parsed.sql(dialect="duckdb")


def test_oracle_has_a_package_with_init_and_score(classifier: Any) -> None:
    given = {"table": "t", "features": ["a", "b", "c"], "levels": ["x", "y", "z"]}
    made = to_sql(classifier, "oracle", key="id", **given)
    script = made.package("digits")
    assert f"IF found <> {len(list(made.rows()))} THEN" in script
    assert "FUNCTION score(p_key IN VARCHAR2) RETURN VARCHAR2" in script
    chosen = script[script.index('SELECT ".pred_class" INTO') : script.index('WHERE "id"')]
    translate(chosen.replace(" INTO result", ""))
    with pytest.raises(InputError, match="must be a list of columns"):
        to_sql(classifier, "oracle", key="id", table="t", features="f")
    for key in ('i"d', "R&D", "i\n/\nd"):
        with pytest.raises(InputError, match="cannot contain double quotes"):
            to_sql(classifier, "oracle", key=key, **given)
    with pytest.raises(InputError, match="a single-column `key`"):
        to_sql(classifier, "oracle", key=["id", "day"], **given).package("digits")
    with pytest.raises(InputError, match="only supports dialect='oracle', not 'duckdb'"):
        to_sql(classifier, "duckdb", key="id", **given).package("digits")


def test_what_oracles_clients_read_is_not_in_text() -> None:
    """They ask for the value of `&name`, and end a statement at an empty line or a slash."""
    level = "R&D\n/\n\n.'it"
    written = OracleWriter.text(level)
    assert "&" not in written
    assert written.isprintable()
    with open_duckdb() as raw:
        assert raw.execute(translate(f"SELECT {written}")).fetchone() == (level,)


def build(*layers: Any, shape: tuple[int | None, ...] = (3,)) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


def own(x: Any) -> Any:
    return x


class Twice(L.Dense):
    def call(self, x: Any, training: Any = None) -> Any:
        return 2 * super().call(x)


class Stack(keras.Sequential):
    def call(self, x: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(x)


def connect_layers(make_output: Any, shape: tuple[int, ...] = (3,), dtype: str = "float32") -> Any:
    tensor = keras.Input(shape, dtype=dtype)
    return keras.Model(tensor, make_output(tensor))


@pytest.mark.parametrize(
    ("make_model", "said"),
    [
        (
            lambda: build(L.UnitNormalization(name="n")),
            "'n' .UnitNormalization. cannot be converted",
        ),
        (lambda: build(L.LayerNormalization(axis=1), shape=(3, 2)), "axis=.*not the last"),
        (
            lambda: build(L.Dense(2, activation="sparsemax")),
            "'sparsemax' is not supported; supported are",
        ),
        (lambda: build(L.Dense(2, activation=own)), "'own' is not one of Keras's"),
        (lambda: build(L.Dense(2, dtype="float16")), "computes in float16"),
        (lambda: build(L.Embedding(5, 2, mask_zero=True)), "mask_zero"),
        (lambda: build(L.GRU(2, return_state=True), shape=(4, 2)), "return_state"),
        (lambda: build(L.Conv2D(2, 2, data_format="channels_first"), shape=(4, 4, 2)), "channels"),
        (lambda: build(L.Softmax(axis=1), shape=(4, 2)), "over the axis 1"),
        (lambda: build(L.Dense(2), shape=(None, 2)), "its sizes must be known"),
        (lambda: build(L.TimeDistributed(Twice(2)), shape=(4, 3)), "only Dense is supported"),
        (lambda: Stack([keras.Input((3,)), L.Dense(2)]), "defines its own `call`"),
        (
            lambda: build(L.GRU(2, recurrent_activation="softmax"), shape=(4, 2)),
            "recurrent_activation='softmax'",
        ),
        (
            lambda: build(L.Dense(2, activation=partial(own))),
            "'partial' is not one of Keras's",
        ),
        (
            lambda: connect_layers(lambda x: L.Add()([x, np.ones((1, 3))])),
            "constants in addition to",
        ),
        (lambda: connect_layers(lambda x: L.Dropout(0.5)(x, training=True)), "training=True"),
        (lambda: connect_layers(lambda x: L.Concatenate(axis=0)([x, x])), "it joins rows"),
        (lambda: connect_layers(L.Dense(2), dtype="float16"), "has the dtype float16"),
        (
            lambda: connect_layers(
                lambda x: L.GRU(2)(x, initial_state=L.GlobalMaxPooling1D()(x)), (4, 2)
            ),
            "numbers for `initial_state`",
        ),
        (lambda: build(L.TimeDistributed(L.Conv1D(2, 2)), shape=(3, 4, 2)), "only Dense"),
        (lambda: keras.Sequential([L.Dense(2)]), "shape is not known"),
    ],
)
def test_what_cannot_become_sql_is_refused_by_name(make_model: Any, said: str) -> None:
    model = make_model()
    for dialect in ("duckdb", "postgresql", "sqlite", "spark"):
        with pytest.raises(InputError, match=said):
            to_sql(model, dialect, table="t", key="id", features="f")


@pytest.mark.parametrize(
    ("make_model", "said"),
    [
        (
            lambda: build(L.GRU(2, name="long"), shape=(90, 2)),
            "'long' .* nested queries, but at most",
        ),
        (
            lambda: build(L.Conv2D(80, 3, name="wide", activation="relu"), shape=(4, 4, 64)),
            "'wide' .* 46080 of its products would be written out",
        ),
    ],
)
def test_queries_that_duckdb_would_not_take_are_refused(make_model: Any, said: str) -> None:
    given = {"table": "t", "key": "id", "features": "f"}
    with pytest.raises(InputError, match=said):
        to_sql(make_model(), "duckdb", **given)
    assert len(to_sql(make_model(), "postgresql", **given).query) < 20_000


def test_a_layer_of_a_class_of_its_own_is_refused() -> None:
    class Dense(L.Dense):
        pass

    with pytest.raises(InputError, match="Dense is not a class of"):
        to_sql(build(Dense(2)), "duckdb", table="t", key="id", features="f")


def test_outputs_of_one_name_are_counted() -> None:
    tensor = keras.Input((3,))
    inner = keras.Model(tensor, [L.Dense(1)(tensor), L.Dense(2)(tensor)], name="inner")
    last = L.Dense(1, name="inner_1")(tensor)
    model = keras.Model(tensor, [*inner(tensor), last])
    made = to_sql(model, "duckdb", table="t", key="id", features="f")
    assert made.shown == (".pred_inner_2", ".pred_inner_3", ".pred_inner_1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dialect": "mysql"}, "`dialect` must be one of 'duckdb', 'postgresql'"),
        ({"table": ""}, "`table` must be a name"),
        ({"table": ["a", "b\0"]}, "`table` must be a name"),
        ({"key": ["id", "ID"]}, "`key` must be the names of different columns"),
        ({"key": ".pred_class"}, "two columns named '.pred_class'"),
        ({"key": "k" * 64, "dialect": "postgresql"}, "at most 63 bytes"),
        ({"levels": ["a", "b", "ä" * 30], "dialect": "postgresql"}, "at most 63 bytes"),
        ({"levels": ["a", "A", "b"]}, "two columns named '.pred_a'"),
        ({"levels": ["a", "b"]}, "`levels` has 2 names, but the model has 3 classes"),
        ({"features": ["a", "b"]}, "2 columns for the input .*, which takes 3 numbers"),
        ({"features": {"other": "f"}}, "`features` has the inputs 'other'"),
        ({"features": None}, "`features` is needed"),
        ({"type": "probability"}, "`type` must be"),
        ({"weights": ""}, "`weights` must be a name"),
        ({"model": 3}, "`model` must be a Keras 3 model or a TrainResult"),
    ],
)
def test_wrong_arguments_are_named(classifier: Any, given: dict[str, Any], said: str) -> None:
    right = {"dialect": "duckdb", "table": "t", "key": "id", "features": "f", "model": classifier}
    with pytest.raises(InputError, match=said):
        to_sql(**{**right, **given})


def test_all_functions_are_those_of_keras() -> None:
    assert all(keras.activations.get(name) for name in FUNCTIONS)


def test_what_is_no_connection_is_refused() -> None:
    with pytest.raises(InputError, match="connection of duckdb, psycopg or sqlite3"):
        connect(object())


def test_arrays_of_postgresql_may_have_dimensions_and_begin_anywhere() -> None:
    model = build(L.Reshape((3, 1)), L.Cropping1D((1, 0)), L.Flatten(), L.Dense(2))
    with open_postgres() as raw:
        database = connect(raw)
        arrays = ["ARRAY[[1, 2, 3]]", "'[0:2]={1,2,3}'", "ARRAY[1, 2, 3]"]
        rows = [[str(n), array] for n, array in enumerate(arrays)]
        table = fill(database, {"id": "integer", "f": "real[]"}, rows)
        found = compute(database, model, table, type="raw")
    wanted = model.predict(np.array([[1, 2, 3]]), verbose=0)[0]
    for row in found:
        np.testing.assert_allclose(row[1], wanted, atol=1e-6)
