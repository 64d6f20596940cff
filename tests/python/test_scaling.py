"""Scaling of a training: measured, predicted by a model, and simulated event by event."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

import pybackend
from pybackend import InputError
from pybackend.cli import main
from pybackend.core.api.calls import TrainingCall
from pybackend.core.collective import Alone, CostModel
from pybackend.core.engine.step_clock import Arrivals, StepClock
from pybackend.core.errors import ClusterError
from pybackend.core.job.report import PARTS
from pybackend.scaling.measured import ScaledTraining, compare_rows, count_rows, make_row
from pybackend.scaling.projection import expected_excess
from pybackend.scaling.script_hook import HOOK, VARIABLE, ScaleOrder, read_scale, write_order
from pybackend.types import ScalingResult, StepTimes, TrainResult, WorkerReport

sys.path.append(str(Path(pybackend.__file__).parents[1] / "benchmarks"))
from events import Cluster, double, ring
from page import write_sections

TRUE = CostModel(50e-6, 2e-9, 1e-10)
# The first measurements of the workers were lower, as usual: nothing else was running.
MEASURED = [25e-6, 1.1e-9, 1e-10]
BYTES = 1_390_000
PAUSE = 0.1


def predict(workers: int, batch_size: float) -> tuple[float, float]:
    """Return seconds of computing and of communication of a training with known costs."""
    costs = [TRUE.predict_ring(BYTES, workers), TRUE.predict_doubling(BYTES, workers)]
    return 2e-3 + 1e-4 * batch_size, min(costs) if workers > 1 else 0.0


def training(workers: int, batch_size: float, spread: float = 0.0) -> ScaledTraining:
    compute, communication = predict(workers, batch_size)
    waiting = compute * spread * expected_excess(workers)
    times = StepTimes(
        steps=100,
        data=0.0,
        compute=compute,
        communication=communication,
        waiting=waiting,
        stretches=[[0.0, compute, communication, waiting]] * 10,
        buffers=[BYTES] if workers > 1 else [],
        costs=MEASURED if workers > 1 else None,
        cores=64,
        machine="m",
    )
    reports = [WorkerReport(rank, "h", 1, step_times=times) for rank in range(workers)]
    return ScaledTraining(batch_size * workers, round(batch_size), reports)


def synthetic(spread: float = 0.0, batch_size: int = 512) -> ScalingResult:
    rows = [make_row("strong", [training(n, batch_size / n, spread)]) for n in (1, 2, 4, 8)]
    rows += [make_row("weak", [training(n, batch_size, spread)]) for n in (1, 2, 4, 8)]
    return ScalingResult(compare_rows(rows), ["h"])


def test_a_projection_finds_the_costs_behind_the_figures() -> None:
    projection = synthetic().project(480)
    costs = projection.model.costs
    found = costs.latency_seconds, costs.seconds_per_byte, costs.add_seconds_per_byte
    assert found == pytest.approx((50e-6, 2e-9, 1e-10), rel=1e-3)
    assert projection.model.own == pytest.approx((2e-3, 1e-4), rel=1e-6)
    assert projection.error == pytest.approx(0, abs=1e-4)
    assert [(r.mode, r.workers) for r in projection.rows] == [
        (mode, n) for mode in ("strong", "weak") for n in (16, 32, 64, 128, 256, 480)
    ]
    for row in projection.rows:
        size = 512 / row.workers if row.mode == "strong" else 512
        step, one = sum(predict(row.workers, size)), sum(predict(1, 512))
        assert row.seconds == pytest.approx(step, rel=1e-3)
        rows = 1 if row.mode == "strong" else row.workers
        assert row.speedup == pytest.approx(rows * one / step, rel=1e-3)
        assert row.efficiency == pytest.approx(row.speedup / row.workers)


def test_waits_tell_the_spread() -> None:
    projection = synthetic(0.2).project(64)
    assert projection.model.spread == pytest.approx(0.2, rel=1e-3)
    expected = sum(predict(64, 512)) + predict(64, 512)[0] * 0.2 * expected_excess(64)
    assert projection.rows[-1].seconds == pytest.approx(expected, rel=1e-3)


def test_an_error_of_the_fit_is_shown() -> None:
    rows = [
        replace(row, compute=1.2 * row.compute, seconds=row.seconds + 0.2 * row.compute)
        if row.workers == 4
        else row
        for row in synthetic().rows
    ]
    projection = ScalingResult(rows, ["h"]).project(64)
    assert 0 < projection.error < 0.2
    assert f"typical error {projection.error:.0%}" in str(projection)


@pytest.mark.full
def test_workers_that_share_a_batch_are_at_most_its_rows() -> None:
    counts = {
        row.workers for row in synthetic(batch_size=24).project(480).rows if row.mode == "strong"
    }
    assert counts == {16, 24}


@pytest.mark.parametrize("workers", [1, 2, 8, 48, 480])
def test_the_last_of_several_workers(workers: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, workers))
    assert expected_excess(workers) == pytest.approx(drawn.max(axis=1).mean(), rel=0.05, abs=0.02)


def test_what_was_measured_on_shared_cores_is_marked_and_not_fitted() -> None:
    result = synthetic()
    crowded = [
        row if row.workers < 8 else make_row(row.mode, [training(8, row.batch_size, 1.0)])
        for row in result.rows
    ]
    for row in crowded:
        if row.workers == 8:
            object.__setattr__(row, "is_crowded", True)
    shown = ScalingResult(compare_rows(crowded), ["h"])
    assert "8*" in str(shown)
    assert "more workers than cores" in str(shown)
    assert shown.project(480).model.spread == 0


def test_what_cannot_be_projected_is_refused() -> None:
    result = synthetic()
    alone = ScalingResult([row for row in result.rows if row.workers == 1], ["h"])
    with pytest.raises(InputError, match="a projection needs two different numbers of workers"):
        alone.project(480)
    with pytest.raises(InputError, match="`to` must be from 2 to 1000000, not 1"):
        result.project(1)
    with pytest.raises(InputError, match=r"\*.png, \*.pdf or \*.svg, not 'a.txt'"):
        result.plot("a.txt")
    untimed = ScaledTraining(8, 8, [WorkerReport(0, "h", 1)])
    with pytest.raises(InputError, match="the workers measured no step times"):
        make_row("weak", [untimed])


@settings(max_examples=40)
@given(
    ranks=st.integers(2, 40),
    nbytes=st.integers(0, 10**8),
    figures=st.tuples(*[st.floats(1e-12, 1e-3)] * 3),
)
def test_an_undisturbed_simulation_is_the_closed_formula(
    ranks: int, nbytes: int, figures: tuple[float, float, float]
) -> None:
    costs = CostModel(*figures)
    for exchange, expected in (
        (ring, costs.predict_ring(nbytes, ranks)),
        (double, costs.predict_doubling(nbytes, ranks)),
    ):
        through = exchange(np.full(ranks, 7.0), nbytes, costs, lambda count: 1.0)
        assert through.max() - 7 == pytest.approx(expected, rel=1e-9, abs=1e-12)
    computing = np.full((3, ranks), 0.5)
    step = Cluster(ranks, costs).step_seconds(computing, nbytes, "ring", np.random.default_rng(0))
    assert step == pytest.approx(0.5 + costs.predict_ring(nbytes, ranks))


def test_a_late_rank_delays_those_that_its_part_reaches() -> None:
    costs = CostModel(1.0, 0.0, 0.0)
    late = np.array([0.0, 10.0, 0.0, 0.0])
    # A message around the ring takes more time for each additional rank.
    assert ring(late, 0, costs, lambda count: 1.0).tolist() == [16, 16, 16, 16]
    assert double(late, 0, costs, lambda count: 1.0).tolist() == [12, 12, 12, 12]
    # The third of three ranks is not folded: rank 1 gets it last.
    assert double(np.array([0.0, 10.0, 0.0]), 0, costs, lambda count: 1.0).tolist() == [13, 13, 12]


def test_disturbed_clusters_are_slower_than_the_formula() -> None:
    generator = np.random.default_rng(0)
    quiet = Cluster(64, TRUE)
    jittery = Cluster(64, TRUE, jitter=0.1, message_jitter=0.3)
    stopped = Cluster(64, TRUE, jitter=0.1, message_jitter=0.3, pauses=0.01, pause_seconds=0.5)
    slow = Cluster(64, TRUE, slow_share=1 / 64, slow_factor=2.0)
    steps = {}
    for name, cluster in {"quiet": quiet, "jitter": jittery, "stop": stopped, "slow": slow}.items():
        own = cluster.draw_computing(0.1, 20, generator)
        steps[name] = cluster.step_seconds(own, BYTES, "ring", generator)
    assert steps["quiet"] == pytest.approx(0.1 + TRUE.predict_ring(BYTES, 64))
    assert steps["quiet"] < steps["jitter"] < steps["stop"]
    assert steps["slow"] == pytest.approx(steps["quiet"] + 0.1)


def test_sections_of_a_page_are_replaced_or_added(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nfirst\n\n## One\n\nold\n\n## Two\n\nkept\n")
    write_sections({"One": ["new"], "Three": ["added"]}, page)
    expected = "# Title\n\nfirst\n\n## One\n\nnew\n\n## Two\n\nkept\n\n## Three\n\nadded\n"
    assert page.read_text() == expected
    write_sections({"": ["# Title", "", "first"], "One": ["new"]}, page)
    assert page.read_text() == expected


def test_a_clock_divides_all_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    arrivals = Arrivals()
    clock = StepClock(arrivals)
    arrivals.note(2)  # a block of two batches, read ahead
    for step in range(8):
        clock.on_train_batch_begin(step)
        if step >= 2:
            now += 0.25  # for data that come one by one from here on
            arrivals.note(1)
        now += 1.0
        with clock.held():
            now += 0.5
        clock.on_train_batch_end(step)
        now += 0.125  # a callback
    clock.on_epoch_end(0)
    times = clock.agree(Alone(), None)
    assert times is not None
    assert times.steps == 5  # except the first three
    # The last step ends with its own end.
    assert times.data == 0.25
    assert times.compute == pytest.approx(1.0 + 0.125 * 4 / 5)
    assert (times.communication, times.waiting) == (0.5, 0.0)
    assert len(times.stretches) == 5


def test_a_clock_divides_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    arrivals = Arrivals()
    clock = StepClock(arrivals)
    for step in range(0, 20, 4):
        clock.on_train_batch_begin(step)
        for pause in (0.25, 0.0, 0.0, 0.5):  # the second and the third are read ahead
            now += pause
            arrivals.note(1)
            now += 1.0
        clock.on_train_batch_end(step + 3)
    clock.on_epoch_end(0)
    times = clock.agree(Alone(), None)
    assert times is not None
    assert (times.steps, times.data, times.compute) == (8, 0.75 / 4, 1.0)


def late_data(context: Any) -> Any:
    """Delay batches on worker 1."""
    import tensorflow as tf

    rank = context.rank

    def make(number: Any) -> Any:
        time.sleep(PAUSE * rank)
        generator = np.random.default_rng(int(number))
        return generator.normal(size=(16, 8)).astype("float32"), generator.integers(0, 3, 16)

    def read(number: Any) -> Any:
        x, y = tf.numpy_function(make, [number], (tf.float32, tf.int64))
        return tf.ensure_shape(x, (16, 8)), tf.ensure_shape(y, (16,))

    return tf.data.Dataset.range(24).map(read)


class Two(keras.utils.PyDataset):
    """Return two batches."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.zeros((8, 8), "float32"), np.zeros(8, "int64")


def train_late(workers: int, batch_size: int) -> TrainResult:
    return pybackend.barrier_train("local", build_dense, late_data, workers=workers, verbose=0)


@pytest.mark.full
def test_time_is_told_apart_by_what_takes_it(tmp_path: Path, capsys: Any) -> None:
    found = []

    def train(workers: int, batch_size: int) -> TrainResult:
        found.append(train_late(workers, batch_size))
        return found[-1]

    result = pybackend.bench_scale(train, (1, 2), mode="weak", batch_size=16)
    early, late = (worker.step_times for worker in found[1].workers)
    assert early is not None
    assert late is not None
    # A batch is read while the step before it computes: no step is shorter than a pause, and the
    # rest of the pause is time for data, regardless of the machine's speed.
    assert sum(getattr(late, part) for part in PARTS) >= 0.8 * PAUSE
    assert late.data > 2 * early.data
    assert early.waiting > late.waiting
    assert early.communication == late.communication
    assert late.steps == early.steps == 21
    for worker in found[1].workers:
        times = worker.step_times
        assert times is not None
        assert sum(getattr(times, part) for part in PARTS) * times.steps < worker.seconds
    one, two = result.rows
    assert (one.workers, two.workers, two.batch_size) == (1, 2, 16)
    assert two.seconds == pytest.approx(sum(getattr(two, part) for part in PARTS))
    assert two.efficiency == pytest.approx(one.seconds / two.seconds)
    assert two.speedup == pytest.approx(two.rows_per_second / one.rows_per_second)
    assert capsys.readouterr().out.count(" ms a step") == 2
    projection = result.project(480)
    written = json.loads(result.to_json(tmp_path / "scaling.json", projection))
    assert json.loads((tmp_path / "scaling.json").read_text()) == written
    assert [row["workers"] for row in written["rows"]] == [1, 2]
    assert written["projection"]["rows"][-1]["workers"] == 480
    figure = result.plot(tmp_path / "scaling.png", projection)
    assert len(figure.axes) == 2
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    assert "weak" in str(result)
    assert "480" in str(projection)


SCRIPT = """
import sys
import numpy as np
import pybackend

def build():
    import keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.zeros((320, 4), "float32")
print("arguments", sys.argv[1:])
pybackend.barrier_train("local", build, (x, x[:, 0]), workers=7, batch_size=16, verbose=0)
"""


def test_a_script_trains_with_the_workers_that_are_wanted(tmp_path: Path, capfd: Any) -> None:
    script, figures = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    command = ["bench-scale", "--workers", "1,2", "--steps", "10", "--project", "8"]
    assert main([*command, "--json", str(figures), str(script), "--fast"]) == 0
    shown = capfd.readouterr()
    assert "arguments ['--fast']" in shown.err
    assert shown.out.startswith("1 worker, 16 rows each: ")
    found = json.loads(figures.read_text())
    rows = [(row["mode"], row["workers"], row["batch_size"], row["steps"]) for row in found["rows"]]
    # One worker trained once, for both.
    assert shown.out.count(" ms a step") == 3
    assert rows == [
        ("strong", 1, 16, 7),
        ("strong", 2, 8, 7),
        ("weak", 1, 16, 7),
        ("weak", 2, 16, 7),
    ]
    assert [row["workers"] for row in found["projection"]["rows"]] == [4, 8, 4, 8]


def test_an_order_sets_workers_and_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = TrainingCall(
        spark=None,
        model=None,
        data=None,
        options={
            "workers": 7,
            "batch_size": 64,
            "callbacks": [],
            "epochs": 3,
            "recovery": pybackend.Recovery("kept", resume=True, timeout=9),
            "model_options": pybackend.ModelOptions("model.h5", safe_mode=False),
        },
    )

    def settle(workers: int, is_shared: bool, batch_size: int | None, **changes: Any) -> Any:
        order = ScaleOrder(workers, is_shared, batch_size, None, str(tmp_path))
        monkeypatch.setenv(VARIABLE, write_order(order)[VARIABLE])
        return HOOK.resolve(given.with_options(**changes))

    found = settle(4, True, None)
    options = found.options
    assert (options["workers"], options["batch_size"], options["epochs"]) == (4, 16, 3)
    # Checkpoints and model files of real trainings are not used.
    assert options["recovery"] == pybackend.Recovery(timeout=9)
    assert options["model_options"] == pybackend.ModelOptions(safe_mode=False)
    assert not found.shares_memory
    assert settle(4, False, None).options["batch_size"] == 64
    assert settle(4, True, 128).options["batch_size"] == 32
    with pytest.raises(InputError, match="64 rows cannot be shared equally by 3 workers"):
        settle(3, True, None)
    with pytest.raises(InputError, match="leave out ParameterServer"):
        settle(2, False, None, exchange=pybackend.ParameterServer())
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ClusterError, match="TFDIST_BENCH_SCALE is set, but"):
        HOOK.resolve(given)
    assert read_scale(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("is_shared", "data", "named"),
    [
        (True, late_data, "a `data` function returns belong to one worker"),
        (False, Two(), "the workers share the batches of `data`"),
    ],
)
def test_batches_that_cannot_be_of_that_size_are_refused(
    is_shared: bool, data: Any, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = ScaleOrder(2, is_shared, None, None, str(tmp_path))
    monkeypatch.setenv(VARIABLE, write_order(order)[VARIABLE])
    with pytest.raises(InputError, match=named):
        pybackend.barrier_train("local", build_dense, data, verbose=0)


@pytest.mark.parametrize(("value", "count"), [(None, "0"), ("{}", "1")])
def test_only_processes_of_the_command_have_the_hook(value: str | None, count: str) -> None:
    variables = {name: text for name, text in os.environ.items() if name != VARIABLE}
    program = "import sys, pybackend; from pybackend.core.api import training_hooks; "
    program += "assert not any(name.startswith('pybackend.scaling') for name in sys.modules); "
    program += "print(len(training_hooks()))"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env=variables if value is None else {**variables, VARIABLE: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == count


def test_a_script_does_not_hand_its_training_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(InputError, match=r"bench-scale waits for the training: call barrier_train"):
        pybackend.submit_training("local", build_dense, np.zeros((8, 8)))


def test_a_process_whose_variable_was_unset_trains_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "nothing of bench-scale's")
    with pytest.raises(ClusterError, match=f"{VARIABLE} is set, but not by .* Unset it"):
        pybackend.plan("local", build_dense, (np.zeros((8, 8)), np.zeros(8)))
    monkeypatch.delenv(VARIABLE)
    assert pybackend.plan("local", build_dense, (np.zeros((8, 8)), np.zeros(8)), workers=1).workers


def test_rows_of_a_step_are_counted() -> None:
    reports = [WorkerReport(rank, "h", 1, rows=100, steps=14) for rank in range(2)]
    result = TrainResult(b"", "h5", "", {}, reports, 1.0, 0, epochs=2)
    assert count_rows(result, None) == pytest.approx(400 / 14)
    assert count_rows(result, 10) == 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "specify a script"),
        (["missing.py"], "the script missing.py cannot be read"),
        (["train.sh"], "must be a .py or a .R file, not train.sh"),
        (["broken.py"], "is not Python"),
        (["--json", "no/such/folder.json", "train.py"], "no/such/folder.json cannot be written"),
        (["--plot", "a.txt", "train.py"], "not 'a.txt'"),
        (
            ["--workers", "2", "--project", "480", "train.py"],
            "--project needs at least two values",
        ),
        (["--project", "1", "train.py"], "--project must be at least 2 workers"),
        (["--workers", "1,3", "--batch-size", "64", "train.py"], "cannot be shared equally by 3"),
        (["--workers", "2,2", "train.py"], "`workers` contains a number twice"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('never run')")
    (tmp_path / "train.sh").write_text("")
    (tmp_path / "broken.py").write_text("def")
    assert main(["bench-scale", *arguments]) == 1
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.out == ""


def test_a_script_does_not_outlive_the_command(tmp_path: Path) -> None:
    script, mark = tmp_path / "train.py", tmp_path / "pid"
    text = "import os, pathlib, time\n"
    text += f"pathlib.Path({str(mark)!r}).write_text(f'{{os.getpid()}} ')\n"
    script.write_text(text + "time.sleep(600)\n")
    command = [sys.executable, "-m", "pybackend", "bench-scale", "--workers", "1", str(script)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_for(lambda: mark.exists() and mark.read_text().endswith(" "))
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "train.py"]


def test_a_model_is_not_taken_for_a_function() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(InputError, match=r"a function that calls barrier_train\(\), or"):
        pybackend.bench_scale(model)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("raise SystemExit(3)", "train.py exited with status 3 in the run with 1 worker: see"),
        ("print('hello')", "train.py did not call barrier_train()"),
    ],
)
def test_a_script_that_does_not_train(content: str, named: str, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(content)
    assert main(["bench-scale", "--workers", "1", str(script)]) == 1
    assert named in capfd.readouterr().err
