"""The plan of a training, shown without starting it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any
from xml.etree import ElementTree

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from conftest import build_dense

import pybackend
from pybackend import ClusterError, InputError, Resources, plan
from pybackend.core.launchers import local
from pybackend.types import PlannedWorker


@pytest.fixture
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(os, "fork", fail)


def html(made: pybackend.types.Plan) -> ElementTree.Element:
    return ElementTree.fromstring(made._repr_html_())  # noqa: S314 (our own)


def test_a_plan_says_what_the_training_then_does(
    rows: Any, dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Any = {
        "workers": 3,
        "epochs": 2,
        "seed": 4,
        "batch_size": 40,
        "validation_split": 0.2,
        "verbose": 0,
    }
    made = plan("local", dense_model, rows, **arguments)
    result = pybackend.barrier_train("local", dense_model, rows, **arguments)
    assert made.settings == result.settings
    assert [one.rows for one in made.workers] == [one.rows for one in result.workers]
    assert made.steps_per_epoch == result.workers[0].steps / 2
    assert made.workers[2] == PlannedWorker(2, "worker", "this machine", 133)
    lines = str(made).splitlines()
    assert lines[0] == (
        "nothing was started: a training run with 3 processes, processes of this machine"
    )
    assert lines[1:6] == [
        "data: arrays of 400 rows: x float32 (8,), y int64 ()",
        "validation data: arrays of 100 rows: x float32 (8,), y int64 ()",
        "each worker gets: every 3rd row, starting with the row of its rank",
        "steps per epoch: 4, of 40 rows per worker",
        f"model: {dense_model.name} with 195 parameters, sent as a Keras file: "
        f"{made.model.rpartition(': ')[2]}",
    ]
    assert "  worker 1: this machine, 133 rows" in lines
    assert "  batch_size: 40" in lines
    assert json.loads(json.dumps(made.to_dict()))["workers"][0]["rows"] == 134
    shown = ["".join(cell.itertext()) for cell in html(made).iter("td")]
    assert shown[:4] == ["0", "worker", "this machine", "134"]


@pytest.mark.usefixtures("_starts_nothing")
def test_each_kind_of_data_says_what_is_known(rows: Any, tmp_path: Any) -> None:
    x, y = rows
    frame = pd.DataFrame({f"c{n}": x[:, n] for n in range(8)} | {"kind": y})
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(x), "label": y}), path)
    batches = tf.data.Dataset.from_tensor_slices((x[:101], y[:101])).batch(50)

    def fed(context: Any) -> Any:
        raise AssertionError("called")

    def of(data: Any, **named: Any) -> pybackend.types.Plan:
        return plan(None, build_dense, data, **named)

    made = of(frame, label="kind")
    assert made.data == ("a data frame of 500 rows, inputs c0, c1, c2, c3, ... (8); labels kind")
    made = of(path, workers=4)
    assert [one.rows for one in made.workers] == [125] * 4
    assert made.data == "1 file of 500 rows, inputs x; labels label"
    assert made.which_rows == "ranges of rows, which it reads itself"
    made = of(batches)
    assert (made.rows, made.steps_per_epoch, made.settings["batch_size"]) == (101, 3, 25)
    made = of(fed, steps_per_epoch=7)
    assert (made.rows, made.steps_per_epoch) == (None, 7)
    assert made.data == "what fed(context) returns"
    assert "the number of rows and steps that the function returns on each worker" in made.later
    assert "not known yet" in "".join(html(made).itertext())
    made = of(rows, workers=30, seed=2)
    assert "  ... and 14 more" in str(made).splitlines()
    assert "14 more" in "".join(html(made).itertext())
    made = of(rows, shuffle="global", workers=1)
    assert made.settings["seed"] is None
    assert (made.which_rows, len(made.later)) == ("all rows", 1)  # the seed
    made = of(rows, exchange=pybackend.ParameterServer(), workers=2)
    assert [one.role for one in made.workers] == ["chief", "worker", "worker", "ps"]
    assert made.workers[1].rows is None
    assert made.model == "build_dense() is called on each worker"


@pytest.mark.usefixtures("_starts_nothing")
def test_a_cluster_gets_the_documents_that_are_shown(rows: Any) -> None:
    slurm = pybackend.slurm("gpu<&>", nodes=2, gpus=1, time=30, options={"ntasks-per-node": 2})
    made = plan(slurm, build_dense, rows, resources=Resources(cpus=4))
    script = made.documents["job.sh"]
    assert len(made.workers) == 4  # as many as the job's tasks
    for option in ("--ntasks=4", "--gpus-per-task=1", "--cpus-per-task=4", "--nodes=2"):
        assert option in script
    assert script.strip() in str(made).replace("\n  ", "\n")
    assert [pre.text for pre in html(made).iter("pre")] == [script]
    cluster = pybackend.kubernetes("registry/tf:1", cpus=2, memory="4Gi")
    made = plan(cluster, build_dense, rows, workers=5)
    job, service = (json.loads(made.documents[name]) for name in ("job.json", "service.json"))
    assert (job["kind"], service["kind"]) == ("Job", "Service")
    assert job["spec"]["completions"] == 5
    assert job["metadata"]["name"] == service["metadata"]["name"]
    made = plan(pybackend.hosts("ann:2,bob:2"), build_dense, rows, workers=3)
    assert [one.place for one in made.workers] == ["ann", "ann", "bob"]


@pytest.mark.usefixtures("_starts_nothing")
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"workers": 0}, "`workers` must be"),
        ({"epoch": 1}, r"plan\(\) has no argument `epoch`: did you mean `epochs`"),
        ({"min_workers": 2}, r"pass `workers=Elastic\(4, min=2, max=8\)`"),
        ({"recovery": 3}, "`recovery` must be"),
        ({"workers": 501}, "`data` has 500 rows, fewer than workers=501"),
        ({"resources": Resources(cpus=4096)}, "4096"),
        ({"spark": pybackend.hosts("a:2"), "workers": 3}, "`workers` is 3, but a:2 has 2 slots"),
        ({"data": np.ones((4, 8)), "model": build_dense()}, "`data` has no labels"),
        ({"model": keras.Sequential([keras.Input((8,))])}, "the model is not compiled"),
    ],
)
def test_what_training_refuses_is_refused(rows: Any, named: Any, message: str) -> None:
    given = {"spark": "local", "model": build_dense, "data": rows, **named}
    with pytest.raises((InputError, ClusterError), match=message):
        plan(**given)


def test_a_plan_starts_no_fork_server(
    rows: Any, dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(local, "start_fork_server", lambda: started.append(True))
    plan("local", dense_model, rows, workers=2)
    assert not started
