"""Every wrong argument raises an error that names it, before TensorFlow is imported or used."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pybackend
from pybackend import (
    DataOptions,
    Elastic,
    Exchange,
    LocalSteps,
    ModelOptions,
    Recovery,
    barrier_evaluate,
    barrier_predict,
    barrier_run,
    barrier_train,
    bench_scale,
    predict_spark,
    track_mlflow,
    track_tensorboard,
    train_mnist,
)
from pybackend.core.api.calls import suggest
from pybackend.types import TrainResult

X = np.zeros((20, 3), "float32")
Y = np.arange(20)
SERVERS = pybackend.ParameterServer()
LOCK = threading.Lock()  # cannot be pickled
TESTS = str(Path(__file__).parent)


def build() -> None:
    raise AssertionError("the driver never calls the function")


def needs_arguments(units: int, *, rate: float) -> None:
    raise AssertionError("never called")


def takes_any(context: Any, **named: Any) -> None:
    raise AssertionError("never called")


def train(**changes: Any) -> Callable[[], Any]:
    """Return a valid call of `barrier_train` with these changes."""
    right: dict[str, Any] = {"spark": None, "model": build, "data": (X, Y), "workers": 2}
    arguments = {**right, **changes}
    first = [arguments.pop(name) for name in ("spark", "model", "data")]
    return lambda: barrier_train(*first, **arguments)


def run(fn: Any = len, *args: Any, spark: Any = "local", **changes: Any) -> Callable[[], Any]:
    return lambda: barrier_run(spark, fn, *args, **changes)


def digits(**changes: Any) -> Callable[[], Any]:
    # A path that does not exist: a wrong argument is reported before the data are read.
    return lambda: train_mnist(**{"path": "missing.npz", **changes})


def infer(**changes: Any) -> Callable[[], Any]:
    """Return a valid call of `predict_spark` with these changes, except for its DataFrame."""
    result = TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0)
    arguments = {"model": result, "df": X, **changes}
    first = [arguments.pop(name) for name in ("model", "df")]
    return lambda: predict_spark(*first, **arguments)


def scale(train: Any = needs_arguments, **changes: Any) -> Callable[[], Any]:
    return lambda: bench_scale(train, **changes)


def pack(path: Any = "env.tar.gz", environment: Any = "this") -> Callable[[], Any]:
    return lambda: pybackend.pack_environment(path, environment)


def write(method: str, path: Any) -> Callable[[], Any]:
    """Return a call of a result's method that writes its model."""
    result = TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0)
    return lambda: getattr(result, method)(path)


def trains(workers: int, batch_size: int) -> None:
    raise AssertionError("never called")


# For each case the call and a part of its message.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "spark text": (train(spark="yarn"), "`spark` must be None, 'local', a SparkSession"),
    "spark number": (train(spark=3), "`spark`"),
    "spark object": (train(spark=object()), "`spark`"),
    "model none": (train(model=None), "`model`"),
    "model text": (train(model="model.keras"), "`model`"),
    "model array": (train(model=X), "`model`"),
    "model needs arguments": (
        train(model=needs_arguments),
        "the `model` function needs arguments (units, rate)",
    ),
    "model unpicklable": (
        train(model=lambda lock=LOCK: lock),
        "the `model` function cannot be sent to the workers",
    ),
    "data none": (train(data=None), "`data`"),
    "weights without y": (train(data=(X, None, np.ones(20))), "`data` has sample weights but no"),
    "data without x": (train(data=(None, Y)), "`data` has no inputs"),
    "x and y": (lambda: barrier_train(None, build, X, Y), "pass arrays together as (x, y)"),  # type: ignore[misc]
    "an option of Exchange": (train(loss_over="rows"), "pass `exchange=Exchange(loss_over=...)`"),
    "y by name": (train(y=Y), "has no argument `y`: pass `data=(x, y)`"),
    "num_proc": (train(num_proc=3), "has no argument `num_proc`: pass `workers`"),
    "multiprocessing": (train(use_multiprocessing=True), "each worker is a process: pass `work"),
    "epoch": (train(epoch=3), "has no argument `epoch`: did you mean `epochs`?"),
    "no data": (lambda: barrier_train(None, build), "barrier_train() needs `data`"),  # type: ignore[call-arg]
    "an argument of no fit": (train(rounds_of_tea=3), "has no argument `rounds_of_tea`: see"),
    "validation_freq alone": (train(validation_freq=2), "`validation_freq` needs `validation_"),
    "lists of lists of texts": (
        train(data=(np.array([[["a"], ["b"]]] * 20), Y)),
        "`x` of `data` is text of shape (20, 2, 1); expected one string or one list of strings per",
    ),
    "data lengths": (train(data=(X, Y[1:])), "`data`"),
    "data text": (train(data=(X, ["a"] * 20)), "`y` of `data`"),
    "data NaN": (train(data=(X, np.full(20, np.nan))), "`y` of `data` has a NaN in row 0"),
    "data empty": (train(data=(X[:0], Y[:0])), "`data` has no rows"),
    "data fewer than workers": (
        train(data=(X[:2], Y[:2]), workers=3),
        "`data` has 2 rows, fewer than workers=3",
    ),
    "exchange text": (train(exchange="tcp"), "`exchange` must be an Exchange, a LocalSteps or"),
    "exchange class": (
        train(exchange=LocalSteps),
        "`exchange` must be an Exchange, a LocalSteps or",
    ),
    "scale_lr": (
        lambda: Exchange(scale_lr="cubic"),  # type: ignore[arg-type]
        "`scale_lr` must be None, 'linear', 'sqrt' or a Scale",
    ),
    "scale_lr and LocalSteps": (
        lambda: LocalSteps(4, scale_lr="linear"),  # type: ignore[call-arg]
        "LocalSteps() has no argument `scale_lr`: a step has the rows of one worker, regardless of "
        "the number of workers. Omit it",
    ),
    "servers and scale_lr": (
        lambda: pybackend.ParameterServer(scale_lr="linear"),  # type: ignore[call-arg]
        "ParameterServer() has no argument `scale_lr`: a step has the rows of one worker",
    ),
    "resources dict": (train(resources={"cpus": 2}), "`resources` must be a Resources"),
    "exchange option": (lambda: Exchange(transport="mpi"), "`transport` must be 'tcp' or 'tf'"),  # type: ignore[arg-type]
    "data_options dict": (
        train(data_options={"in_memory": True}),
        "`data_options` must be a DataOptions, e.g. pybackend.DataOptions(in_memory=True)",
    ),
    "shuffle unknown": (
        train(shuffle="globally"),
        "`shuffle` must be True, False, 'shard' or 'global'",
    ),
    "class_weight list": (train(class_weight=[1, 2]), "`class_weight` must map classes to weights"),
    "class_weight text": (train(class_weight={"cat": 1}), "`class_weight` has the class 'cat'"),
    "class_weight of no label": (
        train(class_weight={70: 2.0, 80: 1.0}),
        "`class_weight` has the class 70, but the labels of `data` are 0, 1,",
    ),
    "class_weight of no one-hot label": (
        train(data=(X, np.eye(3)[[0, 2] * 10]), class_weight={1: 2.0}),
        "`class_weight` has the class 1, but the labels of `data` are 0, 2",
    ),
    "class_weight fraction": (train(class_weight={1.7: 1}), "`class_weight` has the class 1.7"),
    "features twice": (train(features=["a", "b", "a"]), "`features` lists the column 'a' twice"),
    "class_weight twice": (
        train(class_weight={"1": 1, 1: 2}),
        "`class_weight` has the class 1 twice",
    ),
    "class_weight NaN": (
        train(class_weight={0: float("nan")}),
        "`class_weight` has the weight nan",
    ),
    "class_weight of two outputs": (
        train(data=(X, {"a": Y, "b": Y}), class_weight={0: 1}),
        "`class_weight` needs labels and a model with one output",
    ),
    "class_weight without labels": (train(data=X, class_weight={0: 1}), "`class_weight` needs"),
    "class_weight beside sample weights": (
        train(data=(X, Y, np.ones(20)), class_weight={0: 1}),
        "`class_weight` and sample weights cannot be combined",
    ),
    "evaluate workers": (
        lambda: barrier_evaluate(None, build, (X, Y), workers=0),
        "`workers` must be",
    ),
    "evaluate data": (lambda: barrier_evaluate(None, build, X[:0]), "`data` has no rows"),
    "predict x": (lambda: barrier_predict(None, build, X[:0]), "`x` has no rows"),
    "predict on_missing": (
        lambda: barrier_predict(None, build, X, on_missing=None),
        "`on_missing` must be 'null' or 'error', not None",
    ),
    "predict batch_size": (
        lambda: barrier_predict(None, build, X, batch_size=0.5),
        "`batch_size` must be a whole number",
    ),
    "workers zero": (train(workers=0), "`workers`"),
    "workers negative": (train(workers=-1), "`workers`"),
    "workers fraction": (train(workers=1.5), "`workers`"),
    "workers text": (train(workers="two"), "`workers`"),
    "workers too many": (train(workers=5000), "`workers`"),
    "epochs": (train(epochs=0), "`epochs`"),
    "batch_size": (train(batch_size=0), "`batch_size`"),
    "steps_per_epoch zero": (train(steps_per_epoch=0), "`steps_per_epoch`"),
    "steps_per_epoch too many": (
        train(steps_per_epoch=3, batch_size=5),
        "`steps_per_epoch` is 3, but 20 rows give 2 steps of 2 x 5 rows",
    ),
    "validation_data type": (train(validation_data=3), "`validation_data`"),
    "validation_data lengths": (train(validation_data=(X, Y[1:])), "`validation_data`"),
    "validation_data empty": (
        train(validation_data=(X[:0], Y[:0])),
        "`validation_data` has no rows",
    ),
    "callbacks number": (train(callbacks=3), "`callbacks` contains int"),
    "callbacks text": (train(callbacks=["EarlyStopping"]), "`callbacks` contains str"),
    "callbacks function": (train(callbacks=[build]), "`callbacks` contains function"),
    "seed negative": (train(seed=-1), "`seed`"),
    "seed too large": (train(seed=2**31), "`seed`"),
    "seed text": (train(seed="1"), "`seed`"),
    "shuffle": (train(shuffle="yes"), "`shuffle`"),
    "features type": (train(features=3), "`features`"),
    "features items": (train(features=["a", 1]), "`features`"),
    "label": (train(label=3), "`label`"),
    "weight": (train(weight=1), "`weight` must be the name of a column"),
    "weight without a label": (
        train(weight="w", label=None),
        "`weight` weights the loss on the labels",
    ),
    "features of arrays": (
        train(features=["a"]),
        "`features` needs data with columns, but `data` has none",
    ),
    "data function without a parameter": (
        train(data=lambda: None),
        "the function is called as data(context)",
    ),
    "weight of arrays": (
        train(weight="w"),
        "`weight` needs data with columns, but `data` has none",
    ),
    "data_options of arrays": (
        train(data_options=DataOptions(tfrecord_spec={"a": "int64"})),
        "`tfrecord_spec` needs data with columns",
    ),
    "initial_epoch": (train(initial_epoch=1), "`initial_epoch` must be below `epochs` (1,"),
    "validation_split": (train(validation_split=1), "`validation_split` must be a number from 0"),
    "validation_split of all rows": (
        train(data=(X[:2], Y[:2]), workers=1, validation_split=0.6),
        "validation_split=0.6 of 2 rows leaves no rows for training",
    ),
    "validation_split of no row": (
        train(data=(X[:0], Y[:0]), workers=1, validation_split=0.5),
        "validation_split=0.5 of 0 rows leaves no rows for training",
    ),
    "validation_split leaves too few": (
        train(data=(X[:3], Y[:3]), workers=3, validation_split=0.5),
        "`data` has 1 row, fewer than workers=3",
    ),
    "validation_split beside validation_data": (
        train(validation_data=(X, Y), validation_split=0.5),
        "`validation_data` and `validation_split` cannot be combined",
    ),
    "validation_split of files": (
        train(data="rows.parquet", validation_split=0.5),
        "memory, but `data` is files: pass other files as `validation_data`",
    ),
    "validation_split of a function": (
        train(data=lambda context: None, validation_split=0.5),
        "memory, but `data` is a function: pass another function as `validation_data`",
    ),
    "validation_freq": (train(validation_freq=0), "`validation_freq` must be at least 1"),
    "model_uri type": (
        lambda: ModelOptions(uri=3),  # type: ignore[arg-type]
        "`uri` of a model must be a path or URI, not 3",
    ),
    "model_uri ending": (
        lambda: ModelOptions(uri="model.pb"),
        "`uri` of a model must end in .h5 or .keras",
    ),
    "data path": (train(data="/no/such/place"), "there is no file or folder '/no/such/place'"),
    "data function with weights": (
        train(data=lambda context: None, class_weight={0: 1}),
        "`class_weight` needs labels that are known before",
    ),
    "data function in global order": (
        train(data=lambda context: None, shuffle="global"),
        "shuffle='global' cannot reorder what the `data` function returns",
    ),
    "evaluate weight": (
        lambda: barrier_evaluate(None, build, (X, Y), weight="w"),
        "`weight` needs data with columns",
    ),
    "custom_objects": (
        lambda: ModelOptions(custom_objects=[build]),  # type: ignore[arg-type]
        "`custom_objects`",
    ),
    "custom_objects that are none": (
        lambda: ModelOptions(custom_objects={"a": 5}),
        "not 'a' to 5",
    ),
    "custom_objects without a name": (
        lambda: ModelOptions(custom_objects={5: build}),  # type: ignore[dict-item]
        "not 5 to <function",
    ),
    "safe_mode": (lambda: ModelOptions(safe_mode=None), "`safe_mode`"),
    "verbose": (train(verbose=5), "`verbose`"),
    "recovery": (train(recovery=5), "`recovery` must be a Recovery, a path or a URI"),
    "model_options of an evaluation": (
        lambda: barrier_evaluate(None, build, (X, Y), model_options=ModelOptions(uri="m.h5")),
        "`uri` of `model_options` is only for training",
    ),
    "resume without a folder": (
        lambda: Recovery(resume=True),
        "resume=True needs `uri`, the folder of the checkpoints, e.g. Recovery('/shared/run1', "
        "resume=True)",
    ),
    "every without a folder": (lambda: Recovery(every="1h"), "every='1h' needs `uri`"),
    "two folders for TensorBoard": (
        train(callbacks=[track_tensorboard("a"), track_tensorboard("b")]),
        "`callbacks` contains two folders for TensorBoard: pass one",
    ),
    "resume": (lambda: pybackend.Recovery("kept", resume="yes"), "`resume`"),
    "tensorboard": (
        lambda: track_tensorboard(5),  # type: ignore[arg-type]
        "`folder` must be a folder or a URI, not 5",
    ),
    "restarts": (lambda: Recovery(restarts=-1), "`restarts`"),
    "pause": (lambda: Recovery(pause=0), "`pause` must be a positive number of seconds, not 0"),
    "elastic workers": (lambda: Elastic("2"), "`workers` must be a whole number"),
    "elastic min": (lambda: Elastic(min=0), "`min` must be from 1 to 4096"),
    "elastic max": (lambda: Elastic(max=0.5), "`max` must be a whole number"),
    "min above workers": (lambda: Elastic(2, min=8), "but workers=2, min=8 and max=None"),
    "max below workers": (lambda: Elastic(2, max=1), "but workers=2, min=1 and max=1"),
    "max below min": (lambda: Elastic(min=3, max=2), "but workers=None, min=3 and max=2"),
    "mnist elastic": (digits(workers=Elastic(2)), "`workers` must be a whole number"),
    "mnist min_workers": (digits(min_workers=2), "has no argument `min_workers`: "),
    "max above the rows": (
        train(data=(X[:3], Y[:3]), workers=Elastic(2, max=4)),
        "`data` has 3 rows, fewer than max=4",
    ),
    "elastic and local steps": (
        train(workers=Elastic(), exchange=pybackend.LocalSteps(4)),
        "exchange=LocalSteps(...) cannot be combined with workers=Elastic(...): the weights",
    ),
    "elastic and compression": (
        train(workers=Elastic(), exchange=pybackend.Exchange(compression="fp16")),
        "compression='fp16' cannot be combined with workers=Elastic(...)",
    ),
    "elastic and TensorFlow's collectives": (
        train(workers=Elastic(), exchange=pybackend.Exchange(transport="tf")),
        "transport='tf' cannot be combined with workers=Elastic(...)",
    ),
    "elastic and steps": (
        train(workers=Elastic(), steps_per_epoch=1),
        "`steps_per_epoch` cannot be combined with workers=Elastic(...)",
    ),
    "elastic and servers": (
        train(workers=Elastic(), exchange=SERVERS),
        "exchange=ParameterServer(...) cannot be combined with workers=Elastic(...)",
    ),
    "elastic and a function": (
        train(workers=Elastic(), data=lambda context: None),
        "workers=Elastic(...) cannot be combined with a `data` function",
    ),
    "elastic and files": (
        train(workers=Elastic(), data="rows.parquet"),
        "workers=Elastic(...) cannot be combined with files when each worker reads only a share of "
        "them: pass shuffle='global', so that every worker has all rows",
    ),
    "strategy": (train(strategy="mirrored"), "pass `exchange=ParameterServer(servers=1)`"),
    "servers and callbacks": (
        train(exchange=SERVERS, callbacks=[object()]),
        "`callbacks` cannot be combined with exchange=ParameterServer(...): the workers do not "
        "finish steps together",
    ),
    "servers and steps": (
        train(exchange=SERVERS, steps_per_epoch=3),
        "`steps_per_epoch` cannot be combined with exchange=ParameterServer(...)",
    ),
    "servers and checkpoint": (
        train(exchange=SERVERS, recovery=pybackend.Recovery("kept", every=5)),
        "`recovery` with exchange=ParameterServer(...) needs every='epoch'",
    ),
    "servers and shuffle": (
        train(exchange=SERVERS, shuffle="global"),
        "shuffle='global' cannot be combined with exchange=ParameterServer(...)",
    ),
    "servers and pipeline": (
        train(exchange=SERVERS, data=lambda context: None),
        "with exchange=ParameterServer(...), `data` must be rows",
    ),
    "servers": (lambda: pybackend.ParameterServer(0), "`servers` must be from 1 to 4094"),
    "servers text": (lambda: pybackend.ParameterServer("2"), "`servers` must be a whole number"),
    "workers and servers": (
        train(exchange=pybackend.ParameterServer(3), workers=4095),
        "`workers` must be from 1 to 4092",
    ),
    "timeout": (lambda: Recovery(timeout=0), "`timeout`"),
    "submit": (lambda: pybackend.submit_training(None, build, (X, Y), folder=3), "`folder` must"),  # type: ignore[arg-type]
    "run spark": (run(spark="yarn"), "`spark`"),
    "run fn none": (run(None), "`fn` must be a function"),
    "run fn text": (run("work"), "`fn` must be a function"),
    "run fn missing": (run("/no/such/train.py"), "the script /no/such/train.py cannot be read"),
    "run fn script's name": (
        run(__file__, rate=1),
        "a script does not take named arguments such as `ra",
    ),
    "run fn unpicklable": (run(lambda c, lock=LOCK: lock), "`fn` and its arguments"),
    "run args unpicklable": (run(print, LOCK), "`fn` and its arguments"),
    "run roles": (run(roles=["chief"]), "`roles` must map roles to numbers of workers"),
    "run roles master": (run(roles={"master": 1}), "call it 'chief', as TensorFlow 2 does"),
    "run roles unknown": (run(roles={"server": 1}), "`roles` has 'server'; expected chief"),
    "run roles chiefs": (run(roles={"chief": 2}), "`roles['chief']` must be 0 or 1"),
    "run roles half": (run(roles={"worker": 0.5}), "`roles['worker']` must be a whole number"),
    "run roles servers": (run(roles={"ps": 2}), "`roles` must have a chief or a worker"),
    "run roles data": (run(roles={"worker": 2, "ps": 1}, data={"a": [1]}), "`roles` has 'ps'"),
    "run roles beside workers": (run(roles={"worker": 2}, workers=3), "but `roles` adds up to 2"),
    "run data": (run(data=5), "`data` must be a Spark DataFrame, an RDD, a pandas or polars data"),
    "run data empty": (run(data={}), "`data` has no columns"),
    "run data lengths": (run(data={"a": X, "b": X[1:]}), "of `data` must have the same number"),
    "run data text": (run(data={"a": np.array(["b"])}), "column 'a' of `data` is not numeric"),
    "run kwargs": (run(rounds=3), "nor the function takes an argument `rounds`: leave it out"),
    "run kwargs near": (run(worker=3), "takes an argument `worker`: did you mean `workers`?"),
    "run kwargs unpicklable": (run(takes_any, lock=LOCK), "`fn` and its arguments"),
    "run workers": (run(workers=0), "`workers`"),
    "run resources": (run(resources=2), "`resources` must be a Resources"),
    "run verbose": (run(verbose="loud"), "`verbose`"),
    "run timeout": (run(timeout=0), "`timeout`"),
    "infer model": (infer(model=build), "`model` must be a Keras 3 model or a TrainResult"),
    "infer df": (infer(), "`df` must be a pyspark.sql.DataFrame, not a numpy.ndarray"),
    "infer features": (infer(features=[]), "`features` must be names of columns"),
    "infer tensors": (infer(tensors={"a": "uint8"}), "`tensors` of 'a' must be (dtype, shape)"),
    "infer categories": (infer(categories={"a": []}), "`categories` of 'a' must be"),
    "infer encode": (infer(encode="dummy"), "`encode` must be 'one_hot', 'integer', or map"),
    "infer type": (infer(type="classes"), "`type` must be None, 'class', 'prob' or 'raw'"),
    "infer levels text": (infer(levels="abc"), "`levels` must be a list of class names"),
    "infer levels twice": (infer(levels=["1", 1]), "`levels` must be distinct names"),
    "infer on_missing": (
        infer(on_missing="drop"),
        "`on_missing` must be 'null' or 'error', not 'drop'",
    ),
    "infer runtime": (
        infer(runtime="tf"),
        "`runtime` must be 'keras' or 'onnx', not 'tf'",
    ),
    "infer batch_size": (infer(batch_size=0), "`batch_size` must be at least 1"),
    "infer model_options": (
        infer(model_options={"safe_mode": True}),
        "`model_options` must be a ModelOptions, e.g. ",
    ),
    "mnist spark": (digits(spark="yarn"), "`spark`"),
    "mnist workers": (digits(workers=0), "`workers`"),
    "mnist epochs": (digits(epochs=0), "`epochs`"),
    "mnist batch_size": (digits(batch_size=0), "`batch_size`"),
    "mnist tensorboard": (
        digits(callbacks=[track_tensorboard]),
        "contains the function track_tensorboard",
    ),
    "mnist path": (digits(), "`path` is 'missing.npz', but there is no such file"),
    "mnist path type": (digits(path=5), "`path`"),
    "mnist limit": (digits(limit=0), "`limit`"),
    "mnist callbacks": (digits(callbacks=[track_mlflow]), "contains the function track_mlflow"),
    "mnist seed": (digits(seed=-1), "`seed`"),
    "mnist resources": (digits(resources=2), "`resources` must be a Resources"),
    "mnist recovery": (digits(recovery=5), "`recovery`"),
    "mnist verbose": (digits(verbose=9), "`verbose`"),
    "scale train": (
        scale(5),
        "`train` must be a function that calls barrier_train(), or the path of a script, not int",
    ),
    "scale train path": (scale("missing.py"), "the script missing.py cannot be read"),
    "scale train signature": (scale(), "`train` is called as train(workers=..., batch_size=...)"),
    "scale workers": (scale(trains, workers=4), "`workers` must list numbers of workers"),
    "scale workers zero": (scale(trains, workers=[0, 1]), "`workers` must be from 1 to 100000"),
    "scale workers twice": (scale(trains, workers=[2, 2]), "`workers` contains a number twice"),
    "scale mode": (scale(trains, mode="linear"), "`mode` must be 'strong', 'weak' or 'both'"),
    "scale batch_size": (scale(trains, batch_size=0), "`batch_size` must be at least 1"),
    "scale batch_size shared": (
        scale(trains, workers=[1, 3]),
        "a batch of 32 rows cannot be shared equally by 3 workers",
    ),
    "scale repeats": (scale(trains, repeats=0), "`repeats` must be at least 1"),
    "scale steps": (scale(trains, steps=60), "`steps` only applies to a script"),
    "scale steps few": (scale(trains, steps=3), "`steps` must be at least 5"),
    "scale arguments": (
        scale(trains, arguments=["x"]),
        "`arguments` can only be passed to a script",
    ),
    "scale verbose": (scale(trains, verbose="no"), "`verbose` must be a whole number"),
    "pack path": (pack("env.zip"), "`path` must end with .tar.gz, not 'env.zip'"),
    "pack path type": (pack(3), "`path` must end with .tar.gz, not 3"),
    "pack path of no folder": (pack("/no/env.tar.gz"), "whose folder does not exist"),
    "pack path that cannot be written": (
        pack("/proc/env.tar.gz"),
        "`path`: '/proc/env.tar.gz' cannot be written: No such file or directory",
    ),
    "pack environment": (pack(environment="nowhere"), "`environment` must be 'this' or the folder"),
    "pack environment type": (pack(environment=3), "`environment` must be 'this' or the folder"),
    "pack environment without a Python": (
        pack(environment=TESTS),
        f"`environment` is the folder {TESTS!r}, which has no bin/python",
    ),
    "save path": (write("save", ""), "`path` must name a file, such as 'model.h5', not ''"),
    "save path that cannot be written": (
        write("save", "/proc/model.h5"),
        "`path`: '/proc/model.h5' cannot be written: No such file or directory",
    ),
    "export path": (write("export", ""), "`path` must name a new folder, such as 'exported', or"),
    "export path type": (write("export", 3), "`path` must name a new folder"),
    "export path that exists": (write("export", TESTS), "exists and is not an empty folder"),
    **{
        f"export {path} that cannot be written": (
            write("export", path),
            f"`path`: {path!r} cannot be written: No such file or directory",
        )
        for path in ("/proc/new", "/proc/model.onnx")
    },
}


def outcome(call: Callable[[], Any]) -> list[str]:
    """Return type and text of the error, and what the call imported or started."""
    try:
        call()
    except Exception as error:
        told = [type(error).__name__, str(error)]
    else:
        told = ["no error", ""]
    heavy = [name for name in ("tensorflow", "keras", "pyspark") if name in sys.modules]
    if threading.active_count() > 1:
        heavy.append("threads")
    return [*told, *heavy]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """Results of all cases in one new Python process."""
    program = (
        "import json, test_api_input as cases;"
        "print(json.dumps({name: cases.outcome(case[0]) for name, case in cases.CASES.items()}))"
    )
    root = Path(pybackend.__file__).parents[1]
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(root), TESTS]}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(shown.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_refused_by_name(case: str, outcomes: dict[str, list[str]]) -> None:
    kind, message, *heavy = outcomes[case]
    assert kind == "InputError", message
    assert CASES[case][1] in message
    assert heavy == []


# Former names of options, and what to pass instead.
RENAMED = {
    "checkpoint": "pass `recovery=Recovery(...)`, or only the folder",
    "restarts": "pass `recovery=Recovery(restarts=...)`",
    "timeout": "pass `recovery=Recovery(timeout=...)`",
    "model_uri": "pass `model_options=ModelOptions(uri=...)`",
    "custom_objects": "pass `model_options=ModelOptions(custom_objects=...)`",
    "safe_mode": "pass `model_options=ModelOptions(safe_mode=...)`",
    "scale_lr": "pass `exchange=Exchange(scale_lr=...)`",
    "tensorboard": "pass `callbacks=[track_tensorboard(...)]`",
    "detach": (
        "call `submit_training(...)`, which returns a job; to plan that, call "
        "`plan(..., submit=True)`"
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_former_name_says_the_new_one(name: str) -> None:
    for call in (barrier_train, pybackend.plan, pybackend.train_many, train_mnist):
        known = inspect.signature(call).parameters
        if call is train_mnist and name in ("custom_objects", "safe_mode", "scale_lr", "model_uri"):
            continue  # it has no such option
        needed = {"spark", "model", "data", "grid"} & known.keys()
        with pytest.raises(pybackend.InputError) as error:
            call(**dict.fromkeys(needed), **{name: 1})
        expected = f"{call.__name__}() has no argument `{name}`: {RENAMED[name]}"
        assert str(error.value) == expected


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("audit", "pass `exchange=Exchange(audit=...)`"),
        ("shard_optimizer", "pass `exchange=Exchange(shard_optimizer=...)`"),
        ("every", "pass `recovery=Recovery(..., every=...)`"),
        ("pause", "pass `recovery=Recovery(..., pause=...)`"),
        ("submit", "call `submit_training(...)`, which returns a job"),
    ],
)
def test_an_option_of_an_object_names_the_object(name: str, instead: str) -> None:
    with pytest.raises(pybackend.InputError) as error:
        barrier_train("local", None, None, **{name: 1})
    assert str(error.value) == f"barrier_train() has no argument `{name}`: {instead}"


@pytest.mark.parametrize(
    "call",
    [
        barrier_train,
        pybackend.submit_training,
        pybackend.plan,
        train_mnist,
        pybackend.barrier_evaluate,
        pybackend.barrier_predict,
        barrier_run,
        predict_spark,
        bench_scale,
    ],
)
def test_advice_names_no_argument_that_the_call_lacks(call: Callable[..., Any]) -> None:
    known = inspect.signature(call).parameters
    named_alike = ("function", "values")  # as parameters of functions that write the advice
    wanted = ("compression", "scale_lr", "encode", "gpus", "x", "num_workers", "detach")
    for unknown in (*wanted, *named_alike):
        if unknown not in known:
            named = re.findall(r"pass `(\w+)", suggest(unknown, known) or "")
            assert {*named} <= {*known, "submit"}, (unknown, named)


def test_a_job_is_submitted_once() -> None:
    for name in ("detach", "submit"):
        with pytest.raises(pybackend.InputError, match=f"no argument `{name}`: omit it"):
            pybackend.submit_training("local", None, None, **{name: True})


def test_every_argument_has_a_case() -> None:
    prefixes = {
        barrier_train: "",
        barrier_run: "run ",
        predict_spark: "infer ",
        train_mnist: "mnist ",
        bench_scale: "scale ",
    }
    for function, prefix in prefixes.items():
        for name in inspect.signature(function).parameters:
            assert any(case.startswith(prefix + name) for case in CASES), name
