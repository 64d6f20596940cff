"""A killed and resumed training ends like an uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import full, wait_for, worker_processes
from killing import KillAt
from replicas import Case, Trained, chosen, named, train_all

from pybackend import (
    Exchange,
    InputError,
    LocalSteps,
    Recovery,
    ScaleLearningRate,
    SerializationError,
    WorkerFailedError,
    barrier_train,
    load_checkpoint,
)
from pybackend.core.errors import TfdistError
from pybackend.core.model.compare import hash_weights
from pybackend.types import TrainResult

EPOCHS, STEPS = 4, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 6)).astype("float32")
Y = RNG.integers(0, 3, 160)


@keras.saving.register_keras_serializable("test_recovery")
class Growing(keras.layers.Layer):
    """Counts its steps in a variable that only TensorFlow knows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        import tensorflow as tf

        self.steps = tf.Variable(0.0, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1.0)
        return inputs * keras.ops.cast(1 + 0.01 * self.steps, inputs.dtype)


def build() -> Any:
    """Build a model with every type of state: dropout, moving averages, momenta."""
    return build_with()


def build_with(policy: str = "float32", accumulated: int | None = None, **settings: Any) -> Any:
    """Build it with a dtype policy, accumulated gradients, and settings of `compile`."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="relu", dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.Dropout(0.3, dtype=policy),
            Growing(dtype=policy),
            layers.Dense(3, dtype=policy),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.02, gradient_accumulation_steps=accumulated)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    return model


def train(*callbacks: Any, **settings: Any) -> TrainResult:
    listed = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05),
        *callbacks,
    ]
    defaults = {"workers": 2, "epochs": EPOCHS, "batch_size": 10, "seed": 5, "verbose": 0}
    data = {"validation_data": (X[:20] + 0.1, Y[:20])}
    x = settings.pop("rows", X)
    return barrier_train(None, build, (x, Y), callbacks=listed, **defaults | data | settings)


@pytest.fixture(scope="module")
def undisturbed() -> TrainResult:
    return train(KillAt(-1, 0, 0, Path("never")))


def check_same(found: TrainResult, expected: TrainResult) -> None:
    assert found.history == expected.history
    assert found.workers[0].weights_sha256 == expected.workers[0].weights_sha256
    assert [w.steps for w in found.workers] == [w.steps for w in expected.workers]


@pytest.mark.parametrize(
    ("every", "draw", "transport"), [(3, 1, "tcp"), full("epoch", 3, "tcp"), full("0.01s", 4, "tf")]
)
def test_killed_at_a_random_step_it_ends_the_same(
    every: Any, draw: int, transport: Any, undisturbed: TrainResult, tmp_path: Path, capsys: Any
) -> None:
    random = np.random.default_rng(draw)
    moment = [int(random.integers(most)) for most in (2, EPOCHS, STEPS)]
    kept = Recovery(str(tmp_path / "kept"), every=every)
    callbacks = [KillAt(*moment, tmp_path / "mark"), log_to(tmp_path)]
    exchange = Exchange(transport=transport)
    found = train(*callbacks, recovery=replace(kept, restarts=1), exchange=exchange, verbose=1)
    if transport == "tf":  # which rounds differently
        undisturbed = train(KillAt(-1, 0, 0, Path("never")), exchange=exchange)
    check_same(found, undisturbed)
    check_log(tmp_path, found)
    assert capsys.readouterr().out.count("SIGKILL; restarting from the newest checkpoint") == 1


@pytest.mark.full
def test_told_to_end_all_keep_that_step_and_go_on_from_it(
    undisturbed: TrainResult, tmp_path: Path, capsys: Any
) -> None:
    told = KillAt(1, 1, 3, tmp_path / "mark", signal.SIGTERM)
    kept = Recovery(str(tmp_path / "kept"))
    found = train(told, log_to(tmp_path), recovery=replace(kept, restarts=1), verbose=1)
    check_same(found, undisturbed)
    check_log(tmp_path, found)
    said = capsys.readouterr().out
    # The request to leave is sent with the next step.
    assert "worker 1 on 127.0.0.1 failed: Preempted: the process received SIGTERM" in said
    assert "all workers left the training after epoch 2, step 5; a checkpoint was written" in said
    assert "training resumes from the checkpoint of epoch 2, step 5" in said


def log_to(folder: Path) -> Any:
    return keras.callbacks.CSVLogger(folder / "log.csv")


def check_log(folder: Path, result: TrainResult) -> None:
    first = [line.partition(",")[0] for line in (folder / "log.csv").read_text().splitlines()]
    assert first == ["epoch", *map(str, range(len(result.history["loss"])))]


def train_and_be_killed(folder: str) -> None:
    """Make a worker kill this process, the driver."""
    Path(folder, "mark.victim").write_text(str(os.getpid()))
    killer = KillAt(1, 1, 4, Path(folder) / "mark")
    train(killer, log_to(Path(folder)), recovery=Recovery(f"{folder}/kept", every=3))


@pytest.mark.full
def test_after_the_driver_was_killed_the_call_resumes(
    undisturbed: TrainResult, tmp_path: Path, capsys: Any
) -> None:
    program = f"import test_recovery; test_recovery.train_and_be_killed({str(tmp_path)!r})"
    path = {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", program]
    driver = subprocess.run(command, env={**os.environ, **path}, timeout=170)
    assert driver.returncode == -signal.SIGKILL
    wait_for(lambda: not worker_processes())
    again = [KillAt(1, 1, 4, tmp_path / "mark"), log_to(tmp_path)]
    kept = Recovery(str(tmp_path / "kept"), every=3)
    with pytest.raises(InputError, match="resume=True"):
        train(*again, recovery=kept)
    newest = max((tmp_path / "kept").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-9])
    found = train(*again, recovery=replace(kept, resume=True), seed=None, verbose=1)
    check_same(found, undisturbed)
    check_log(tmp_path, found)
    assert found.seed == undisturbed.seed
    said = capsys.readouterr().out
    assert "is damaged (its manifest was altered): skipped" in said
    assert "resumes from the checkpoint of epoch" in said


@pytest.mark.full
def test_a_training_that_has_ended_is_kept_and_may_go_on(
    undisturbed: TrainResult, tmp_path: Path
) -> None:
    never = KillAt(-1, 0, 0, Path("never"))
    half = train(never, recovery=tmp_path, epochs=2)
    damaged = replace(half, content=half.content[:40] + bytes(40) + half.content[80:])
    with pytest.raises(SerializationError, match="altered in transit") as caught:
        damaged.model  # noqa: B018
    (place,) = re.findall(r"load_checkpoint\('(.*)'\) returns its model", str(caught.value))
    loaded = load_checkpoint(place, model=build)
    assert hash_weights(loaded) == half.workers[0].weights_sha256
    assert int(loaded.optimizer.iterations.numpy()) == 2 * STEPS
    resuming = Recovery(tmp_path, resume=True)
    check_same(train(never, recovery=resuming, epochs=2), half)
    with pytest.raises(InputError, match="its `batch_size` was 10, but is now 20"):
        train(never, recovery=resuming, batch_size=20)
    with pytest.raises(WorkerFailedError, match="its `data` has different rows"):
        train(never, recovery=resuming, rows=X + 1)
    # An audit is no part of the training; those before it still count.
    unaudited = train(never, recovery=resuming, exchange=Exchange(audit=False))
    check_same(unaudited, undisturbed)
    assert half.audit is not None
    assert unaudited.audit is not None
    assert unaudited.audit.steps == half.audit.steps > 0
    more = train(never, recovery=resuming, workers=3, epochs=EPOCHS + 1)
    assert {k: v[:EPOCHS] for k, v in more.history.items()} == undisturbed.history
    assert more.audit is not None
    assert more.audit.steps > half.audit.steps


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints of half the training: two manifests and states, and the model's file."""
    folder = tmp_path_factory.mktemp("half")
    train(KillAt(-1, 0, 0, Path("never")), epochs=2, recovery=Recovery(str(folder), keep=2))
    return folder


DAMAGES = {
    "altered": lambda content: content[:-9] + bytes(byte ^ 1 for byte in content[-9:]),
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "missing": lambda content: None,
}


def damage(path: Path, how: str) -> None:
    content = DAMAGES[how](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ("*.json", "*.state", "model-*") for how in DAMAGES],
)
@pytest.mark.full
def test_with_any_file_damaged_a_training_resumes_to_the_same_end(
    kind: str, how: str, two_epochs: Path, undisturbed: TrainResult, tmp_path: Path
) -> None:
    found = sorted(path.name for path in two_epochs.glob(kind))
    assert len(found) == (1 if kind == "model-*" else 2)
    for number, name in enumerate(found):
        folder = tmp_path / str(number)
        shutil.copytree(two_epochs, folder)
        damage(folder / name, how)
        resumed = train(KillAt(-1, 0, 0, Path("never")), recovery=Recovery(folder, resume=True))
        check_same(resumed, undisturbed)
        if kind == "model-*":  # written again, for those who load it
            continue
        intact = load_checkpoint(str(folder), model=build)
        assert hash_weights(intact) == resumed.workers[0].weights_sha256


@pytest.mark.full
@pytest.mark.parametrize("how", DAMAGES)
def test_with_no_intact_checkpoint_nothing_is_lost(
    how: str, two_epochs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(two_epochs, folder)
    for path in folder.glob("*.state"):
        damage(path, how)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(TfdistError, match=r"no intact checkpoint .* all 2 are damaged"):
        train(KillAt(-1, 0, 0, Path("never")), recovery=Recovery(folder, resume=True))
    assert sorted(path.name for path in folder.iterdir()) == before


class DamageAndDie(KillAt):
    """Damages the newest file of some type when there are two checkpoints, and kills rank 0."""

    def __init__(self, folder: Path, kind: str, how: str, mark: Path) -> None:
        super().__init__(0, 2, 3, mark)
        self.folder, self.kind, self.how = str(folder), kind, how

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = (int(os.environ["TFDIST_RANK"]), self.epoch, batch)
        if now == self.moment and not Path(self.mark).exists():
            while len(list(Path(self.folder).glob("*.json"))) < 2:  # a thread writes them
                time.sleep(0.01)
            damage(max(Path(self.folder).glob(self.kind)), self.how)
        super().on_train_batch_end(batch, logs)


@pytest.mark.full
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["*.json", "*.state", "model-*"])
def test_a_restart_with_the_newest_file_damaged_ends_the_same(
    kind: str, how: str, undisturbed: TrainResult, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    killer = DamageAndDie(folder, kind, how, tmp_path / "mark")
    kept = Recovery(str(folder), every="epoch", keep=2)
    check_same(train(killer, recovery=replace(kept, restarts=1)), undisturbed)
    assert (tmp_path / "mark").exists()


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "averaged weights": (build, {"exchange": LocalSteps(3, compression="bf16")}),
    "bf16 on the wire": (
        partial(build_with, "mixed_bfloat16"),
        {"exchange": Exchange(compression="bf16")},
    ),
    "scaled losses": (partial(build_with, "mixed_float16"), {}),
    "scaled learning rate": (
        build,
        {
            "exchange": Exchange(
                scale_lr=ScaleLearningRate("linear", warmup_epochs=1.7, decay={1: 0.5})
            )
        },
    ),
    "accumulated gradients": (partial(build_with, accumulated=3), {}),
    "steps per execution, rows of all": (
        partial(build_with, steps_per_execution=3),
        {"shuffle": "global"},
    ),
}


@pytest.fixture(scope="module")
def variants(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this run's cases, trained without interruption, and resumed after a kill."""
    folder = tmp_path_factory.mktemp("variants")
    wanted = chosen(VARIANTS, request)

    def cases(resume: bool) -> dict[str, Case]:
        return {
            name: Case(
                make,
                (X, Y),
                epochs=2,
                batch_size=10,
                settings={
                    **settings,
                    "recovery": Recovery(folder / name, every=3, keep=99, resume=resume),
                },
                callbacks=[keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05)],
            )
            for name, (make, settings) in wanted.items()
        }

    whole = train_all(cases(False), folder / "whole")
    for name in wanted:
        kept = sorted((folder / name).glob("*.json"))
        within = [path for path in kept if path.stem >= "checkpoint-000001-000000001"]
        for later in within[1:]:
            later.unlink()
        assert not within[0].stem.endswith("-000000000")
    return whole, train_all(cases(True), folder / "resumed")


@pytest.mark.parametrize(
    "name",
    named(VARIANTS, []),
)
def test_a_variant_resumes_bit_for_bit(name: str, variants: tuple[Any, Any]) -> None:
    whole, resumed = (found[name] for found in variants)
    assert isinstance(whole, Trained), whole
    assert isinstance(resumed, Trained), resumed
    assert any("resumes from the checkpoint of epoch 2, step " in note for note in resumed.notes)
    assert resumed.history == whole.history
    assert resumed.digests == whole.digests
    optimizers = [
        [v.numpy().tobytes() for v in one.model.optimizer.variables] for one in (whole, resumed)
    ]
    assert optimizers[0] == optimizers[1]


def test_a_training_may_resume_with_another_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(rate: Any, activation: str = "relu") -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(5, activation=activation), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(rate), "mse")
        return model

    def resume(rate: Any, epochs: int, **settings: Any) -> Any:
        kept = Recovery(tmp_path / "kept", resume=True)
        options = {"workers": 2, "batch_size": 20, "shuffle": False, "seed": 1, "verbose": 2}
        return barrier_train(
            "local", compiled(rate, **settings), (X, Y), epochs=epochs, recovery=kept, **options
        )

    resume(0.01, 1)
    with pytest.raises(
        WorkerFailedError, match="`activation` of Dense 'dense' was 'relu', but is now"
    ):
        resume(0.01, 2, activation="tanh")
    with pytest.raises(WorkerFailedError, match=r"was 0\.01, but is now CosineDecay\. Compi"):
        resume(keras.optimizers.schedules.CosineDecay(0.01, 8), 2)
    resume(0.002, 2)
    shown = capsys.readouterr().out
    assert "the learning rate was 0.01, and is 0.002 from here on" in shown
    lowered = resume(0.002, 3)  # it is the checkpoint's by now
    assert "the learning rate was" not in capsys.readouterr().out
    alone = compiled(0.01)
    alone.fit(X, Y, batch_size=40, epochs=1, shuffle=False, verbose=0)
    alone.optimizer.learning_rate = 0.002
    alone.fit(X, Y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(lowered.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert float(lowered.model.optimizer.learning_rate) == np.float32(0.002)


class Lowers(keras.callbacks.Callback):
    """Changes the learning rate after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.004


def test_a_rate_that_callbacks_changed_stays_theirs_and_a_schedule_is_stored(
    tmp_path: Path,
) -> None:
    def resume(name: str, rate: Any, epochs: int, *callbacks: Any) -> Any:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        kept = Recovery(tmp_path / name, resume=True)
        options = {"workers": 1, "callbacks": list(callbacks), "seed": 1, "verbose": 0}
        return barrier_train("local", model, (X, Y), epochs=epochs, recovery=kept, **options)

    resume("changed", 0.01, 1, Lowers())
    with pytest.raises(WorkerFailedError, match=r"from 0\.01 to 0\.004 since .* with 0\.01, as"):
        resume("changed", 0.002, 2, Lowers())
    resume("changed", 0.01, 2, Lowers())
    schedules = [keras.optimizers.schedules.CosineDecay(rate, 50) for rate in (0.1, 0.01)]
    resume("schedule", schedules[0], 1)
    resume("schedule", schedules[1], 2)
    rate = load_checkpoint(tmp_path / "schedule").optimizer.get_config()["learning_rate"]
    assert rate["config"]["initial_learning_rate"] == 0.01
