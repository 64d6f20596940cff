"""Learning rates scaled with the number of workers: at each step, those of the definition."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from replicas import WORKERS, Case, check_equal, named
from test_exact_cases import OwnStep, X, Y, dense, subclassed

from pybackend import Exchange, InputError, ScaleLearningRate
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.worker_options import check_scale_lr
from pybackend.core.model.checks import check_model
from pybackend.core.model.view import ModelView

EPOCHS = 3


class Rates(keras.callbacks.Callback):
    """Train in one process at the rates of a definition, set before each step."""

    def __init__(self, scale: ScaleLearningRate) -> None:
        super().__init__()
        self._scale = scale
        self._epoch = 0
        self._base = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._base = float(self.model.optimizer.learning_rate.numpy())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        done = self._epoch + batch / self.params["steps"]
        self.model.optimizer.learning_rate = self._base * self._scale.multiple(WORKERS, done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["learning_rate"] = float(self.model.optimizer.learning_rate.numpy())


SQRT = ScaleLearningRate("sqrt", warmup_epochs=1.5, decay={2: 0.25})
LINEAR = ScaleLearningRate("linear", warmup_epochs=2)


def optimizer(kind: Any, **options: Any) -> Any:
    return lambda: kind(0.05, **options)


def case(scale: ScaleLearningRate, make: Any, **options: Any) -> Case:
    settings = {"exchange": Exchange(scale_lr=scale)}
    return Case(make, (X, Y), epochs=EPOCHS, settings=settings, tolerance=1e-5, **options)


def dense_of(kind: Any, **compiled: Any) -> Any:
    return dense(optimizer=optimizer(kind), **compiled)


CASES = {
    "sqrt, warm-up, decay": case(SQRT, dense_of(keras.optimizers.Adam)),
    "several steps at once": case(LINEAR, dense_of(keras.optimizers.SGD, steps_per_execution=3)),
    "compiled by XLA": case(SQRT, dense_of(keras.optimizers.Adam, jit_compile=True)),
    "a train_step of its own": case(
        LINEAR,
        subclassed(OwnStep),
        custom_objects={"OwnStep": OwnStep},
    ),
    "by the rule alone, steps without rows": Case(
        dense_of(keras.optimizers.SGD),
        (X[:7], Y[:7]),
        batch_size=1,
        settings={"exchange": Exchange(scale_lr="linear")},
    ),
}


# One of each type: `make test-full` trains the others, too.
DAILY = [
    "a train_step of its own",
]


@pytest.mark.parametrize("name", named(CASES, DAILY))
def test_steps_have_the_rates_of_the_definition(name: str, trained: dict[str, Any]) -> None:
    case, found = CASES[name], trained[name]
    scale = check_scale_lr(case.settings["exchange"].scale_lr)
    assert scale is not None
    check_equal(case, found, [Rates(scale)])
    # The model can be trained further: its rate is the user's.
    assert float(found.model.optimizer.learning_rate.numpy()) == np.float32(
        case.build().optimizer.learning_rate.numpy()
    )


def test_a_rate_warms_up_and_decays() -> None:
    scale = ScaleLearningRate("linear", warmup_epochs=2, decay={3: 0.1, 1: 0.5})
    epochs = [0, 0.5, 1, 2, 2.9, 3, 9]
    rates = [scale.multiple(5, done) for done in epochs]
    np.testing.assert_allclose(rates, [1, 2, 1.5, 2.5, 2.5, 0.5, 0.5])
    assert ScaleLearningRate("sqrt").multiple(9, 0) == 3
    assert [ScaleLearningRate("sqrt", 4).multiple(1, done) for done in epochs] == [1.0] * 7
    assert ScaleLearningRate(decay={0: 0.5}).multiple(2, 0) == 1


def test_options_of_r_and_of_json_become_pythons_own() -> None:
    given: Any = {"2": 0.25, np.int64(4): 1}
    scale = ScaleLearningRate("sqrt", np.float64(1.5), given)
    assert scale == ScaleLearningRate("sqrt", 1.5, {2: 0.25, 4: 1.0})
    assert check_scale_lr("sqrt") == ScaleLearningRate("sqrt")
    assert check_scale_lr(None) is None
    job = TrainingJob(2, exchange=Exchange(scale_lr=scale))
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "cubic"}, "`rule` must be 'linear' or 'sqrt', not 'cubic'"),
        ({"warmup_epochs": -1}, "`warmup_epochs` must be at least 0, not -1"),
        ({"warmup_epochs": math.inf}, "`warmup_epochs` must be at least 0"),
        ({"decay": 0.5}, "`decay` must map epochs to multipliers of the learning rate"),
        ({"decay": {}}, "`decay` must map epochs"),
        ({"decay": {1.5: 0.1}}, "it has the epoch 1.5"),
        ({"decay": {"one": 0.1}}, "it has the epoch 'one'"),
        ({"decay": {1: 0}}, "it has the multiplier 0 for 1"),
        ({"decay": {1: 0.1, "1": 0.2}}, "`decay` has the epoch 1 twice"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        ScaleLearningRate(**options)
    assert message in str(error.value)


def refused(make: Any) -> str:
    job = TrainingJob(2, exchange=Exchange(scale_lr="linear"))
    with pytest.raises(InputError) as error:
        check_model(ModelView(make()), job)
    return str(error.value)


def test_a_rate_that_is_no_number_is_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for rate in (schedule, lambda: 0.1):
        message = refused(dense(optimizer=lambda rate=rate: keras.optimizers.SGD(rate)))
        assert "that of SGD is a schedule or a function: use a number" in message


def test_several_optimizers_are_refused() -> None:
    def build() -> Any:
        model = subclassed(OwnStep)()
        model.second = keras.optimizers.SGD(0.1)
        return model

    assert "but the model has others (second)" in refused(build)
