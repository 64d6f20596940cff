"""Calls in a typed program: mypy accepts the right ones, and finds each mistake.

mypy reports an ignored error that does not exist, so each line below must have one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import pybackend as tfdist


def accepted(model: object, session: object) -> None:
    rows = np.zeros((8, 2)), np.zeros(8)
    result = tfdist.barrier_train(
        "local", model, rows, shuffle="global", exchange=tfdist.Exchange(scale_lr="sqrt")
    )
    tfdist.barrier_train(session, result, rows, shuffle=False, features={"in": "a"}, label=None)
    tfdist.barrier_train(None, model, "rows/*.parquet", data_options=tfdist.DataOptions())
    kept = tfdist.Recovery(Path("kept"), every="10min")
    tfdist.barrier_train(
        None, model, rows, recovery=kept, model_options=tfdist.ModelOptions(uri=Path("model.h5"))
    )
    tfdist.barrier_evaluate("local", result, rows, features=("a", "b"))
    tfdist.barrier_predict("local", result, rows[0], on_missing="error")
    result.predict(rows[0], type="prob")
    tfdist.to_sql(result, "duckdb", table="t", key="id", encode={"a": "one_hot"})
    tfdist.bench_scale("train.py", [1, 2], mode="weak")
    tfdist.plan("local", model, rows, workers=2)
    tfdist.train_mnist("local", workers=3)


def mistaken(model: object) -> None:
    rows = np.zeros((8, 2)), np.zeros(8)
    result = tfdist.barrier_train("local", model, rows, exchange=tfdist.Exchange(scale_lr="liner"))  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, rows, shuffle="globl")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, rows, exchange="ps")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, rows, epoch=3)  # type: ignore[call-arg]
    tfdist.barrier_train("local", model, rows, workers="2")  # type: ignore[arg-type]
    tfdist.barrier_predict("local", result, rows, on_missing="nan")  # type: ignore[arg-type]
    result.predict(rows[0], type="probs")  # type: ignore[arg-type]
    tfdist.DataOptions(encode="onehot")  # type: ignore[arg-type]
    tfdist.Exchange(transport="udp")  # type: ignore[arg-type]
    tfdist.to_sql(result, "mysql", table="t", key="id")  # type: ignore[arg-type]
    tfdist.bench_scale("train.py", mode="srong")  # type: ignore[arg-type]
    tfdist.plan("local", model, rows, epochs="2")  # type: ignore[arg-type]
    tfdist.train_mnist("local", worker=3)  # type: ignore[call-arg]
