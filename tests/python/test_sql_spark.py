"""Models as Spark SQL: predictions without Python on executors, and deployments into a catalog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from conftest import shared_spark
from databases import numbers_of
from replicas import named
from sql_models import OPERATIONS, make

from pybackend import InputError, deploy_model, to_sql, undeploy_model
from pybackend.core.model.inputs_outputs import name_inputs
from pybackend.sql.connect import connect
from pybackend.sql.deploy import Registry

L = keras.layers


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session:
        yield session


# Each query takes Spark seconds to prepare.
DAILY = ("functions", "long memory", "words")


@pytest.mark.parametrize("name", named(OPERATIONS, DAILY))
def test_spark_computes_what_keras_does(spark: Any, name: str) -> None:
    model, inputs, outputs = make(name)
    key = "p0" if name == "words" else "id"  # a name that queries give to weights
    rows = [(n, *(x[n].ravel().tolist() for x in inputs)) for n in range(len(inputs[0]))]
    kind = "bigint" if name == "words" else "double"
    columns = ", ".join(f"f{n} array<{kind}>" for n in range(len(inputs)))
    spark.createDataFrame(rows, f"{key} int, {columns}").createOrReplaceTempView("sql_rows")
    features: Any = {name: f"f{n}" for n, name in enumerate(name_inputs(model))}
    made = to_sql(
        model, "spark", table="sql_rows", key=key, features=features, type="raw", weights="sql_once"
    )
    connect(spark).create_weights("sql_once", made.parts)
    try:
        found = sorted(spark.sql(made.query).collect())
    finally:
        spark.sql("DROP TABLE sql_once")
    for number, row in enumerate(found):
        for got, wanted in zip(row[1:], outputs, strict=True):
            np.testing.assert_allclose(
                numbers_of(got), wanted[number].ravel(), rtol=1e-4, atol=2e-5
            )


X = np.random.default_rng(2).normal(size=(3, 4))


def build(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), L.Dense(3, activation="softmax")])


def select(spark: Any, name: str) -> Any:
    rows = sorted(spark.sql(f"SELECT * FROM {name}").collect())
    return np.array([row[2:] for row in rows if row[1] is not None], float)


def list_all(spark: Any) -> set[str]:
    return {row.tableName for row in spark.sql("SHOW TABLES").collect() if not row.isTemporary}


@pytest.mark.full
def test_a_model_is_deployed_into_the_catalog(spark: Any) -> None:
    rows = [(n, x.tolist()) for n, x in enumerate(X)]
    odd = [(3, None), (4, [1.0, 2.0]), (5, [1.0, None, 2.0, 3.0])]
    table = "rows_of_mine"
    spark.createDataFrame([*rows, *odd], "id int, f array<double>").write.saveAsTable(table)
    given = {"table": table, "key": "id", "features": "f"}
    before = list_all(spark)
    models = [build(1), build(2)]
    levels = ["o'ne", "t`wo", "thr\\ee"]
    try:
        for number, model in enumerate(models, 1):
            made = deploy_model(spark, model, "scores", **given, levels=levels)
            assert (made.version, made.view) == (number, f"scores_v{number}")
            wanted = model.predict(X, verbose=0)
            np.testing.assert_allclose(select(spark, "scores"), wanted, atol=1e-5)
            classes = [row[1] for row in spark.sql("SELECT * FROM scores ORDER BY id").collect()]
            assert classes == [*(levels[n] for n in wanted.argmax(axis=1)), None, None, None]
        deployed = list_all(spark)
        spark.table(table).createOrReplaceTempView("passing")
        for changed, said in (
            ({"key": "nope"}, "`key`: .* has no column 'nope'; it has 'id', 'f'"),
            ({"features": "nope"}, "`features`: .* has no column 'nope'"),
            ({"table": "nope"}, "`table`: Spark has no table or view `nope`"),
            ({"table": "passing"}, "`table`: `passing` is a temporary view"),
        ):
            with pytest.raises(InputError, match=said):
                deploy_model(spark, build(3), "scores", **{**given, **changed})
        taken = f"`name`: a table or view `{table}` already exists in Spark"
        with pytest.raises(InputError, match=taken):
            deploy_model(spark, build(3), table, **given)
        assert list_all(spark) == deployed
        undeploy_model(spark, "scores", version=2)
        wanted = models[0].predict(X, verbose=0)
        np.testing.assert_allclose(select(spark, "scores"), wanted, atol=1e-5)
        undeploy_model(spark, "scores")
        assert list_all(spark) - before == {"tfdist_models"}
    finally:
        for name in (table, "tfdist_models"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")


def test_spark_encodes_categories(spark: Any) -> None:
    towns = ["o'slo", "${env:PATH}"]
    rows = [(0, 0.5, towns[0]), (1, -1.0, towns[1]), (2, 1.0, "Rome"), (3, 1.0, None)]
    spark.createDataFrame(rows, "id int, size double, town string").createOrReplaceTempView(
        "people"
    )
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    made = to_sql(
        model,
        "spark",
        table="people",
        key="id",
        features=["size", "town"],
        categories={"town": towns},
        encode="one_hot",
        weights="sql_w",
    )
    connect(spark).keep_weights("`sql_w`", made.parts)
    found = [row[1] for row in sorted(spark.sql(made.query).collect())]
    wanted = model.predict(np.array([[0.5, 1, 0], [-1, 0, 1]]), verbose=0)[:, 0]
    np.testing.assert_allclose(found[:2], wanted, atol=1e-5)
    assert found[2:] == [None, None]


@pytest.mark.parametrize("are_raw", ["false", "true"])
def test_spark_replaces_nothing_in_names_of_classes(spark: Any, are_raw: str) -> None:
    """Spark replaces variables in SQL, which would show the environment of a view's reader."""
    rows = [(n, x.tolist()) for n, x in enumerate(X)]
    spark.createDataFrame(rows, "id int, f array<double>").createOrReplaceTempView("substituted")
    levels = ["${env:PATH}", "$${system:user.name}", "a\\n'b"]
    model = build(1)
    model.set_weights([10 * np.eye(4, 3), np.zeros(3)])  # all classes are predicted
    given = {"table": "substituted", "key": "id", "features": "f", "levels": levels}
    made = to_sql(model, "spark", type="class", weights="sql_w", **given)
    connect(spark).keep_weights("`sql_w`", made.parts)
    setting = "spark.sql.parser.escapedStringLiterals"
    spark.conf.set(setting, are_raw)
    try:
        found = {row[0]: row[1] for row in spark.sql(made.query).collect()}
    finally:
        spark.conf.unset(setting)
    assert [found[n] for n in range(3)] == [levels[n] for n in X[:, :3].argmax(axis=1)]
    for changed in ({"key": "${env:PATH}"}, {"type": "prob"}):
        with pytest.raises(InputError, match=r"Spark SQL replaces .*: rename '.*env:PATH}'"):
            to_sql(model, "spark", **{**given, **changed})


@pytest.mark.full
def test_a_failure_at_the_end_puts_the_version_before_back(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark has no transactions."""
    rows = [(n, x.tolist()) for n, x in enumerate(X)]
    spark.createDataFrame(rows, "id int, f array<double>").write.saveAsTable("rows")
    given = {"table": "rows", "key": "id", "features": "f"}
    model = build(1)
    try:
        deploy_model(spark, model, "scores", **given)
        before = list_all(spark)

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Registry, "add", fail)
            with pytest.raises(KeyboardInterrupt):
                deploy_model(spark, build(2), "scores", **given)
        assert list_all(spark) == before
        wanted = model.predict(X, verbose=0)
        np.testing.assert_allclose(select(spark, "scores"), wanted, atol=1e-5)
        undeploy_model(spark, "scores")
    finally:
        for name in ("rows", "tfdist_models"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
