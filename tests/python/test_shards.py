"""The optimizer's state in parts: the same bits as with the whole state on every worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import full
from hypothesis import given
from hypothesis import strategies as st
from replicas import Case, Trained, chosen, named, train_all
from test_exact_cases import OwnStep, X, Y, subclassed

from pybackend import (
    Elastic,
    Exchange,
    InputError,
    Recovery,
    WorkerFailedError,
    barrier_train,
    plan,
)
from pybackend.core.engine.exchange.shards import assign_owners, list_state
from pybackend.types import TrainResult

layers, optimizers = keras.layers, keras.optimizers
WHOLE, SHARDED = Exchange(), Exchange(shard_optimizer=True)
TABLE = np.random.default_rng(2).integers(0, 50, (60, 5))


def network(
    optimizer: Callable[[], Any], constraint: Any = None, dtype: Any = None, **compiled: Any
) -> Any:
    def build() -> Any:
        model = keras.Sequential(
            [
                keras.Input(X.shape[1:]),
                layers.Dense(24, activation="relu", kernel_constraint=constraint),
                layers.BatchNormalization(),
                layers.Dense(16, activation="tanh", dtype=dtype),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **compiled)
        return model

    return build


def tables() -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Embedding(50, 6), layers.Flatten()])
    model.add(layers.Dense(1))
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def precise() -> Any:
    model = keras.Sequential([keras.Input(X.shape[1:])])
    for units in (8, 3):
        model.add(layers.Dense(units, dtype="float64"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1), loss)
    return model


class Change(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that changes the model at the beginning of the training."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if self.what == "layers":
            self.model.layers[0].trainable = False
        elif self.what == "schedule":
            optimizer.learning_rate = schedule()
        else:
            optimizer.learning_rate = 0.01 * (1 + int(os.environ["TFDIST_RANK"]))


def case(optimizer: Callable[[], Any], *options: Any, **compiled: Any) -> Case:
    return Case(network(optimizer, *options, **compiled), (X, Y))


def schedule() -> Any:
    return optimizers.schedules.ExponentialDecay(0.02, 3, 0.9)


CASES = {
    "Adam": case(lambda: optimizers.Adam(0.01)),
    "SGD, momentum": case(lambda: optimizers.SGD(0.02, momentum=0.9, nesterov=True)),
    "global_clipnorm": case(lambda: optimizers.Adam(0.01, global_clipnorm=0.1)),
    "two types": case(lambda: optimizers.Adam(0.01), None, "float64"),
    "bfloat16": case(lambda: optimizers.Adam(0.01), None, "mixed_bfloat16"),
    "AdamW": case(lambda: optimizers.AdamW(0.01, weight_decay=0.1)),
    "Adam, amsgrad": case(lambda: optimizers.Adam(0.01, amsgrad=True)),
    "Adamax": case(lambda: optimizers.Adamax(0.01)),
    "Nadam": case(lambda: optimizers.Nadam(0.01)),
    "RMSprop": case(lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True)),
    "Adagrad": case(lambda: optimizers.Adagrad(0.05)),
    "Adadelta": case(lambda: optimizers.Adadelta(1.0)),
    "Ftrl": case(lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.001)),
    "Lion": case(lambda: optimizers.Lion(0.003)),
    "Lamb": case(lambda: optimizers.Lamb(0.01)),
    "Adafactor": case(lambda: optimizers.Adafactor(0.02)),
    "Muon": case(lambda: optimizers.Muon(0.02)),
    "ScheduleFreeAdamW": case(lambda: optimizers.ScheduleFreeAdamW(0.01)),
    "clipnorm": case(lambda: optimizers.Adam(0.01, clipnorm=0.05)),
    "clipvalue": case(lambda: optimizers.Adam(0.01, clipvalue=0.01)),
    "schedule": case(lambda: optimizers.Adam(schedule())),
    "averages": case(lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)),
    "averages overwrite": case(
        lambda: optimizers.SGD(0.02, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)
    ),
    "accumulation": case(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3)),
    "accumulation, averages": case(
        lambda: optimizers.SGD(
            0.02, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=1
        )
    ),
    "accumulation, constraint": case(
        lambda: optimizers.Adam(0.1, gradient_accumulation_steps=2), keras.constraints.MaxNorm(0.7)
    ),
    "several steps at once": case(lambda: optimizers.Adam(0.01), steps_per_execution=4),
    "eager": case(lambda: optimizers.Adam(0.01, global_clipnorm=0.1), run_eagerly=True),
    "steps without rows": Case(
        network(lambda: optimizers.Adam(0.01)), (X[:7], Y[:7]), batch_size=1
    ),
    "a table": Case(tables, (TABLE, TABLE[:, 0].astype("float32"))),
    "callback": replace(
        case(lambda: optimizers.Adam(0.01)),
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))],
    ),
}
CASES |= {
    "global_clipnorm, float64": Case(precise, (X, Y)),
    "freezing": replace(CASES["Adam"], callbacks=[Change("layers")]),
    "a schedule set later": replace(CASES["Adam"], callbacks=[Change("schedule")]),
}
BUCKETS = {"bucket_mb": 0.0005}


@pytest.fixture(scope="module")
def trained(request: Any, tmp_path_factory: Any) -> dict[str, Any]:
    """Results of both ways, by case."""
    both = {
        f"{name}, {way}": replace(each, settings=settings)
        for name, each in chosen(CASES, request).items()
        for way, settings in (
            ("whole", {"exchange": replace(WHOLE, **BUCKETS)}),
            ("sharded", {"exchange": replace(SHARDED, **BUCKETS)}),
        )
    }
    return train_all(both, tmp_path_factory.mktemp("cases"))


def same_bits(one: Any, other: Any) -> None:
    """Check that two models are equal, with their optimizers."""
    pairs = [(one.get_weights(), other.get_weights())]
    states = [[v.numpy() for v in model.optimizer.variables] for model in (one, other)]
    for own, others in [*pairs, (states[0], states[1])]:
        for a, b in zip(own, others, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", named(CASES, ["Adam", "SGD, momentum", "global_clipnorm"]))
def test_sharded_state_gives_the_same_bits(name: str, trained: dict[str, Any]) -> None:
    whole, sharded = trained[f"{name}, whole"], trained[f"{name}, sharded"]
    assert isinstance(whole, Trained), whole
    assert isinstance(sharded, Trained), sharded
    same_bits(whole.model, sharded.model)
    assert len(set(sharded.digests)) == 1
    assert whole.history == sharded.history
    assert sharded.audit
    assert whole.audit
    if name in ("several steps at once", "accumulation, averages", "accumulation, constraint"):
        assert "need the other workers' weights" in sharded.audit["skipped"][0]
    else:
        assert min(sharded.audit["steps"], whole.audit["steps"]) >= 1
        assert sharded.audit["skipped"] == whole.audit["skipped"]


def fit(exchange: Exchange, epochs: int = 3, model: Any = None, **options: Any) -> TrainResult:
    """Train a few epochs, on two workers by default."""
    keras.utils.set_random_seed(1)
    model = model or network(lambda: optimizers.Adam(0.01))()
    options.setdefault("workers", 2)
    options.setdefault("batch_size", 6)
    options |= {"epochs": epochs, "seed": 3, "verbose": 0, "shuffle": False}
    return barrier_train("local", model, (X, Y), exchange=exchange, **options)


def test_the_result_is_trained_further_like_an_unsharded_one(tmp_path: Path) -> None:
    once, then = (fit(exchange, epochs=2) for exchange in (WHOLE, SHARDED))
    same_bits(once.model, then.model)
    twice = [
        fit(exchange, 2, result.model) for exchange, result in ((WHOLE, once), (SHARDED, then))
    ]
    same_bits(twice[0].model, twice[1].model)
    assert twice[0].history == twice[1].history


@pytest.mark.parametrize(
    ("first", "second", "workers"),
    [
        (SHARDED, SHARDED, (2, 3)),
        full(SHARDED, WHOLE, (3, 2)),
        full(WHOLE, SHARDED, (2, 2)),
        full(SHARDED, SHARDED, (3, 1)),
    ],
)
def test_a_checkpoint_is_resumed_with_other_workers_and_options(
    first: Exchange, second: Exchange, workers: tuple[int, int], tmp_path: Path
) -> None:
    found = []
    for name, exchanges in (("sharded", (first, second)), ("whole", (WHOLE, WHOLE))):
        options = Recovery(str(tmp_path / name), resume=True)
        for exchange, count, epochs in zip(exchanges, workers, (2, 4), strict=True):
            result = fit(exchange, epochs, workers=count, recovery=options)
        found.append(result)
    same_bits(found[0].model, found[1].model)
    assert found[0].history == found[1].history


class FailUnless(keras.callbacks.Callback):
    """Fail in the second epoch unless a file exists."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and batch == 5 and not Path(self.path).exists():
            raise RuntimeError("on purpose")


@pytest.mark.full
def test_a_checkpoint_within_an_epoch_has_the_state_of_all_workers(tmp_path: Path) -> None:
    kept = Recovery(str(tmp_path / "kept"), every=4, resume=True)
    callback = FailUnless(str(tmp_path / "exists"))
    with pytest.raises(WorkerFailedError, match="on purpose"):
        fit(SHARDED, recovery=kept, callbacks=[callback])
    (tmp_path / "exists").touch()
    resumed = fit(SHARDED, recovery=kept, callbacks=[callback])
    expected = fit(WHOLE, callbacks=[callback])
    same_bits(resumed.model, expected.model)
    assert resumed.history == expected.history


MODEL = network(lambda: optimizers.Adam(0.01))


def custom() -> Any:
    return subclassed(OwnStep)()


def scaled() -> Any:
    return network(lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)))()


def accumulating() -> Any:
    return network(
        lambda: optimizers.Adam(0.01, global_clipnorm=1.0, gradient_accumulation_steps=2)
    )()


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (MODEL, {"workers": Elastic(2)}, "state of a lost worker would be lost. Use a fixed"),
        (custom, {}, "does not support a model with its own train_step"),
        (scaled, {}, "the optimizer LossScaleOptimizer, which looks .* 'mixed_bfloat16'"),
        (accumulating, {}, "global_clipnorm together with gradient_accumulation_steps"),
        (MODEL, {"workers": 9}, "has only 8 for 9 workers"),
        (MODEL, {"callbacks": [keras.callbacks.ModelCheckpoint("x.keras")]}, "save_weights_only"),
        (MODEL, {"callbacks": [keras.callbacks.SwapEMAWeights()]}, "SwapEMAWeights needs the wh"),
    ],
    ids=["elastic", "train_step", "loss scale", "clipping", "too many", "saving", "averages"],
)
def test_what_it_does_not_support_is_an_error_before_anything_starts(
    build: Any, options: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan("local", build(), (X, Y), exchange=SHARDED, **{"workers": 2, **options})


@pytest.mark.parametrize(
    "options", [{"transport": "tf"}, {"compression": "fp16"}, {"shard_optimizer": 1}]
)
def test_wrong_options_are_errors(options: Any) -> None:
    with pytest.raises(InputError, match="shard_optimizer"):
        Exchange(**{"shard_optimizer": True, **options})


@pytest.mark.full
def test_a_learning_rate_that_differs_between_workers_is_found() -> None:
    with pytest.raises(WorkerFailedError, match="learning_rate' of worker 1 differs"):
        fit(SHARDED, callbacks=[Change("learning rate")])


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(WHOLE, SHARDED), (SHARDED, WHOLE)])
def test_accumulated_gradients_are_resumed_in_the_other_way(
    first: Exchange, second: Exchange, tmp_path: Path
) -> None:
    def model() -> Any:
        keras.utils.set_random_seed(1)
        return network(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=4))()

    kept = Recovery(tmp_path / "kept", every=3, resume=True)
    callback = FailUnless(str(tmp_path / "exists"))
    with pytest.raises(WorkerFailedError, match="on purpose"):
        fit(first, model=model(), recovery=kept, callbacks=[callback])
    (tmp_path / "exists").touch()
    resumed = fit(second, model=model(), recovery=kept, callbacks=[callback])
    same_bits(resumed.model, fit(first, model=model(), callbacks=[callback]).model)


def test_one_worker_needs_no_parts_and_supports_everything() -> None:
    plan("local", scaled(), (X, Y), workers=1, exchange=SHARDED)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_parts_are_nearly_as_large_as_each_other(sizes: list[int], ranks: int) -> None:
    owners = assign_owners(sizes, ranks)
    totals = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks)]
    if len(sizes) >= ranks:
        assert set(owners) == set(range(ranks))
    assert max(totals) <= sum(sizes) / ranks + max(sizes)


def test_the_order_of_the_whole_state_is_keras_s() -> None:
    for optimizer in (optimizers.Adam(amsgrad=True, use_ema=True), optimizers.Nadam()):
        model = network(lambda: optimizer)()  # noqa: B023
        variables = model.trainable_variables
        copy = type(optimizer).from_config(optimizer.get_config())
        found = list_state(copy, dict(enumerate(variables)))
        optimizer.build(variables)
        assert len(found) == len(optimizer.variables)
        for ((number, _), dtype), state in zip(found, optimizer.variables, strict=True):
            assert state.dtype == dtype
            if number is not None:
                assert state.name.startswith(variables[number].path.replace("/", "_"))
