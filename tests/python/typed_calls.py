"""Calls in a typed program: mypy accepts the right ones, and finds each mistake.

mypy reports an ignored error that does not exist, so each line below must have one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import pybackend as tfdist
from pybackend.types import DetachedJob, TrainResult, WorkerContext

ROWS = np.zeros((8, 2)), np.zeros(8)


def work(context: WorkerContext, rate: float) -> int:
    return context.rank


def accepted(model: object, build: Any, session: Any, study: Any) -> None:
    result = tfdist.barrier_train("local", model, ROWS, shuffle="global", workers=2)
    scaled = tfdist.Exchange(scale_lr="sqrt")
    tfdist.barrier_train(session, result, ROWS, shuffle=False, features={"in": "a"}, label=None)
    tfdist.barrier_train(tfdist.hosts("a:2"), model, ROWS, exchange=scaled, epochs=2)
    tfdist.barrier_train(None, model, "rows/*.parquet", data_options=tfdist.DataOptions())
    saved = tfdist.Recovery(Path("kept"), every="10min", restarts=2)
    options = tfdist.ModelOptions(Path("model.h5"))
    tfdist.barrier_train(None, model, ROWS, recovery=saved, model_options=options)
    tfdist.barrier_train(None, model, ROWS, workers=tfdist.Elastic(2, max=4), recovery="kept")
    tfdist.barrier_train(None, model, ROWS, callbacks=[tfdist.track_tensorboard()])
    job: DetachedJob = tfdist.submit_training("local", model, ROWS, epochs=50, seed=1)
    later: TrainResult = job.result()
    print(job.id, job.status, later.history)
    tfdist.submit_training("local", model, ROWS, folder="s3://bucket/jobs")
    tfdist.barrier_evaluate("local", result, ROWS, features=("a", "b"))
    tfdist.barrier_predict("local", result, ROWS[0], on_missing="error", timeout=9)
    result.predict(ROWS[0], type="prob")
    tfdist.to_sql(result, "duckdb", table="t", key="id", encode={"a": "one_hot"})
    tfdist.bench_scale("train.py", [1, 2], mode="weak")
    tfdist.plan("local", model, ROWS, workers=2, submit=True)
    tfdist.train_mnist("local", workers=3)
    trials = tfdist.train_many("local", build, ROWS, grid={"units": [1, 2]}, exchange=None)
    tfdist.train_many("local", build, ROWS, grid=[{"units": 1}], metric="loss", mode="min")
    tfdist.train_many("local", build, ROWS, grid={"units": object()}, study=study, trials=3)
    print(trials.best().model)
    tfdist.barrier_run("local", work, 0.1, workers=2)
    content = tfdist.save_model(model, None, format="keras")
    tfdist.load_model(content, compile=False)
    tfdist.load_model(tfdist.save_model(model, "model.h5"))


def mistaken(model: object, build: Any) -> None:
    # The first argument, and names.
    tfdist.barrier_train("sprak", model, ROWS)  # type: ignore[arg-type]
    tfdist.barrier_run("sprak", work, 0.1)  # type: ignore[arg-type]
    tfdist.train_many("lokal", build, ROWS, grid={"units": [1]})  # type: ignore[arg-type]
    tfdist.barrier_trian("local", model, ROWS)  # type: ignore[attr-defined]
    tfdist.barrier_train("local", model, ROWS, epoch=3)  # type: ignore[call-arg]
    tfdist.submit_training("local", model, ROWS, detach=True)  # type: ignore[call-arg]
    tfdist.train_many("local", build, ROWS, grid=[{}], trial=3)  # type: ignore[call-arg]
    tfdist.train_mnist("local", worker=3)  # type: ignore[call-arg]
    tfdist.Exchange(scale_rl="sqrt")  # type: ignore[call-arg]
    # Types of options.
    tfdist.barrier_train("local", model, ROWS, workers="2")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, batch_size=0.5)  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, shuffle="globl")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, features="a", seed="1")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, class_weight=[1, 2])  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, validation_freq="1")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, exchange="ps")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, recovery=3)  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, model_options="m.h5")  # type: ignore[arg-type]
    tfdist.barrier_train("local", model, ROWS, resources={"cpus": 2})  # type: ignore[arg-type]
    tfdist.plan("local", model, ROWS, epochs="2")  # type: ignore[arg-type]
    tfdist.train_many("local", build, ROWS, grid="units")  # type: ignore[arg-type]
    tfdist.train_many("local", build, ROWS, grid=[{}], mode="least")  # type: ignore[arg-type]
    tfdist.barrier_predict("local", model, ROWS, on_missing="nan")  # type: ignore[arg-type]
    tfdist.barrier_evaluate("local", model, ROWS, timeout="1m")  # type: ignore[arg-type]
    tfdist.barrier_run("local", work, 0.1, workers="2")  # type: ignore[arg-type]
    tfdist.barrier_run("local", 3)  # type: ignore[arg-type]
    # Options of classes.
    tfdist.Recovery("kept", every=2.5)  # type: ignore[arg-type]
    tfdist.Recovery("kept", restarts="3")  # type: ignore[arg-type]
    tfdist.Exchange(transport="udp")  # type: ignore[arg-type]
    tfdist.Exchange(scale_lr="liner")  # type: ignore[arg-type]
    tfdist.DataOptions(encode="onehot")  # type: ignore[arg-type]
    tfdist.to_sql(model, "mysql", table="t", key="id")  # type: ignore[arg-type]
    tfdist.bench_scale("train.py", mode="srong")  # type: ignore[arg-type]
    # Results.
    job = tfdist.submit_training("local", model, ROWS)
    print(job.history)  # type: ignore[attr-defined]
    trained: TrainResult = job  # type: ignore[assignment]
    trained.predict(ROWS[0], type="probs")  # type: ignore[arg-type]
    print(tfdist.train_many("local", build, ROWS, grid=[{}]).history)  # type: ignore[attr-defined]
    # These are not found, because only the values tell:
    tfdist.Recovery("kept", every="weekly")
    tfdist.train_many("local", lambda units: model, ROWS, grid={"unit": [1]})
