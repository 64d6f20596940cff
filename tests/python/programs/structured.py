"""Tables: clicks, ratings, prices and fraud."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops
from programs.program import GLOBAL, Program, compiled
from programs.rows import CLASSES, FLAGS, IDS, NEXT, NUMBERS, ROWS


def dlrm() -> Any:
    numbers, ids = keras.Input((10,)), keras.Input((3,), dtype="int32")
    dense = layers.Dense(4, activation="relu")(numbers)
    found = layers.Embedding(20, 4)(ids)
    each = layers.Concatenate(axis=1)([layers.Reshape((1, 4))(dense), found])
    crossed = layers.Flatten()(layers.Dot(axes=2)([each, each]))
    x = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([crossed, dense]))
    return compiled(keras.Model([numbers, ids], x), "binary_crossentropy", "adagrad")


def tabnet() -> Any:
    numbers = keras.Input((10,))
    x = layers.BatchNormalization()(numbers)
    total: Any = 0
    for _ in range(2):
        mask = layers.Softmax()(layers.BatchNormalization()(layers.Dense(10)(x)))
        wide = layers.Dense(12)(layers.Multiply()([mask, x]))
        gate = layers.Activation("sigmoid")(wide[:, 6:])
        total = total + layers.ReLU()(layers.Multiply()([wide[:, :6], gate]))
    return compiled(keras.Model(numbers, layers.Dense(4)(total)))


def fraud() -> Any:
    """Rare positives: weights of classes and counts of hits and misses."""
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu"), layers.Dropout(0.3)])
    model.add(layers.Dense(1, activation="sigmoid"))
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
    ]
    return compiled(model, "binary_crossentropy", keras.optimizers.Adam(1e-2), metrics=metrics)


def wide_deep_cross() -> Any:
    numbers = keras.Input((10,))
    kinds = keras.Input((1,), dtype="int64")
    codes = layers.IntegerLookup(vocabulary=[3, 5, 7])(kinds)
    found = ops.squeeze(layers.Embedding(4, 3)(codes), 1)
    first = cross = layers.Concatenate()([numbers, found])
    for _ in range(2):
        cross = first * layers.Dense(13)(cross) + cross
    deep = layers.BatchNormalization(synchronized=True)(layers.Dense(8, use_bias=False)(first))
    x = layers.Concatenate()([cross, layers.ReLU()(deep), layers.CategoryEncoding(4)(codes)])
    model = keras.Model([numbers, kinds], layers.Dense(4, activation="softmax")(x))
    return compiled(model, "sparse_categorical_crossentropy", metrics=["accuracy"])


def tab_transformer() -> Any:
    numbers, ids = keras.Input((10,)), keras.Input((3,), dtype="int32")
    x = layers.Embedding(20, 4)(ids) + layers.Embedding(3, 4)(ops.arange(3))
    found = layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
    x = layers.LayerNormalization()(x + found)
    x = layers.LayerNormalization()(x + layers.Dense(4, activation="gelu")(x))
    x = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization()(numbers)])
    x = layers.Dense(1, activation="sigmoid")(layers.Dense(8, activation="selu")(x))
    optimizer = keras.optimizers.AdamW(0.001, weight_decay=0.0001)
    model = keras.Model([numbers, ids], x)
    return compiled(model, "binary_crossentropy", optimizer, metrics=["accuracy"])


def gated(x: Any, units: int) -> Any:
    """A gated residual network."""
    found = layers.Dense(units)(layers.Dense(units, activation="elu")(x))
    found = layers.Dense(units)(found) * layers.Dense(units, activation="sigmoid")(found)
    return layers.LayerNormalization()(found + layers.Dense(units)(x))


def variable_selection() -> Any:
    numbers, weights = keras.Input((10,)), []
    parts = [gated(numbers[:, n : n + 2], 4) for n in (0, 2, 4)]
    weights = layers.Softmax()(gated(layers.Concatenate()(parts), 3))
    x = ops.sum(ops.stack(parts, 1) * weights[..., None], 1)
    model = keras.Model(numbers, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, "binary_crossentropy", metrics=["accuracy"])


class Tree(keras.Model):
    """A tree whose decisions are soft, over a random part of the features."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = np.random.default_rng(seed).permutation(10)[:6]
        self.features = np.eye(10, dtype="float32")[chosen].T
        self.decide = layers.Dense(4, activation="sigmoid")
        self.decide.build((None, 6))
        self.leaves = self.add_weight(shape=(4, 4), initializer="random_normal")

    def call(self, x: Any) -> Any:
        right = self.decide(ops.matmul(x, self.features))
        paths = ops.ones_like(right[:, :1])
        for level in range(2):
            at = right[:, 2**level : 2 ** (level + 1)]
            both = ops.stack([paths * (1 - at), paths * at], 2)
            paths = ops.reshape(both, (-1, 2 ** (level + 1)))
        return ops.matmul(paths, ops.softmax(self.leaves))


def forest() -> Any:
    numbers = keras.Input((10,))
    x = layers.BatchNormalization(synchronized=True)(numbers)
    found = sum(Tree(seed)(x) for seed in range(3)) / 3
    return compiled(keras.Model(numbers, found), "sparse_categorical_crossentropy")


class Recommender(keras.Model):
    """Users and films, by the product of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": "l2"}
        self.tables = [layers.Embedding(20, 4, **options) for _ in range(2)]
        self.biases = [layers.Embedding(20, 1) for _ in range(2)]
        for table in (*self.tables, *self.biases):
            table.build(None)
        self.built = True

    def call(self, ids: Any) -> Any:
        vectors = [table(ids[:, n]) for n, table in enumerate(self.tables)]
        biases = [table(ids[:, n]) for n, table in enumerate(self.biases)]
        return ops.sigmoid(self.multiply(*vectors) + biases[0] + biases[1])

    def multiply(self, user: Any, film: Any) -> Any:
        return ops.tensordot(user, film, 2)


class RecommenderByRow(Recommender):
    """The product of each user with the film of the same row, not the sum of all rows."""

    def multiply(self, user: Any, film: Any) -> Any:
        return ops.sum(user * film, axis=1, keepdims=True)


def recommender(kind: Any) -> Any:
    return compiled(kind(), keras.losses.BinaryCrossentropy(), keras.optimizers.Adam(0.001))


class InBatch(keras.losses.Loss):
    """The second half of a row's output is the answer to its first, and not to the others'."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        query, answer = ops.split(y_pred, 2, axis=-1)
        scores = ops.matmul(query, ops.transpose(answer))
        return -ops.diagonal(ops.log_softmax(scores, -1))


def two_towers() -> Any:
    ids = keras.Input((3,), dtype="int32")
    query = layers.Dense(4)(layers.Embedding(20, 6)(ids[:, 0]))
    answer = layers.Dense(4)(layers.Flatten()(layers.Embedding(20, 6)(ids[:, 1:])))
    return compiled(keras.Model(ids, layers.Concatenate()([query, answer])), InBatch())


def behavior_sequence() -> Any:
    """What somebody has rated, in order, and what is asked: a transformer over both."""
    seen, stars = keras.Input((3,), dtype="int32"), keras.Input((3,))
    films = layers.Embedding(20, 5)
    x = films(seen) * stars[..., None]
    found = layers.MultiHeadAttention(1, 5, use_bias=False)(x, x)
    x = layers.LayerNormalization()(x + found)
    x = layers.Dense(8)(layers.Flatten()(x))
    x = layers.LeakyReLU()(layers.BatchNormalization(synchronized=True)(x))
    optimizer = keras.optimizers.Adagrad(0.01)
    metrics = [keras.metrics.MeanAbsoluteError()]
    return compiled(
        keras.Model([seen, stars], layers.Dense(1)(x)), "mse", optimizer, metrics=metrics
    )


class Uncertain(layers.Layer):
    """Weights that are drawn in each step, near to a prior (variational)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.seeds = keras.random.SeedGenerator(5)

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1], 4), name="mean")
        self.spread = self.add_weight(shape=(shape[-1], 4), initializer="zeros", name="spread")

    def call(self, x: Any) -> Any:
        width = ops.softplus(self.spread)
        kl = ops.sum(0.5 * (width**2 + self.mean**2 - 1) - ops.log(width))
        self.add_loss(kl / self.rows)
        drawn = keras.random.normal(self.mean.shape, seed=self.seeds)
        return ops.matmul(x, self.mean + width * drawn)


class Likelihood(keras.losses.Loss):
    """The negative logarithm of the chance of a number under a normal distribution."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        mean, width = y_pred[:, :1], ops.softplus(y_pred[:, 1:]) + 1e-3
        return ops.mean(0.5 * ((y_true - mean) / width) ** 2 + ops.log(width), -1)


def bayesian() -> Any:
    numbers = keras.Input((10,))
    x = layers.BatchNormalization(synchronized=True)(numbers)
    x = layers.Dense(2)(ops.sigmoid(Uncertain(ROWS)(x)))
    return compiled(keras.Model(numbers, x), Likelihood(), keras.optimizers.RMSprop(0.001))


def lifetime_value() -> Any:
    """A chance, and an amount that counts only where there is one."""
    numbers = keras.Input((10,))
    x = layers.Dense(8, activation="relu", kernel_regularizer="l2")(numbers)
    chance, amount = (
        layers.Dense(1, activation="sigmoid", name="chance"),
        layers.Dense(1, name="sum"),
    )
    outputs = [chance(x), amount(x)]
    model = keras.Model(numbers, outputs)
    return compiled(model, ["binary_crossentropy", "mean_absolute_error"], loss_weights=[1.0, 0.1])


KINDS = np.array([3, 5, 7])[CLASSES % 3][:, None]
STARS = np.abs(NEXT)

PROGRAMS = {
    "DLRM": Program(dlrm, ([NUMBERS, IDS], FLAGS)),
    "TabNet": Program(tabnet, (NUMBERS, CLASSES), is_random=True),
    "fraud": Program(
        fraud,
        (NUMBERS, FLAGS.astype("float32")),
        is_random=True,
        settings={"class_weight": {0: 0.6, 1: 3.0}},
    ),
    "wide, deep and cross": Program(wide_deep_cross, ([NUMBERS, KINDS], CLASSES)),
    "TabTransformer": Program(tab_transformer, ([NUMBERS, IDS], FLAGS)),
    "gated residual network": Program(variable_selection, (NUMBERS, FLAGS)),
    "decision forest": Program(forest, (NUMBERS, CLASSES)),
    "collaborative filtering, summed over rows": Program(
        lambda: recommender(Recommender),
        (IDS, FLAGS.astype("float32")),
        error="combines the rows of a batch",
    ),
    "collaborative filtering": Program(
        lambda: recommender(RecommenderByRow), (IDS, FLAGS.astype("float32")), lines=2
    ),
    "two towers, of a worker's rows": Program(two_towers, (IDS, CLASSES), error="loss_over"),
    "two towers": Program(two_towers, (IDS, CLASSES), lines=2, settings=GLOBAL),
    "behavior sequence": Program(behavior_sequence, ([IDS, STARS], NEXT[:, :1])),
    "Bayesian network": Program(bayesian, (NUMBERS, NEXT[:, :1]), is_random=True),
    "lifetime value": Program(lifetime_value, (NUMBERS, [FLAGS.astype("float32"), NEXT[:, :1]])),
}
