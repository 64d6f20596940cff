"""Every optimizer, loss, metric and callback of Keras: equal to one process, or why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from replicas import Case, check_equal, sampled
from test_exact_cases import LOGITS, TAGS, WORDS, X, Y, dense, stack

from pybackend.core.job.worker_options import Exchange

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(1200)

layers = keras.layers
_RNG = np.random.default_rng(9)
SHARES = _RNG.uniform(0.1, 0.9, (101, 3)).astype("float32")
SHARES /= SHARES.sum(axis=1, keepdims=True)
SIGNS = np.where(SHARES > 0.3, 1.0, -1.0).astype("float32")
ONE_HOT = np.eye(3, dtype="float32")[Y]


def _answers(loss: Mapping[str, Any], activation: str, **compiled: Any) -> Callable[[], Any]:
    """Return a builder of a model with an output for each loss."""

    def build() -> Any:
        inputs = keras.Input((8,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        outputs = {name: layers.Dense(3, activation=activation, name=name)(hidden) for name in loss}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {name: make() for name, make in loss.items()}, **compiled)
        return model

    return build


def optimizer_cases() -> dict[str, Case]:
    o = keras.optimizers

    def several() -> Any:
        return o.MultiOptimizer(o.OptimizerMap(o.SGD(0.1), {"(.*/)?bias": o.Adam(0.01)}))

    made: dict[str, Callable[[], Any]] = {
        "Adadelta": lambda: o.Adadelta(0.5),
        "Adafactor": lambda: o.Adafactor(0.01),
        "Adamax": lambda: o.Adamax(0.01),
        "Ftrl": lambda: o.Ftrl(0.05),
        "Lamb": lambda: o.Lamb(0.01),
        "MultiOptimizer": several,
        "Muon": lambda: o.Muon(0.01),
    }
    schedules = o.schedules
    rates: dict[str, Callable[[], Any]] = {
        "CosineDecay": lambda: schedules.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2),
        "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 3),
        "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
        "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([3], [0.1, 0.01]),
        "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 5),
    }

    def schedule_free() -> Any:
        model = dense(optimizer=lambda: o.ScheduleFreeAdamW(0.01))()
        # In a step of `fit`, Keras builds it again each time.
        model.optimizer.build(model.trainable_variables)
        return model

    return {
        "ScheduleFreeAdamW": Case(schedule_free, (X, Y), tolerance=1e-5),
        **{
            name: Case(dense(optimizer=make), (X, Y), tolerance=1e-5) for name, make in made.items()
        },
        **{
            name: Case(dense(optimizer=lambda make=make: o.SGD(make())), (X, Y))
            for name, make in rates.items()
        },
    }


def loss_cases() -> dict[str, Case]:
    n = keras.losses
    numbers = {
        "mae": n.MeanAbsoluteError,
        "mape": n.MeanAbsolutePercentageError,
        "mse": n.MeanSquaredError,
        "msle": n.MeanSquaredLogarithmicError,
        "huber": lambda: n.Huber(0.1),
        "log_cosh": n.LogCosh,
        "cosine": n.CosineSimilarity,
        "kl": n.KLDivergence,
        "poisson": n.Poisson,
    }
    signs = {"hinge": n.Hinge, "squared": n.SquaredHinge, "categorical": n.CategoricalHinge}
    classes = {
        "binary": n.BinaryCrossentropy,
        "binary_focal": n.BinaryFocalCrossentropy,
        "categorical": n.CategoricalCrossentropy,
        "categorical_focal": n.CategoricalFocalCrossentropy,
    }
    codes = {
        "sparse": n.SparseCategoricalCrossentropy,
        "generalized": n.CategoricalGeneralizedCrossEntropy,
    }
    whole = {"dice": n.Dice, "tversky": n.Tversky}
    return {
        "losses of numbers": Case(
            _answers(
                numbers,
                "sigmoid",
                loss_weights={name: 0.01 if name == "mape" else 1.0 for name in numbers},
            ),
            (X, dict.fromkeys(numbers, SHARES)),
        ),
        "losses of signs": Case(_answers(signs, "tanh"), (X, dict.fromkeys(signs, SIGNS))),
        "losses of classes": Case(
            _answers(classes, "softmax"), (X, dict.fromkeys(classes, ONE_HOT))
        ),
        "losses of codes": Case(_answers(codes, "softmax"), (X, dict.fromkeys(codes, Y))),
        "losses of whole batches": Case(
            _answers(whole, "sigmoid"),
            (X, dict.fromkeys(whole, ONE_HOT)),
            settings={"exchange": Exchange(loss_over="global batch")},
        ),
        "CTC": Case(
            stack(
                lambda: layers.Embedding(20, 4),
                lambda: layers.Dense(5, activation="softmax"),
                shape=(6,),
                loss=n.CTC,
            ),
            (WORDS, 1 + TAGS[:, :3]),
        ),
        "Tversky of each row": Case(
            stack(lambda: layers.Dense(3, activation="sigmoid"), loss=lambda: n.Tversky(axis=-1)),
            (X, ONE_HOT),
        ),
    }


def metric_cases() -> dict[str, Case]:
    m = keras.metrics
    signs = stack(
        lambda: layers.Dense(3, activation="tanh"),
        loss="mse",
        metrics=lambda: [
            m.Hinge(name="hinge"),
            m.SquaredHinge(name="squared"),
            m.CategoricalHinge(name="categorical"),
            m.LogCoshError(name="log_cosh"),
            m.MeanSquaredError(name="mse"),
            m.PearsonCorrelation(name="pearson"),
            m.ConcordanceCorrelation(name="concordance"),
            m.MeanMetricWrapper(keras.losses.mean_absolute_error, name="wrapped"),
        ],
    )
    shares = stack(
        lambda: layers.Dense(3, activation="softmax"),
        loss="mse",
        metrics=lambda: [
            m.MeanAbsolutePercentageError(name="mape"),
            m.MeanSquaredLogarithmicError(name="msle"),
            m.Poisson(name="poisson"),
            m.CategoricalCrossentropy(name="categorical"),
            m.CategoricalAccuracy(name="accuracy"),
            m.BinaryCrossentropy(name="binary"),
            m.OneHotIoU(3, [0, 2], name="iou"),
            m.OneHotMeanIoU(3, name="mean_iou"),
            m.PrecisionAtRecall(0.5, name="precision"),
            m.RecallAtPrecision(0.4, name="recall"),
            m.SpecificityAtSensitivity(0.5, name="specificity"),
            m.TrueNegatives(name="tn"),
            m.FalsePositives(name="fp"),
        ],
    )
    codes = stack(
        lambda: layers.Dense(3, activation="softmax"),
        loss="sparse_categorical_crossentropy",
        metrics=lambda: [
            m.SparseCategoricalAccuracy(name="accuracy"),
            m.SparseCategoricalCrossentropy(name="crossentropy"),
            m.SparseTopKCategoricalAccuracy(2, name="top"),
        ],
    )
    binary = stack(
        lambda: layers.Dense(1, activation="sigmoid"),
        loss="mse",
        metrics=lambda: [
            m.BinaryIoU(name="binary_iou"),
            m.IoU(2, [1], name="iou", sparse_y_pred=True),
            m.Accuracy(name="accuracy"),
        ],
    )
    return {
        "metrics of signs": Case(signs, (X, SIGNS)),
        "metrics of shares": Case(shares, (X, ONE_HOT)),
        "metrics of codes": Case(codes, (X, Y)),
        "metrics of one answer": Case(binary, (X, (Y[:, None] > 0).astype("float32"))),
    }


def callback_cases() -> dict[str, Case]:
    c = keras.callbacks
    validated = {"epochs": 5, "validation": (X[:31], Y[:31])}
    return {
        "EarlyStopping, best weights": Case(
            dense(optimizer=lambda: keras.optimizers.SGD(1.5)),
            (X, Y),
            callbacks=[c.EarlyStopping(patience=1, restore_best_weights=True)],
            **validated,
        ),
        "ReduceLROnPlateau": Case(
            dense(optimizer=lambda: keras.optimizers.SGD(1.0)),
            (X, Y),
            callbacks=[c.ReduceLROnPlateau(patience=1, min_delta=0.1)],
            **validated,
        ),
        "LearningRateScheduler": Case(
            dense(),
            (X, Y),
            epochs=3,
            callbacks=[c.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))],
        ),
        "TerminateOnNaN": Case(dense(), (X, Y), callbacks=[c.TerminateOnNaN()]),
    }


def layer_cases() -> dict[str, Case]:
    adapted = layers.Normalization()
    adapted.adapt(X)
    mean, variance = (
        np.ravel(keras.ops.convert_to_numpy(v)) for v in (adapted.mean, adapted.variance)
    )

    def attention() -> Any:
        words = keras.Input((6,))
        hidden = layers.Embedding(20, 4)(words)
        hidden = layers.LayerNormalization()(
            hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden)
        )
        model = keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))
        model.compile("sgd", LOGITS)
        return model

    return {
        "normalizations": Case(
            stack(
                lambda: layers.Normalization(mean=mean, variance=variance),
                lambda: layers.Dense(8),
                layers.LayerNormalization,
                lambda: layers.GroupNormalization(2),
                layers.RMSNormalization,
                layers.UnitNormalization,
                lambda: layers.Dense(3),
            ),
            (X, Y),
        ),
        "attention": Case(attention, (WORDS, Y)),
        "convolutions": Case(
            stack(
                lambda: layers.Conv1D(4, 3, padding="same", activation="gelu"),
                lambda: layers.SeparableConv1D(4, 2),
                layers.MaxPooling1D,
                layers.Flatten,
                layers.PReLU,
                lambda: layers.Dense(3),
                shape=(8, 1),
            ),
            (X[..., None], Y),
        ),
    }


CASES = {
    **optimizer_cases(),
    **loss_cases(),
    **metric_cases(),
    **callback_cases(),
    **layer_cases(),
}


@pytest.mark.parametrize("name", sampled(CASES, 2))
def test_workers_reach_what_one_process_reaches(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name], CASES[name].callbacks, name)


# Base classes, containers, and classes that write files or are tested elsewhere.
ELSEWHERE = {
    "optimizers": {"Optimizer", "OptimizerMap", "LossScaleOptimizer"},
    "losses": {"Loss"},
    "metrics": {"Metric", "Mean", "Sum"},
    "callbacks": {
        "Callback",
        "CallbackList",
        "BackupAndRestore",
        "CSVLogger",
        "History",
        "LambdaCallback",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "RemoteMonitor",
        "TensorBoard",
    },
    "optimizers.schedules": {"LearningRateSchedule"},
}


@pytest.mark.parametrize("group", ELSEWHERE)
def test_nothing_of_keras_is_left_out(group: str) -> None:
    holder: Any = keras
    for name in group.split("."):
        holder = getattr(holder, name)
    known = {name for name, value in vars(holder).items() if isinstance(value, type)}
    modules = ("test_exact_keras", "test_exact_cases", "test_exact_together")
    texts = [Path(__file__).with_name(f"{module}.py").read_text() for module in modules]
    used = set(re.findall(r"\w+", "".join(texts)))
    assert known - used - ELSEWHERE[group] == set()
