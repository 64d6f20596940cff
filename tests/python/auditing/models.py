"""Ordinary models of many kinds: the audit must not find a difference in any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from auditing.subject import Subject
from keras import ops

from pybackend.core.job.worker_options import Exchange

layers = keras.layers
optimizers = keras.optimizers
Build = Callable[[], Any]

_RNG = np.random.default_rng(29)
ROWS = 45  # on two workers 23 and 22, in three steps of 8 and 7 rows
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X = _RNG.normal(size=(ROWS, 8)).astype("float32")
Y = _RNG.integers(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype="float32")[Y]
REAL = (X[:, :2].sum(axis=1, keepdims=True) + _RNG.normal(size=(ROWS, 1))).astype("float32")
COUNTS = _RNG.poisson(3, (ROWS, 1)).astype("float32")
FLAGS = (X[:, :1] > 0).astype("float32")
WEIGHTS = _RNG.uniform(0.2, 3, ROWS).astype("float32")
IMAGES = _RNG.normal(size=(ROWS, 8, 8, 2)).astype("float32")
SERIES = _RNG.normal(size=(ROWS, 6, 3)).astype("float32")
WORDS = _RNG.integers(1, 20, (ROWS, 6))
WORDS[:, 3:] *= _RNG.integers(0, 2, (ROWS, 3))  # zeros, which a mask removes
TAGS = _RNG.integers(0, 3, (ROWS, 6))
IDS = _RNG.integers(0, 15, (ROWS, 2))


def stack(*parts: Build, shape: Any = (8,), **options: Any) -> Build:
    """Return a builder of a Sequential model, compiled with the options."""

    def build() -> Any:
        model = keras.Sequential([keras.Input(shape), *(part() for part in parts)])
        return compiled(model, **options)

    return build


def compiled(model: Any, **options: Any) -> Any:
    """Compile a model; an option that is a function without arguments is called."""
    given = {"optimizer": "sgd", "loss": LOGITS, **options}
    # Optimizers and metrics belong to one model each.
    made = {key: value() if is_maker(value) else value for key, value in given.items()}
    model.compile(**made)
    return model


def is_maker(value: Any) -> bool:
    """Return whether a value is a lambda, e.g. one that makes an optimizer."""
    return getattr(value, "__name__", "") == "<lambda>"


def dense(units: int = 12, activation: str = "tanh") -> Build:
    return lambda: layers.Dense(units, activation)


OUT: Build = lambda: layers.Dense(3)  # noqa: E731
ONE: Build = lambda: layers.Dense(1)  # noqa: E731


def plain(*parts: Build, x: Any = X, y: Any = Y, **options: Any) -> Subject:
    """Return a subject: a Sequential model, its rows, and how it is compiled."""
    own = {key: options.pop(key) for key in _FIELDS if key in options}
    return Subject(stack(*parts, shape=x.shape[1:], **options), (x, y), **own)


_FIELDS = ("settings", "epochs", "batch_size", "is_half", "is_comparable", "callbacks")


def functional(build: Callable[[Any], Any], x: Any = X, y: Any = Y, **options: Any) -> Subject:
    """Return a subject: a model of one input."""
    own = {key: options.pop(key) for key in _FIELDS if key in options}

    def make() -> Any:
        inputs = keras.Input(x.shape[1:], dtype=x.dtype)
        return compiled(keras.Model(inputs, build(inputs)), **options)

    return Subject(make, (x, y), **own)


# --- optimizers ---
OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "SGD weight decay": lambda: optimizers.SGD(0.05, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "Lion": lambda: optimizers.Lion(0.001),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.02),
    "EMA": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "EMA, overwriting": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "cosine schedule": lambda: optimizers.SGD(
        optimizers.schedules.CosineDecay(0.1, 9, warmup_steps=2, warmup_target=0.2)
    ),
    "exponential schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.01, 2, 0.7)
    ),
    "accumulation": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulation, Adam": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
}
MODELS: dict[str, Subject] = {
    f"dense, {name}": plain(dense(), OUT, optimizer=make) for name, make in OPTIMIZERS.items()
}

# --- losses of rows ---
MODELS |= {
    "mean squared error": plain(dense(), ONE, y=REAL, loss="mse", metrics=["mae"]),
    "absolute error": plain(dense(), ONE, y=REAL, loss="mae"),
    "Huber": plain(dense(), ONE, y=REAL, loss="huber", optimizer=OPTIMIZERS["Adam"]),
    "log-cosh": plain(dense(), ONE, y=REAL, loss="log_cosh"),
    "Poisson counts": plain(
        dense(), lambda: layers.Dense(1, "exponential"), y=COUNTS, loss="poisson"
    ),
    "binary": plain(
        dense(),
        lambda: layers.Dense(1, "sigmoid"),
        y=FLAGS,
        loss="binary_crossentropy",
        metrics=lambda: ["accuracy", keras.metrics.AUC(), keras.metrics.Precision()],
    ),
    "focal": plain(
        dense(), lambda: layers.Dense(1, "sigmoid"), y=FLAGS, loss="binary_focal_crossentropy"
    ),
    "hinge": plain(dense(), ONE, y=2 * FLAGS - 1, loss="hinge"),
    "label smoothing": plain(
        dense(),
        OUT,
        y=ONE_HOT,
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=lambda: [keras.metrics.F1Score(), "accuracy"],
    ),
    "divergence of distributions": plain(
        dense(), lambda: layers.Dense(3, "softmax"), y=ONE_HOT, loss="kl_divergence"
    ),
    "cosine of a row": plain(dense(), OUT, y=ONE_HOT, loss=keras.losses.CosineSimilarity()),
}


def quantiles(y: Any, predicted: Any) -> Any:
    levels = ops.convert_to_tensor([0.1, 0.5, 0.9])
    error = y - predicted
    return ops.mean(ops.maximum(levels * error, (levels - 1) * error), axis=-1)


def gaussian(y: Any, predicted: Any) -> Any:
    mean, spread = predicted[:, :1], ops.softplus(predicted[:, 1:]) + 1e-3
    return ops.mean(ops.log(spread) + 0.5 * ((y - mean) / spread) ** 2, axis=-1)


def by_class(y: Any, predicted: Any) -> Any:
    """A fixed weight for each class, stored as a float: it depends on a row alone."""
    one = ops.cast(ops.equal(y, 1.0), "float32")
    error = ops.mean((predicted - y) ** 2, axis=-1, keepdims=True)
    return ops.mean((1 + 4 * one) * error, axis=-1)


def observed(y: Any, predicted: Any) -> Any:
    """Missing values are -1.0, and count as zero errors: a mean over all rows."""
    is_known = ops.cast(y >= 0, "float32")
    return ops.mean(is_known * (predicted - y) ** 2, axis=-1)


MODELS |= {
    "quantiles": plain(dense(), OUT, y=REAL, loss=quantiles),
    "Gaussian likelihood": plain(
        dense(), lambda: layers.Dense(2), y=REAL, loss=gaussian, optimizer=OPTIMIZERS["Adam"]
    ),
    "fixed class weights in a loss": plain(
        dense(), ONE, y=Y[:, None].astype("float32"), loss=by_class
    ),
    "missing values of a row": plain(
        dense(), ONE, y=np.where(X[:, :1] > 0.3, COUNTS, -1).astype("float32"), loss=observed
    ),
}

# --- layers ---
NORMALIZED = (dense(), lambda: layers.BatchNormalization(), OUT)
SYNCHRONIZED = (dense(), lambda: layers.BatchNormalization(synchronized=True), OUT)


def conv(*parts: Build, **options: Any) -> Subject:
    return plain(
        lambda: layers.Conv2D(4, 3, padding="same"),
        *parts,
        lambda: layers.ReLU(),
        lambda: layers.MaxPooling2D(),
        lambda: layers.Conv2D(4, 3),
        lambda: layers.GlobalAveragePooling2D(),
        OUT,
        x=IMAGES,
        **{"optimizer": OPTIMIZERS["SGD momentum"], **options},
    )


def attention(inputs: Any) -> Any:
    x = layers.Dense(8)(inputs)
    x = x + layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x)
    x = x + layers.Dense(8)(layers.Dense(16, "gelu")(x))
    x = layers.LayerNormalization()(x)
    return layers.Dense(3)(layers.GlobalAveragePooling1D()(x))


def residual(inputs: Any) -> Any:
    x = layers.Dense(8)(inputs)
    for _ in range(4):
        x = x + layers.Dense(8, "relu")(layers.LayerNormalization()(x))
    return layers.Dense(3)(x)


def translated(inputs: Any) -> Any:
    x = layers.Embedding(20, 6, mask_zero=True)(inputs)
    x = layers.LSTM(6, return_sequences=True)(x)
    return layers.Dense(3)(x)


def factorization(inputs: Any) -> Any:
    table = layers.Embedding(15, 4)
    users, items = table(inputs[:, 0]), table(inputs[:, 1])
    return layers.Dense(1)(ops.sum(users * items, axis=-1, keepdims=True))


def wavenet(inputs: Any) -> Any:
    x = layers.Conv1D(4, 1)(inputs)
    for rate in (1, 2):
        gate = layers.Conv1D(4, 2, padding="causal", dilation_rate=rate, activation="sigmoid")(x)
        x = x + gate * layers.Conv1D(4, 2, padding="causal", dilation_rate=rate)(x)
    return layers.Dense(3)(layers.Flatten()(x))


class Floors(layers.Layer):
    """Adds the whole part of each number: a small change of a number may change it by one."""

    def call(self, x: Any) -> Any:
        return ops.concatenate([x, ops.floor(x)], axis=-1)


MODELS |= {
    "convolution": conv(),
    "convolution and batch normalization": conv(
        lambda: layers.BatchNormalization(), is_comparable=False
    ),
    "convolution and synchronized normalization": conv(
        lambda: layers.BatchNormalization(synchronized=True)
    ),
    "convolution and group normalization": conv(lambda: layers.GroupNormalization(2)),
    "separable convolution": plain(
        lambda: layers.SeparableConv2D(4, 3, activation="relu"),
        lambda: layers.DepthwiseConv2D(3),
        lambda: layers.Flatten(),
        OUT,
        x=IMAGES,
        optimizer=OPTIMIZERS["Adam"],
    ),
    "LSTM": plain(lambda: layers.LSTM(6), OUT, x=SERIES, optimizer=OPTIMIZERS["Adam"]),
    "GRU": plain(lambda: layers.GRU(6), OUT, x=SERIES, optimizer=OPTIMIZERS["clipnorm"]),
    "both directions": plain(
        lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
        lambda: layers.TimeDistributed(layers.Dense(4, "tanh")),
        lambda: layers.Flatten(),
        OUT,
        x=SERIES,
    ),
    "a plain recurrence": plain(lambda: layers.SimpleRNN(6), OUT, x=SERIES),
    "embedding": plain(
        lambda: layers.Embedding(20, 6),
        lambda: layers.GlobalAveragePooling1D(),
        OUT,
        x=WORDS,
        optimizer=OPTIMIZERS["Adam"],
    ),
    "embedding, clipped": plain(
        lambda: layers.Embedding(20, 6),
        lambda: layers.Flatten(),
        OUT,
        x=WORDS,
        optimizer=OPTIMIZERS["global clipnorm"],
    ),
    "masked recurrence": plain(
        lambda: layers.Embedding(20, 6, mask_zero=True), lambda: layers.LSTM(6), OUT, x=WORDS
    ),
    "masked sequences": functional(translated, WORDS, TAGS, metrics=["accuracy"]),
    "factorization": functional(
        factorization, IDS, REAL, loss="mse", optimizer=OPTIMIZERS["Adagrad"]
    ),
    "causal convolutions": functional(wavenet, SERIES),
    "attention, SGD": functional(attention, SERIES),
    "residual": functional(residual, optimizer=OPTIMIZERS["Adam"]),
    "unit norms and spectra": plain(
        lambda: layers.Dense(8, kernel_constraint=keras.constraints.UnitNorm(axis=0)),
        lambda: layers.SpectralNormalization(layers.Dense(6)),
        lambda: layers.PReLU(),
        OUT,
    ),
    "frozen layers": plain(lambda: layers.Dense(8, "tanh", trainable=False), dense(6), OUT),
    "synchronized normalization": plain(*SYNCHRONIZED),
    "batch normalization": plain(*NORMALIZED, is_comparable=False),
    "whole numbers within": plain(
        lambda: layers.Rescaling(3.0),
        lambda: Floors(),
        dense(),
        OUT,
    ),
}

# --- regularizers and added losses ---


class Penalty(layers.Layer):
    """Adds the mean over rows of the squares."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.sum(ops.square(x), axis=-1)))
        return x


class Sampling(layers.Layer):
    """The middle of a variational autoencoder, with its divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x: Any) -> Any:
        mean, spread = x[:, :4], x[:, 4:]
        divergence = -0.5 * ops.sum(1 + spread - mean**2 - ops.exp(spread), axis=-1)
        self.add_loss(0.1 * ops.mean(divergence))
        return mean + ops.exp(spread / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Quantizer(layers.Layer):
    """The nearest of some vectors, with a straight-through gradient (van den Oord et al., 2017).

    With ``counts``, each vector is the ratio of two moving averages: of the rows that chose it, and
    of their number.
    """

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts

    def build(self, shape: Any) -> None:
        if not self.counts:
            self.vectors = self.add_weight((5, shape[-1]), "uniform")
        else:
            self.sizes = self.add_weight((5,), "ones", trainable=False)
            self.sums = self.add_weight((5, shape[-1]), "uniform", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        vectors = self.sums / self.sizes[:, None] if self.counts else self.vectors
        distances = ops.sum((x[:, None] - vectors[None]) ** 2, axis=-1)
        chosen = ops.one_hot(ops.argmin(distances, axis=-1), 5)
        near = ops.matmul(chosen, vectors)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(near) - x) ** 2))
        if not self.counts:
            self.add_loss(ops.mean((near - ops.stop_gradient(x)) ** 2))
        elif training:
            held = ops.stop_gradient(x)
            self.sizes.assign(0.9 * self.sizes + 0.1 * ops.mean(chosen, axis=0))
            sums = ops.matmul(ops.transpose(chosen), held) / ops.cast(ops.shape(x)[0], "float32")
            self.sums.assign(0.9 * self.sums + 0.1 * sums)
        return x + ops.stop_gradient(near - x)


class Experts(layers.Layer):
    """The two best of four experts of each row, weighted (Shazeer et al., 2017)."""

    def build(self, shape: Any) -> None:
        self.gate = layers.Dense(4)
        self.experts = [layers.Dense(6, "relu") for _ in range(4)]
        for part in [self.gate, *self.experts]:
            part.build(shape)

    def call(self, x: Any) -> Any:
        logits = self.gate(x)
        _, places = ops.top_k(logits, 2)
        chosen = ops.sum(ops.one_hot(places, 4), axis=1)
        shares = ops.softmax(ops.where(chosen > 0, logits, -1e9), axis=-1)
        found = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.sum(found * shares[..., None], axis=1)


MODELS |= {
    "regularizers": plain(
        lambda: layers.Dense(12, "tanh", kernel_regularizer="l2", bias_regularizer="l1"),
        lambda: layers.Dense(3, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()),
    ),
    "regularized activity": plain(lambda: layers.Dense(12, "tanh", activity_regularizer="l2"), OUT),
    "an added mean": plain(dense(), lambda: Penalty(), OUT, optimizer=OPTIMIZERS["Adam"]),
    "vector quantization": plain(dense(4), lambda: Quantizer(), OUT, is_comparable=False),
    "vector quantization with counts": plain(
        dense(4), lambda: Quantizer(True), OUT, is_comparable=False
    ),
    "two of four experts": plain(
        lambda: Experts(), OUT, optimizer=OPTIMIZERS["Adam"], is_comparable=False
    ),
    "autoencoder": plain(dense(3), dense(8, "linear"), y=X, loss="mse"),
    "convolutional autoencoder": plain(
        lambda: layers.Conv2D(3, 3, 2, padding="same", activation="relu"),
        lambda: layers.Conv2DTranspose(3, 3, 2, padding="same", activation="relu"),
        lambda: layers.Conv2D(2, 3, padding="same"),
        x=IMAGES,
        y=IMAGES,
        loss="mse",
        optimizer=OPTIMIZERS["Adam"],
    ),
    "variational autoencoder": plain(
        dense(8), lambda: Sampling(), dense(8, "linear"), y=X, loss="mse", is_comparable=False
    ),
    "dropout": plain(dense(), lambda: layers.Dropout(0.3), OUT, is_comparable=False),
    "dropout after an embedding": plain(
        lambda: layers.Embedding(20, 6),
        lambda: layers.Flatten(),
        lambda: layers.Dropout(0.3),
        OUT,
        x=WORDS,
        is_comparable=False,
    ),
    "Gaussian noise": plain(
        lambda: layers.GaussianNoise(0.3),
        dense(),
        OUT,
        optimizer=OPTIMIZERS["Adam"],
        is_comparable=False,
    ),
    "dropout of channels": conv(lambda: layers.SpatialDropout2D(0.3), is_comparable=False),
}

# --- several inputs, outputs and weights ---


def several() -> Any:
    left, right = keras.Input((8,), name="left"), keras.Input((6, 3), name="right")
    both = layers.Concatenate()([layers.Dense(6, "tanh")(left), layers.GRU(4)(right)])
    outputs = {
        "kind": layers.Dense(3, name="kind")(both),
        "size": layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    return compiled(
        model,
        optimizer=OPTIMIZERS["Adam"],
        loss={"kind": LOGITS, "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.2},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )


def siamese() -> Any:
    shared = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(4)])
    parts = [keras.Input((8,), name=name) for name in ("anchor", "same", "other")]
    outputs = layers.Concatenate()([shared(part) for part in parts])
    model = keras.Model({part.name: part for part in parts}, outputs)
    return compiled(model, loss=triplets_of_rows)


def triplets_of_rows(y: Any, predicted: Any) -> Any:
    anchor, same, other = ops.split(predicted, 3, axis=-1)
    near = ops.sum((anchor - same) ** 2, axis=-1)
    return ops.relu(near - ops.sum((anchor - other) ** 2, axis=-1) + 0.5)


def tasks(inputs: Any) -> Any:
    x = layers.Dense(12, "relu")(inputs)
    return [layers.Dense(3)(layers.Dense(6, "relu")(x)), layers.Dense(1)(x)]


MODELS |= {
    "two inputs, two outputs": Subject(
        several, ({"left": X, "right": SERIES}, {"kind": Y, "size": REAL})
    ),
    "triplets of a row": Subject(
        siamese, ({"anchor": X, "same": X[::-1], "other": -X[:, ::-1]}, ONE_HOT)
    ),
    "several tasks": functional(tasks, y=(Y, REAL), loss=[LOGITS, "mse"]),
    "sample weights": Subject(
        stack(dense(), OUT, optimizer=OPTIMIZERS["Adam"], weighted_metrics=["accuracy"]),
        (X, Y, WEIGHTS),
    ),
    "class weights": plain(
        dense(), OUT, settings={"class_weight": {0: 0.5, 1: 1.0, 2: 4.0}}, metrics=["accuracy"]
    ),
}

# --- own train_steps ---


class OwnStep(keras.Model):
    """A network with a train_step of its own."""

    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(12, "tanh"), layers.Dense(units)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.out.build((None, 12))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.find_loss(x, y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def find_loss(self, x: Any, y: Any) -> Any:
        return self.compute_loss(x, y, self(x, training=True))


class Twice(OwnStep):
    """Two optimizers: one for each layer."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.other = optimizers.Adam(0.01)
        self.other.build(self.out.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.find_loss(x, y)
        for optimizer, part in ((self.optimizer, self.hidden), (self.other, self.out)):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Smooth(OwnStep):
    """A penalty for the gradient of each row."""

    def find_loss(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x)
            total = ops.sum(found**2)
        slopes = tape.gradient(total, x)
        return self.compute_loss(x, y, found) + 0.1 * ops.mean(ops.sum(slopes**2, axis=-1))


class Gan(keras.Model):
    """A maker of rows and a judge of them, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = layers.Dense(8), layers.Dense(1)
        self.seeds = keras.random.SeedGenerator(4)

    def build(self, shape: Any) -> None:
        self.maker.build((None, 3))
        self.judge.build((None, 8))
        self.makers = optimizers.Adam(0.01)
        self.makers.build(self.maker.trainable_variables)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data: Any) -> Any:
        x = data[0]
        noise = keras.random.normal((ops.shape(x)[0], 3), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(noise)
            true, false = self.judge(x), self.judge(made)
            judges = ops.mean(ops.softplus(-true) + ops.softplus(false))
            makers = ops.mean(ops.softplus(-false))
        for optimizer, part, loss in (
            (self.optimizer, self.judge, judges),
            (self.makers, self.maker, makers),
        ):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"judges": judges, "makers": makers}


def built(kind: Any, **options: Any) -> Build:
    """Return a builder of a model of a class."""

    def build() -> Any:
        model = kind()
        model.build((None, 8))
        return compiled(model, **options)

    return build


MODELS |= {
    "own train_step": Subject(built(OwnStep, optimizer=OPTIMIZERS["SGD momentum"]), (X, Y)),
    "own train_step, two optimizers": Subject(built(Twice), (X, Y)),
    "penalized slopes": Subject(built(Smooth), (X, Y)),
    "two networks with two optimizers": Subject(
        built(Gan, optimizer=OPTIMIZERS["Adam"], loss=None), (X, Y), is_comparable=False
    ),
}

# --- precision and ways to run ---


def typed(dtype: str, *parts: Callable[[str], Any], x: Any = X, **options: Any) -> Build:
    """Return a builder of a model whose layers have a type."""

    def build() -> Any:
        model = keras.Sequential([keras.Input(x.shape[1:]), *(part(dtype) for part in parts)])
        return compiled(model, **options)

    return build


def typed_dense(dtype: str) -> Any:
    return layers.Dense(12, "relu", dtype=dtype)


def typed_out(dtype: str) -> Any:
    return layers.Dense(3, dtype=dtype)


def deep(units: int = 16) -> list[Build]:
    return [dense(units, "relu") for _ in range(12)]


NETWORK = (typed_dense, typed_dense, typed_out)
MODELS |= {
    f"{dtype}, {name}": Subject(
        typed(dtype, *NETWORK, optimizer=OPTIMIZERS[name]),
        (X, Y),
        is_half="float64" not in dtype,
        is_comparable=dtype == "float64",
    )
    for dtype in ("mixed_float16", "mixed_bfloat16", "float64")
    for name in ("SGD", "Adam")
}
MODELS |= {
    "XLA": plain(dense(), OUT, jit_compile=True),
    "XLA, Adam": plain(dense(), OUT, jit_compile=True, optimizer=OPTIMIZERS["Adam"]),
    "XLA, dropout": plain(
        dense(), lambda: layers.Dropout(0.3), OUT, jit_compile=True, is_comparable=False
    ),
    "several steps at once": plain(dense(), OUT, steps_per_execution=3),
    "eager": plain(dense(), OUT, run_eagerly=True, optimizer=OPTIMIZERS["Adam"]),
    "shards of the optimizer": plain(
        dense(),
        OUT,
        optimizer=OPTIMIZERS["Adam"],
        settings={"exchange": Exchange(shard_optimizer=True)},
    ),
    "compression of an embedding": plain(
        lambda: layers.Embedding(20, 6),
        lambda: layers.Flatten(),
        OUT,
        x=WORDS,
        settings={"exchange": Exchange(compression="bf16")},
        is_comparable=False,
    ),
    "compression": plain(
        dense(), OUT, settings={"exchange": Exchange(compression="bf16")}, is_comparable=False
    ),
    "small buckets": plain(
        dense(),
        dense(),
        OUT,
        optimizer=OPTIMIZERS["Adam"],
        settings={"exchange": Exchange(bucket_mb=1e-5)},
    ),
    # Rounding errors are large here, or all that there is.
    "twelve layers, SGD 1.0": plain(
        *deep(), OUT, optimizer=lambda: optimizers.SGD(1.0), is_comparable=False
    ),
    "twelve layers, Adam": plain(*deep(), OUT, optimizer=OPTIMIZERS["Adam"], is_comparable=False),
    "a bias before normalization, SGD": plain(*NORMALIZED, is_comparable=False),
    "a bias before normalization, Adam": plain(
        *NORMALIZED, optimizer=OPTIMIZERS["Adam"], is_comparable=False
    ),
    "a bias before synchronized normalization, Adam": plain(
        *SYNCHRONIZED, optimizer=OPTIMIZERS["Adam"], is_comparable=False
    ),
    "a bias before synchronized normalization, AdamW": plain(
        *SYNCHRONIZED, optimizer=OPTIMIZERS["AdamW"], is_comparable=False
    ),
    "a bias of attention's keys, Adam": functional(
        attention, SERIES, optimizer=OPTIMIZERS["Adam"], is_comparable=False
    ),
    "a bias of attention's keys, Lion": functional(
        attention, SERIES, optimizer=OPTIMIZERS["Lion"], is_comparable=False
    ),
    "steps without rows": Subject(stack(dense(), OUT), (X[:7], Y[:7]), batch_size=1),
}

# More rows, more units and more steps: more rounding.
MANY = _RNG.normal(size=(900, 8)).astype("float32")
MANY_CLASSES = (MANY[:, 0] > 0).astype("int64") + (MANY[:, 1] > 0)
MANY_SERIES = _RNG.normal(size=(300, 6, 3)).astype("float32")
LARGE: dict[str, Any] = {
    "x": MANY,
    "y": MANY_CLASSES,
    "batch_size": 150,
    "epochs": 3,
    "is_comparable": False,
}
MODELS |= {
    "many rows, twelve layers, SGD 1.0": plain(
        *deep(48), OUT, optimizer=lambda: optimizers.SGD(1.0), **LARGE
    ),
    "many rows, twelve layers, Adam 0.1": plain(
        *deep(48), OUT, optimizer=lambda: optimizers.Adam(0.1), **LARGE
    ),
    "many rows, a bias before normalization, Adam": plain(
        *NORMALIZED, optimizer=OPTIMIZERS["Adam"], **LARGE
    ),
    "many rows, a bias before normalization, SGD": plain(
        *NORMALIZED, optimizer=lambda: optimizers.SGD(1.0), **LARGE
    ),
    "many rows, a bias before synchronized normalization, Adam": plain(
        *SYNCHRONIZED, optimizer=OPTIMIZERS["Adam"], **LARGE
    ),
    "many rows, a bias of attention's keys, Adam": functional(
        attention,
        optimizer=OPTIMIZERS["Adam"],
        **{**LARGE, "batch_size": 50, "x": MANY_SERIES, "y": MANY_CLASSES[:300]},
    ),
    "many rows, float16, Adam": Subject(
        typed("mixed_float16", *NETWORK, optimizer=OPTIMIZERS["Adam"]),
        (MANY, MANY_CLASSES),
        batch_size=150,
        is_half=True,
        is_comparable=False,
    ),
    "many rows, bfloat16, momentum": Subject(
        typed("mixed_bfloat16", *NETWORK, optimizer=OPTIMIZERS["SGD momentum"]),
        (MANY, MANY_CLASSES),
        batch_size=150,
        is_half=True,
        is_comparable=False,
    ),
    "many rows, dead units": plain(
        lambda: layers.Dense(32, "relu", bias_initializer=keras.initializers.Constant(-3.0)),
        OUT,
        optimizer=OPTIMIZERS["RMSprop"],
        **LARGE,
    ),
    "many rows, saturated units": plain(
        lambda: layers.Rescaling(40.0), dense(32), OUT, optimizer=OPTIMIZERS["Nadam"], **LARGE
    ),
}
# Workers with 2/3 and 1/3 of the rows: their shares are no powers of two.
UNEVEN = [slice(0, 30), slice(30, 45)]


class Inverse(layers.Layer):
    """Uses an operation that has no kernel in half precision outside of a graph."""

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.math.erfinv(tf.tanh(x) * tf.cast(0.5, x.dtype))


MODELS |= {
    "bfloat16, batch normalization": Subject(
        typed(
            "bfloat16",
            typed_dense,
            lambda dtype: layers.BatchNormalization(dtype=dtype),
            typed_out,
        ),
        (X, Y),
        is_half=True,
        is_comparable=False,
    ),
    "bfloat16, an uneven embedding with dropout": Subject(
        typed(
            "bfloat16",
            lambda dtype: layers.Embedding(20, 12, dtype=dtype),
            lambda dtype: layers.Flatten(dtype=dtype),
            lambda dtype: layers.Dropout(0.3, dtype=dtype),
            typed_out,
            x=WORDS,
        ),
        (WORDS, Y),
        is_half=True,
        is_comparable=False,
        shards=UNEVEN,
    ),
    "XLA in half precision without an eager kernel": Subject(
        typed(
            "mixed_bfloat16",
            typed_dense,
            lambda dtype: Inverse(dtype=dtype),
            typed_out,
            jit_compile=True,
        ),
        (X, Y),
        is_half=True,
        is_comparable=False,
        custom_objects={"Inverse": Inverse},
    ),
    "a determination near zero, uneven": Subject(
        stack(
            lambda: layers.Dense(
                1, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(10.0)
            ),
            loss="mse",
            metrics=lambda: [keras.metrics.R2Score()],
        ),
        (X, 10 + 0.5 * X[:, :1]),
        is_comparable=False,
        shards=UNEVEN,
    ),
    "eager, a worker without rows in the last step": plain(
        dense(),
        OUT,
        x=X[:33],
        y=Y[:33],
        run_eagerly=True,
        settings={"exchange": Exchange(loss_over="global batch")},
    ),
}


@keras.saving.register_keras_serializable("tests")
def pairwise(y_true: Any, y_pred: Any) -> Any:
    """A ranking loss: the true gradient of the last bias is zero."""
    signs = keras.ops.sign(y_true - keras.ops.transpose(y_true))
    return keras.ops.mean(keras.ops.softplus((keras.ops.transpose(y_pred) - y_pred) * signs))


MODELS |= {
    "ranking over the global batch": plain(
        dense(),
        ONE,
        y=REAL,
        loss=pairwise,
        settings={"exchange": Exchange(loss_over="global batch")},
        epochs=6,
    ),
    "a metric that is NaN": plain(
        dense(), ONE, y=REAL, loss="mse", metrics=lambda: [keras.metrics.PearsonCorrelation()]
    ),
}
