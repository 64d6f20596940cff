"""Models of many kinds: two workers get the result of one process on the same global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from replicas import Case, check_equal, sampled

from pybackend.core.job.worker_options import Exchange

# The first test waits until the workers have trained all cases.
# For all cases, which are trained together, on a busy machine.
pytestmark = pytest.mark.timeout(1200)

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(101, 8)).astype("float32")
Y = _RNG.integers(0, 3, 101)
SMALL_BUCKETS = {"exchange": Exchange(bucket_mb=1e-5)}
WORDS = _RNG.integers(1, 20, (101, 6))
WORDS[:, 4:] *= _RNG.integers(0, 2, (101, 2))  # zeros, which a mask removes
SEQUENCES = _RNG.normal(size=(101, 6, 2)).astype("float32")
TAGS = _RNG.integers(0, 3, (101, 6))
# 101 rows are 51 and 50, which is 4 steps of 13, 13, 12, 13 and 12, 13, 12, 13 rows: all uneven.
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
layers = keras.layers


def dense(**compiled: Any) -> Callable[[], Any]:
    """Return a builder of a classifier of 8 features, smooth so that rounding errors stay small."""

    def build() -> Any:
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(12, activation="tanh"), layers.Dense(3)]
        )
        given = {key: value() if callable(value) else value for key, value in compiled.items()}
        model.compile(**{"optimizer": "sgd", "loss": LOGITS, **given})
        return model

    return build


def stack(*parts: Callable[[], Any], shape: Any = (8,), **compiled: Any) -> Callable[[], Any]:
    """Return a builder of a Sequential model whose layers are made at each call."""

    def build() -> Any:
        model = keras.Sequential([keras.Input(shape), *(part() for part in parts)])
        given = {key: value() if callable(value) else value for key, value in compiled.items()}
        model.compile(**{"optimizer": "sgd", "loss": LOGITS, **given})
        return model

    return build


def optimizer_cases() -> dict[str, Case]:
    o = keras.optimizers
    made: dict[str, tuple[Callable[[], Any], float]] = {
        "sgd momentum": (lambda: o.SGD(0.05, momentum=0.9), 1e-6),
        "sgd nesterov": (lambda: o.SGD(0.05, momentum=0.9, nesterov=True), 1e-6),
        "sgd weight decay": (lambda: o.SGD(0.05, weight_decay=0.01), 1e-6),
        # These divide by a root that starts near zero, which magnifies rounding.
        "adam": (lambda: o.Adam(0.01), 1e-5),
        "adamw": (lambda: o.AdamW(0.01, weight_decay=0.1), 1e-5),
        "rmsprop": (lambda: o.RMSprop(0.01), 1e-5),
        "adagrad": (lambda: o.Adagrad(0.01), 1e-5),
        "nadam": (lambda: o.Nadam(0.01), 1e-5),
        # Its steps have a fixed size, regardless of the gradient.
        "lion": (lambda: o.Lion(0.001), 1e-6),
        "clipnorm": (lambda: o.SGD(0.1, clipnorm=0.02), 1e-6),
        "global_clipnorm": (lambda: o.SGD(0.1, global_clipnorm=0.03), 1e-6),
        "clipvalue": (lambda: o.SGD(0.1, clipvalue=0.005), 1e-6),
        # 4 steps per epoch: three are added up, and one is left for the next epoch.
        "accumulation": (lambda: o.SGD(0.05, momentum=0.5, gradient_accumulation_steps=3), 1e-6),
        "accumulation adam": (lambda: o.Adam(0.01, gradient_accumulation_steps=2), 1e-5),
        "ema": (lambda: o.SGD(0.05, use_ema=True, ema_overwrite_frequency=3), 1e-6),
        "schedule": (lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 2, 0.5)), 1e-6),
    }
    return {
        name: Case(dense(optimizer=make), (X, Y), tolerance=tolerance)
        for name, (make, tolerance) in made.items()
    }


def several() -> Any:
    """Build two named inputs, two named outputs, weighted losses, and a layer used twice."""
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    shared = layers.Dense(6, activation="tanh")
    both = layers.Concatenate()([shared(left), shared(right)])
    outputs = {
        "a": layers.Dense(3, name="a")(both),
        "b": layers.Dense(1, name="b")(both),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        "sgd",
        {"a": LOGITS, "b": "mse"},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"a": ["accuracy"], "b": ["mae"]},
    )
    return model


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model without a graph of its own, with dropout that never drops."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = layers.Dense(6, activation="tanh")
        self.out = layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.out.build((None, 6))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))


@keras.saving.register_keras_serializable("tests")
class OwnStep(Subclassed):
    """Has its own train_step, with a computation after the update that needs the new weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.average = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = 2.0 * self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        self.average.assign(0.5 * self.average + 0.5 * self.out.bias)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


@keras.saving.register_keras_serializable("tests")
class TwoUpdates(Subclassed):
    """Applies its gradients in two independent parts."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.optimizer.apply(gradients[:2], self.trainable_variables[:2])
        self.optimizer.apply(gradients[2:], self.trainable_variables[2:])
        return {"loss": self._loss_tracker.result()}


def subclassed(kind: type, **compiled: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = kind()
        model.build((None, 8))
        model.compile(**{"optimizer": "sgd", "loss": LOGITS, **compiled})
        model.optimizer.build(model.trainable_variables)
        return model

    return build


@keras.saving.register_keras_serializable("tests")
class VAE(keras.Model):
    """Has a train_step with inputs alone; the noise is the same for all rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        inputs = keras.Input((8,))
        moments = [layers.Dense(2, name=name)(inputs) for name in ("mean", "log_variance")]
        self.encoder = keras.Model(inputs, moments)
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8)])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "kl_loss")]

    @property
    def metrics(self) -> list[Any]:
        return list(self.trackers)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        assert tf.is_tensor(data)  # as Keras passes it, not (x,)
        with tf.GradientTape() as tape:
            losses = self.compute_losses(data)
            loss = losses[0] + losses[1]
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.track(loss, losses[1])

    def test_step(self, data: Any) -> Any:
        losses = self.compute_losses(data)
        return self.track(losses[0] + losses[1], losses[1])

    def compute_losses(self, x: Any) -> tuple[Any, Any]:
        mean, log_variance = self.encoder(x)
        decoded = self.decoder(mean + 0.3 * keras.ops.exp(0.5 * log_variance))
        divergence = keras.ops.square(mean) + keras.ops.exp(log_variance) - log_variance - 1
        return keras.ops.mean(keras.ops.sum(keras.ops.square(x - decoded), 1)), keras.ops.mean(
            keras.ops.sum(0.5 * divergence, 1)
        )

    def track(self, *losses: Any) -> dict[str, Any]:
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def vae() -> Any:
    model = VAE()
    model.compile(keras.optimizers.SGD(0.01))
    return model


@keras.saving.register_keras_serializable("tests")
class Distance(layers.Layer):
    """Adds the mean squared distance of two inputs as a loss."""

    def call(self, pair: Any) -> Any:
        distance = keras.ops.square(pair[0] - pair[1])
        self.add_loss(keras.ops.mean(distance))
        return distance


def alike(by_name: bool = True) -> Callable[[], Any]:
    """Return a builder of a model of two inputs whose layer adds the loss."""

    def build() -> Any:
        inputs = {name: keras.Input((8,), name=name) for name in ("left", "right")}
        encoded = [layers.Dense(4, activation="tanh")(each) for each in inputs.values()]
        model = keras.Model(inputs if by_name else list(inputs.values()), Distance()(encoded))
        model.compile("sgd")
        return model

    return build


def frozen() -> Any:
    model = dense()()
    model.layers[0].trainable = False
    model.compile("sgd", LOGITS)
    return model


def thawed() -> Any:
    """Build a model that was fitted with a frozen layer, which is now trainable."""
    model = frozen()
    model.fit(X[:16], Y[:16], verbose=0, shuffle=False)
    model.layers[0].trainable = True
    model.compile("sgd", LOGITS)
    return model


def tagger(**options: Any) -> Callable[[], Any]:
    """Build a model with one label per word; zeros are padding, which the loss ignores."""
    return stack(
        lambda: layers.Embedding(20, 4, mask_zero=True),
        lambda: layers.LSTM(5, return_sequences=True),
        lambda: layers.Dense(3, kernel_regularizer="l2"),
        shape=(6,),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        **options,
    )


def classified_words(
    optimizer: Callable[[], Any], table: int = 20, **options: Any
) -> Callable[[], Any]:
    return stack(
        lambda: layers.Embedding(table, 4),
        layers.GlobalAveragePooling1D,
        lambda: layers.Dense(3),
        shape=(6,),
        optimizer=optimizer,
        **options,
    )


@keras.saving.register_keras_serializable("tests")
class Hidden(keras.layers.Layer):
    """Contains layers: an embedding whose mask is passed on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.words = layers.Embedding(20, 4, mask_zero=True)

    def build(self, shape: Any) -> None:
        self.words.build(shape)

    def call(self, x: Any) -> Any:
        return self.words(x)

    def compute_mask(self, x: Any, previous_mask: Any = None) -> Any:
        return self.words.compute_mask(x)


def embedding_cases() -> dict[str, Case]:
    """Build a model with repeated words in a batch: optimizers handle each of their rows."""
    o = keras.optimizers
    made: dict[str, tuple[Callable[[], Any], float]] = {
        "sgd": (lambda: o.SGD(0.5), 1e-6),
        "adam": (lambda: o.Adam(0.01), 1e-5),
        "clipnorm": (lambda: o.SGD(0.5, clipnorm=0.01), 1e-6),
        "global_clipnorm": (lambda: o.SGD(0.5, global_clipnorm=0.01), 1e-6),
        "clipvalue": (lambda: o.SGD(0.5, clipvalue=0.001), 1e-6),
        "ema": (lambda: o.SGD(0.5, use_ema=True, weight_decay=0.01), 1e-6),
    }
    large = _RNG.integers(0, 1 << 18, (101, 6))
    large[::2, 0] = 7
    sgd = lambda: o.SGD(0.5)  # noqa: E731
    return {
        **{
            f"embedding {name}": Case(classified_words(make), (WORDS, Y), tolerance=tolerance)
            for name, (make, tolerance) in made.items()
        },
        "embedding adam, jit": Case(
            classified_words(made["adam"][0], jit_compile=True), (WORDS, Y), tolerance=1e-5
        ),
        "large embedding": Case(
            classified_words(made["global_clipnorm"][0], 1 << 18), (large, Y), epochs=1
        ),
        "large embedding adam": Case(
            classified_words(made["adam"][0], 1 << 18), (large, Y), epochs=1, tolerance=1e-5
        ),
        "embedding, empty steps": Case(classified_words(sgd), (WORDS[:7], Y[:7]), batch_size=1),
        "embedding of int32, empty steps": Case(
            classified_words(sgd), (WORDS[:7].astype("int32"), Y[:7]), batch_size=1
        ),
        "embedding, buckets": Case(classified_words(sgd), (WORDS, Y), settings=SMALL_BUCKETS),
    }


def unlabelled_cases() -> dict[str, Case]:
    named = {"left": X, "right": X[::-1] ** 2}
    return {
        "VAE without labels": Case(vae, X, validation=X[:3]),
        "VAE without labels, empty steps": Case(vae, X[:7], batch_size=1),
        "named inputs without labels": Case(
            alike(), named, validation={name: part[:1] for name, part in named.items()}
        ),
        "list of inputs without labels": Case(alike(by_name=False), (list(named.values()),)),
    }


def model_cases() -> dict[str, Case]:
    return {
        "several inputs and outputs": Case(
            several,
            ({"left": X, "right": -X}, {"a": Y, "b": X[:, :1]}),
        ),
        # Its class is found without being named.
        "subclassed": Case(subclassed(Subclassed), (X, Y)),
        "own train_step": Case(subclassed(OwnStep), (X, Y), custom_objects={"OwnStep": OwnStep}),
        "two updates a step": Case(
            subclassed(TwoUpdates), (X, Y), custom_objects={"TwoUpdates": TwoUpdates}
        ),
        "two updates, buckets, empty steps": Case(
            subclassed(TwoUpdates, steps_per_execution=2),
            (X[:7], Y[:7]),
            batch_size=1,
            settings=SMALL_BUCKETS,
            custom_objects={"TwoUpdates": TwoUpdates},
        ),
        "two updates, eager": Case(
            subclassed(TwoUpdates, run_eagerly=True),
            (X, Y),
            custom_objects={"TwoUpdates": TwoUpdates},
        ),
        "spectral normalization, empty steps": Case(
            stack(lambda: layers.SpectralNormalization(layers.Dense(3))),
            (X[:7], Y[:7]),
            batch_size=1,
        ),
        "validated with moving averages": Case(
            stack(
                lambda: layers.Dense(3), optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True)
            ),
            (X, Y),
            callbacks=[keras.callbacks.SwapEMAWeights()],
            validation=(X[:31], Y[:31]),
        ),
        "fewer steps than the rows give": Case(
            stack(lambda: layers.Dense(3)), (X, Y), epochs=5, settings={"steps_per_epoch": 3}
        ),
        "frozen layer": Case(frozen, (X, Y)),
        "frozen before": Case(thawed, (X, Y)),
        # TensorFlow does not know the shape of this kernel's gradient.
        "dense on sequences": Case(
            stack(lambda: layers.Dense(3), shape=(6, 2)),
            (SEQUENCES, TAGS),
        ),
        "dense on sequences, jit": Case(
            stack(lambda: layers.Dense(3), shape=(6, 2), jit_compile=True),
            (SEQUENCES, TAGS),
        ),
        "mask of a layer inside": Case(
            stack(Hidden, lambda: layers.Dense(3), shape=(6,)),
            (WORDS, TAGS),
            custom_objects={"Hidden": Hidden},
        ),
        "rnn": Case(
            stack(lambda: layers.SimpleRNN(5), lambda: layers.Dense(3), shape=(4, 2)),
            (X.reshape(-1, 4, 2), Y),
        ),
        "gru": Case(
            stack(lambda: layers.GRU(5), lambda: layers.Dense(3), shape=(4, 2)),
            (X.reshape(-1, 4, 2), Y),
        ),
        "lstm": Case(
            stack(lambda: layers.LSTM(5), lambda: layers.Dense(3), shape=(4, 2)),
            (X.reshape(-1, 4, 2), Y),
        ),
        "mask inside": Case(
            stack(
                lambda: layers.Embedding(20, 4, mask_zero=True),
                lambda: layers.GRU(5),
                lambda: layers.Dense(3),
                shape=(6,),
            ),
            (WORDS, Y),
        ),
        "mask reaches the loss": Case(tagger(), (WORDS, TAGS)),
        "mask and accumulation": Case(
            tagger(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            (WORDS, TAGS),
        ),
        "regularizers": Case(
            stack(
                lambda: layers.Dense(
                    12, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1"
                ),
                lambda: layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1)),
            ),
            (X, Y),
        ),
        "float64": Case(
            stack(lambda: layers.Dense(3, dtype="float64"), shape=(8,)), (X, Y), tolerance=1e-9
        ),
        # Sums in half precision are rounded in another order.
        "mixed_bfloat16": Case(
            stack(
                lambda: layers.Dense(12, activation="tanh", dtype="mixed_bfloat16"),
                lambda: layers.Dense(3, dtype="float32"),
            ),
            (X, Y),
            tolerance=1e-3,
        ),
        "loss scale": Case(
            stack(
                lambda: layers.Dense(12, activation="tanh", dtype="mixed_float16"),
                lambda: layers.Dense(3, dtype="float32"),
                optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(0.05), initial_scale=256.0
                ),
            ),
            (X, Y),
            tolerance=1e-3,
        ),
    }


def loss_cases() -> dict[str, Case]:
    return {
        "sample weights": Case(dense(), (X, Y, np.linspace(0, 2, 101))),
        "class weights": Case(dense(), (X, Y), settings={"class_weight": {0: 1, 1: 5, 2: 0.2}}),
        "class weights, one named": Case(dense(), (X, Y), settings={"class_weight": {0: 3}}),
        "ignored class": Case(
            stack(
                lambda: layers.Dense(3, kernel_regularizer="l2"),
                loss=lambda: keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, ignore_class=1
                ),
            ),
            (X, Y),
        ),
        "ignored class of sequences": Case(
            stack(
                lambda: layers.Dense(3),
                shape=(6, 2),
                loss=lambda: keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, ignore_class=-1
                ),
            ),
            (SEQUENCES, np.where(TAGS == 2, -1, TAGS)),
        ),
        "sample weights and mask": Case(tagger(), (WORDS, TAGS, _RNG.uniform(0, 2, (101, 6)))),
    }


def way_cases() -> dict[str, Case]:
    """Return the ways to run a step."""
    momentum = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    uneven = [slice(0, 9), slice(9, 9)]
    own = {"OwnStep": OwnStep}
    return {
        "steps_per_execution=2": Case(dense(steps_per_execution=2), (X, Y)),
        "steps_per_execution=10": Case(dense(optimizer=momentum, steps_per_execution=10), (X, Y)),
        "run_eagerly": Case(dense(optimizer=momentum, run_eagerly=True), (X, Y)),
        "jit_compile": Case(dense(optimizer=momentum, jit_compile=True), (X, Y)),
        "jit_compile, 2 steps": Case(dense(jit_compile=True, steps_per_execution=2), (X, Y)),
        "jit_compile, clipped adam": Case(
            dense(
                optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.03),
                jit_compile=True,
            ),
            (X, Y),
            tolerance=1e-5,
        ),
        "jit_compile, accumulation": Case(
            dense(
                optimizer=lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3),
                jit_compile=True,
            ),
            (X, Y),
        ),
        "jit_compile, embedding": Case(
            stack(
                lambda: layers.Embedding(20, 4),
                layers.Flatten,
                lambda: layers.Dense(3),
                shape=(6,),
                jit_compile=True,
            ),
            (WORDS, Y),
        ),
        "jit_compile, own train_step": Case(
            subclassed(OwnStep, jit_compile=True), (X, Y), custom_objects=own
        ),
        "buckets": Case(dense(optimizer=momentum), (X, Y), settings=SMALL_BUCKETS),
        "buckets, 3 steps": Case(dense(steps_per_execution=3), (X, Y), settings=SMALL_BUCKETS),
        "shuffle=global": Case(dense(), (X, Y), settings={"shuffle": "global"}),
        "shuffle=False": Case(dense(), (X, Y), settings={"shuffle": False}),
        # Seven rows in batches of one: three or four steps, one of which has no row on one rank.
        "empty steps": Case(dense(optimizer=momentum), (X[:7], Y[:7]), batch_size=1),
        "empty steps, jit": Case(dense(jit_compile=True), (X[:7], Y[:7]), batch_size=1),
        "empty steps, eager": Case(dense(run_eagerly=True), (X[:7], Y[:7]), batch_size=1),
        "empty steps, eager, metrics": Case(
            dense(run_eagerly=True, metrics=lambda: ["accuracy"]),
            (X[:9], Y[:9]),
            batch_size=3,
            settings={"shuffle": False},
            shards=[slice(0, 9), slice(9, 9)],
        ),
        "empty steps, own": Case(
            subclassed(OwnStep),
            (X[:7], Y[:7]),
            batch_size=1,
            # On a worker without rows its average does not change, which an audit finds.
            settings={"exchange": Exchange(audit=False)},
            custom_objects=own,
            trainable_only=True,
        ),
        "empty steps, mask": Case(tagger(), (WORDS[:7], TAGS[:7]), batch_size=1),
        "empty steps, buckets": Case(dense(), (X[:7], Y[:7]), batch_size=1, settings=SMALL_BUCKETS),
        "empty steps, accumulation": Case(
            dense(optimizer=lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)),
            (X[:7], Y[:7]),
            batch_size=1,
        ),
        "empty shard": Case(
            dense(optimizer=momentum),
            (X[:9], Y[:9]),
            batch_size=3,
            settings={"shuffle": False},
            shards=uneven,
        ),
    }


def metric_cases() -> dict[str, Case]:
    """Every type of state that Keras's metrics have."""
    m = keras.metrics
    truth = np.eye(3, dtype="float32")[Y]
    probabilities = stack(
        lambda: layers.Dense(3, activation="softmax"),
        loss="categorical_crossentropy",
        metrics=lambda: [
            "accuracy",
            m.AUC(name="auc"),
            m.Precision(name="precision"),
            m.Recall(name="recall"),
            m.F1Score(average=None, name="f1"),
            m.FBetaScore(name="fbeta"),
            m.TopKCategoricalAccuracy(k=2, name="top"),
            m.CosineSimilarity(name="cosine"),
            m.MeanIoU(3, name="iou", sparse_y_true=False, sparse_y_pred=False),
            m.KLDivergence(name="kl"),
        ],
    )
    binary = stack(
        lambda: layers.Dense(1, activation="sigmoid"),
        loss="binary_crossentropy",
        metrics=lambda: [
            m.BinaryAccuracy(name="accuracy"),
            m.AUC(curve="PR", name="pr"),
            m.SensitivityAtSpecificity(0.5, name="sensitivity"),
            m.TruePositives(name="tp"),
            m.FalseNegatives(name="fn"),
            m.RootMeanSquaredError(name="rmse"),
            m.R2Score(name="r2"),
            m.MeanAbsoluteError(name="mae"),
        ],
        weighted_metrics=lambda: [m.BinaryAccuracy(name="weighted")],
    )
    weights = np.linspace(0, 2, 101)
    return {
        "metrics of classes": Case(probabilities, (X, truth)),
        "metrics of two classes": Case(binary, (X, (Y[:, None] > 0).astype("float32"), weights)),
    }


CASES = {
    **metric_cases(),
    **embedding_cases(),
    **optimizer_cases(),
    **model_cases(),
    **loss_cases(),
    **way_cases(),
    **unlabelled_cases(),
}


@pytest.mark.parametrize("name", sampled(CASES, 4))
def test_workers_reach_what_one_process_reaches(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name], CASES[name].callbacks, name)
