"""Models deployed into databases: versions, errors, and failures that leave nothing behind."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import keras
import numpy as np
import psycopg
import pytest
from conftest import full
from databases import ARRAYS, literal, open_duckdb, open_postgres
from threads import Threads

from pybackend import DatabaseError, InputError, deploy_model, undeploy_model
from pybackend.sql.connect import connect
from pybackend.sql.database import Connection
from pybackend.sql.deploy import DatabaseCheck
from pybackend.types import TrainResult

L = keras.layers
NAME = 'd\'igits"; DROP TABLE "pixels"; -- é'
TABLE = 'pix"els; x'
X = np.random.default_rng(2).normal(size=(3, 4)).astype("float32")
SHOWN = {
    "duckdb": "SELECT table_name FROM information_schema.tables",
    "sqlite": "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')",
    "postgresql": "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'",
}


# `make test` deploys to the others where that takes another way.
@pytest.fixture(params=[full("duckdb"), full("sqlite"), "postgresql"])
def con(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A connection to a database with a table of rows."""
    if request.param == "duckdb":
        opened: Any = open_duckdb()
    elif request.param == "sqlite":
        opened = closing(sqlite3.connect(":memory:"))
    else:
        opened = open_postgres()
    with opened as raw:
        fill(raw, request.param)
        yield raw


on_all = pytest.mark.parametrize("con", ["duckdb", "sqlite", "postgresql"], indirect=True)


def fill(con: Any, dialect: str) -> None:
    name = '"' + TABLE.replace('"', '""') + '"'
    con.execute(f"CREATE TABLE {name} (id integer, f {ARRAYS[dialect]})")
    for number, x in enumerate(X):
        con.execute(f"INSERT INTO {name} VALUES ({number}, {literal(dialect, x)})")
    if dialect == "sqlite":
        con.commit()


def build(seed: int, classes: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(classes)]
    return keras.Sequential([*layers, L.Softmax()])


def deploy(con: Any, model: Any, name: str = NAME, **changed: Any) -> Any:
    given = {"table": TABLE, "key": "id", "features": "f", **changed}
    return deploy_model(con, model, name, **given)


def select(con: Any, name: str) -> Any:
    """Return the classes' numbers by a view's name."""
    quoted = '"' + name.replace('"', '""') + '"'
    rows = sorted(con.execute(f"SELECT * FROM {quoted}").fetchall())
    return np.array([row[2:] for row in rows], float)


def list_all(con: Any) -> set[str]:
    """Return the names of all tables and views."""
    return {row[0] for row in connect(con).execute(SHOWN[connect(con).dialect])}


@on_all
def test_versions_come_and_go(con: Any) -> None:
    before = list_all(con)
    models = [build(1), build(2), build(3, classes=2)]
    expected = [model.predict(X, verbose=0) for model in models]
    for number, (model, wanted) in enumerate(zip(models, expected, strict=True), 1):
        made = deploy(con, model)
        assert (made.version, made.view) == (number, f"{NAME}_v{number}")
        assert made.difference < 1e-5
        np.testing.assert_allclose(select(con, NAME), wanted, atol=1e-5)
    undeploy_model(con, NAME, version=3)
    np.testing.assert_allclose(select(con, NAME), expected[1], atol=1e-5)
    undeploy_model(con, NAME, version=1)
    with pytest.raises(InputError, match="no version 1; its versions: 2"):
        undeploy_model(con, NAME, version=1)
    assert deploy(con, models[0]).version == 4
    undeploy_model(con, NAME)
    assert list_all(con) - before == {"tfdist_models"}
    with pytest.raises(InputError, match="no model is deployed under the name"):
        undeploy_model(con, NAME)
    noted = con.execute("SELECT version, action FROM tfdist_models").fetchall()
    deployed = [version for version, action in noted if action == "deploy"]
    assert deployed == [1, 2, 3, 4]
    assert sorted(version for version, action in noted if action == "undeploy") == deployed


def test_a_result_brings_its_categories(con: Any) -> None:
    """Use text and unknown values among numbers, by the column names of the training."""
    con.execute("CREATE TABLE people (id integer, town text, size real)")
    rows = "(0, 'Oslo', 0.5), (1, 'Rome', -1), (2, 'Paris', 1), (3, NULL, 1), (4, 'Rome', NULL)"
    con.execute(f"INSERT INTO people VALUES {rows}")
    getattr(con, "commit", lambda: None)()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    known: Any = {
        "features": ["town", "size"],
        "categories": {"town": ["Oslo", "Rome"]},
        "encode": {"town": "one_hot"},
    }
    result = TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0, decode=lambda _: model, **known)
    deploy_model(con, result, "of_people", table="people", key="id")
    found = sorted(con.execute("SELECT * FROM of_people").fetchall())
    wanted = model.predict(np.array([[1, 0, 0.5], [0, 1, -1]]), verbose=0)
    np.testing.assert_allclose([row[2:] for row in found[:2]], wanted, atol=1e-5)
    assert [value for row in found[2:] for value in row[1:]] == [None] * 9
    getattr(con, "commit", lambda: None)()
    undeploy_model(con, "of_people")
    con.execute("DROP TABLE people")
    getattr(con, "commit", lambda: None)()


def test_a_failure_leaves_nothing(con: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_all(con)
    with pytest.raises(InputError, match=r"`key` cannot be read from (.|\n)*nope"):
        deploy(con, build(1), key="nope")
    with pytest.raises(InputError, match=r"`features` cannot be read from (.|\n)*nope"):
        deploy(con, build(1), features=["id", "id", "nope", "id"])
    with pytest.raises(InputError, match=r"`table` cannot be read: (.|\n)*nope"):
        deploy(con, build(1), table="nope")
    with pytest.raises(InputError, match="UnitNormalization"):
        deploy(con, keras.Sequential([keras.Input((4,)), L.UnitNormalization()]))
    model = build(1)
    monkeypatch.setattr(model, "predict", build(2).predict)  # another model's numbers
    with pytest.raises(DatabaseError, match=r"does not compute what Keras does: .* instead of"):
        deploy(con, model)
    assert list_all(con) == before


def test_what_was_dropped_by_hand_can_be_deployed_and_taken_away(con: Any) -> None:
    before = list_all(con)
    for _ in range(2):
        deploy(con, build(1), name="scores")
        con.execute("DROP VIEW scores")
        getattr(con, "commit", lambda: None)()
    undeploy_model(con, "scores")
    assert list_all(con) - before == {"tfdist_models"}


def test_what_is_there_is_not_replaced(con: Any) -> None:
    con.execute("CREATE TABLE mine (x integer)")
    getattr(con, "commit", lambda: None)()
    before = list_all(con)
    with pytest.raises(DatabaseError, match="mine"):
        deploy(con, build(1), name="mine")
    assert list_all(con) == before


def test_a_failed_deployment_leaves_the_version_before(con: Any) -> None:
    model = build(1)
    deploy(con, model)
    before = list_all(con)
    with pytest.raises(InputError, match="nope"):
        deploy(con, build(2), key="nope")
    assert list_all(con) == before
    np.testing.assert_allclose(select(con, NAME), model.predict(X, verbose=0), atol=1e-5)


def test_a_transaction_of_the_users_is_left_alone(con: Any) -> None:
    con.execute("BEGIN")
    with pytest.raises(InputError, match="in a transaction: commit it"):
        deploy(con, build(1))
    con.execute("ROLLBACK")
    assert deploy(con, build(1)).version == 1


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_a_model_of_whole_numbers_is_tried_with_them(dtype: str) -> None:
    layers = [keras.Input((4,), dtype=dtype), L.Rescaling(1 / 255), L.Dense(2)]
    with open_duckdb() as raw:
        fill(raw, "duckdb")
        assert deploy(raw, keras.Sequential(layers)).difference < 1e-5


def test_columns_that_hold_no_numbers_are_named(con: Any) -> None:
    before = list_all(con)
    con.execute("CREATE TABLE people (id integer, age integer, name varchar(9), f text)")
    con.execute("INSERT INTO people VALUES (1, 30, 'Ada', 'a')")
    getattr(con, "commit", lambda: None)()
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    with pytest.raises(InputError, match=r"'name', which has type .*: encode it"):
        deploy(con, model, table="people", features=["age", "name"])
    array = "age" if isinstance(con, sqlite3.Connection) else "f"
    with pytest.raises(InputError, match=f"'{array}', which has type .*arrays of numbers"):
        deploy(con, model, table="people", features=array)
    assert list_all(con) - before == {"people"}


def test_postgresql_reads_booleans_and_vectors() -> None:
    with open_postgres("pgvector") as raw:
        raw.execute("CREATE TABLE mixed (id integer, a real, b boolean, f boolean[], v vector(2))")
        raw.execute("INSERT INTO mixed VALUES (1, 0.5, true, '{false,true}', '[0.5,1]')")
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
        wanted = model.predict(np.array([[0.5, 1], [0, 1]]), verbose=0)[:, 0]
        for features, number in ((["a", "b"], 0), ("v", 0), ("f", 1)):
            made = deploy(raw, model, table="mixed", features=features, name="scores")
            found = raw.execute(f'SELECT ".pred" FROM {made.view}').fetchone()
            assert found == (pytest.approx(wanted[number], abs=1e-5),)


def test_postgresql_keeps_what_depends_on_a_view() -> None:
    with open_postgres() as raw:
        fill(raw, "postgresql")
        deploy(raw, build(1), name="scores")
        raw.execute('CREATE VIEW best AS SELECT max(".pred_1") FROM scores')
        second = build(2)
        deploy(raw, second, name="scores")
        best = raw.execute("SELECT * FROM best").fetchone()[0]
        assert best == pytest.approx(second.predict(X, verbose=0)[:, 1].max(), abs=1e-5)
        with pytest.raises(DatabaseError, match="best"):
            deploy(raw, build(3), name="scores", type="class")
        with pytest.raises(DatabaseError, match="best"):
            undeploy_model(raw, "scores")
        with pytest.raises(InputError, match="at most 63 bytes"):
            deploy(raw, second, name="n" * 60)
        assert raw.execute("SELECT count(*) FROM scores_v2").fetchone() == (3,)


def test_deployments_into_postgresql_take_turns_and_keep_grants() -> None:
    with open_postgres() as raw, psycopg.connect(raw.info.dsn, autocommit=True) as other:
        fill(raw, "postgresql")
        models = [build(1), build(2)]
        with Threads() as pool:
            made = list(pool.map(lambda c, m: deploy(c, m, name="scores"), (raw, other), models))
        assert sorted(each.version for each in made) == [1, 2]
        raw.execute("CREATE ROLE reader")
        raw.execute("GRANT SELECT ON scores TO reader WITH GRANT OPTION")
        for version in (None, 3):
            if version is None:
                deploy(raw, build(3, classes=2), name="scores")  # with other columns
            else:
                undeploy_model(raw, "scores", version=version)
            asked = "SELECT has_table_privilege('reader', 'scores', 'SELECT WITH GRANT OPTION')"
            assert raw.execute(asked).fetchone() == (True,)
        raw.execute("DROP OWNED BY reader")
        raw.execute("DROP ROLE reader")
        other.close()
        with pytest.raises(InputError, match="is closed"):
            deploy(other, models[0])


@on_all
def test_a_deployment_can_be_interrupted(con: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt with Ctrl-C while the database computes."""
    before = list_all(con)
    many = "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 2000000) "
    many = f"{many} SELECT x FROM c)" if "duckdb" not in str(type(con)) else "range(10000000000000)"
    compare = DatabaseCheck.compare

    def interrupt(trial: DatabaseCheck, database: Connection, question: Any) -> float:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        database.execute(f"SELECT count(*) FROM {many} AS q")
        return compare(trial, database, question)

    monkeypatch.setattr(DatabaseCheck, "compare", interrupt)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            deploy(con, build(1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    monkeypatch.undo()
    assert list_all(con) == before
    assert deploy(con, build(1)).version == 1


@pytest.mark.full
def test_many_weights(con: Any) -> None:
    """Insert in bulk: a statement for each row would take minutes."""
    keras.utils.set_random_seed(4)
    width = 300 if isinstance(con, sqlite3.Connection) else 1500
    model = keras.Sequential([keras.Input((4,)), L.Dense(width, activation="relu"), L.Dense(width)])
    assert deploy(con, model, name="large", type="raw").difference < 1e-5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": ""}, "`name` must be a name"),
        ({"name": 3}, "`name` must be a name"),
        ({"con": "file.db"}, "`con` must be a connection of duckdb, psycopg or sqlite3"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], said: str) -> None:
    with closing(sqlite3.connect(":memory:")) as raw, pytest.raises(InputError, match=said):
        deploy(**{"con": raw, "model": build(1), **given})
    with closing(sqlite3.connect(":memory:")) as raw, pytest.raises(InputError, match="`version`"):
        undeploy_model(raw, "x", version=True)
