"""Series: classes, forecasts, traffic and anomalies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, compiled
from programs.rows import CLASSES, FLAGS, NEXT, ROWS, SERIES


def forecaster() -> Any:
    series = keras.Input((8, 2))
    x = layers.GRU(6, dropout=0.1, return_sequences=True)(series)
    x = layers.Conv1D(6, 3, padding="causal", activation="relu")(x)
    return compiled(keras.Model(series, layers.Dense(3)(layers.LSTM(5)(x))), "huber")


def n_beats() -> Any:
    series = keras.Input((8, 2))
    left = layers.Flatten()(series)
    forecast: Any = 0
    for _ in range(3):
        x = layers.Dense(12, activation="relu")(layers.Dense(12, activation="relu")(left))
        left = left - layers.Dense(16)(x)
        forecast = forecast + layers.Dense(3)(x)
    return compiled(keras.Model(series, forecast), "mae", metrics=["mse"])


def weather() -> Any:
    series = keras.Input((8, 2))
    x = layers.Dense(1)(layers.LSTM(8)(series))
    return compiled(keras.Model(series, x), "mse", keras.optimizers.Adam(0.001))


def convolved() -> Any:
    series = keras.Input((8, 2))
    x = series
    for _ in range(2):
        x = layers.Conv1D(6, 3, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    metrics = ["sparse_categorical_accuracy"]
    return compiled(keras.Model(series, x), "sparse_categorical_crossentropy", metrics=metrics)


def transformer() -> Any:
    series = keras.Input((8, 2))
    x = layers.MultiHeadAttention(2, 4, dropout=0.25, use_bias=False)(series, series)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.25)(x)) + series
    found = layers.Conv1D(2, 1)(layers.Dropout(0.25)(layers.Conv1D(4, 1, activation="relu")(x)))
    x = layers.LayerNormalization(epsilon=1e-6)(found) + x
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    model = keras.Model(series, layers.Dense(4, activation="softmax")(x))
    return compiled(model, "sparse_categorical_crossentropy", keras.optimizers.Adam(1e-4))


class RoadConvolution(layers.Layer):
    """Averages the neighbours of each road, whose list all rows share."""

    def __init__(self, edges: Any) -> None:
        super().__init__()
        self.sources, self.targets = edges

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")

    def call(self, features: Any) -> Any:
        by_node = ops.transpose(features, (1, 0, 2, 3))
        messages = tf.gather(by_node, self.sources)
        means = tf.math.unsorted_segment_mean(messages, self.targets, by_node.shape[0])
        joined = [ops.matmul(part, self.weight) for part in (by_node, means)]
        return ops.transpose(ops.relu(ops.concatenate(joined, -1)), (1, 0, 2, 3))


def traffic() -> Any:
    series = keras.Input((5, 6, 1))
    edges = np.array([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    x = RoadConvolution(edges)(series)
    x = layers.LSTM(6, activation="relu")(ops.reshape(x, (-1, 6, 8)))
    x = ops.reshape(layers.Dense(3)(x), (-1, 5, 3))
    optimizer = keras.optimizers.RMSprop(0.0002)
    return compiled(keras.Model(series, x), keras.losses.MeanSquaredError(), optimizer)


def anomalies() -> Any:
    series = keras.Input((8, 2))
    x = layers.Conv1D(6, 3, padding="same", strides=2, activation="relu")(series)
    x = layers.Dropout(0.2)(x)
    x = layers.Conv1DTranspose(6, 3, padding="same", strides=2, activation="relu")(x)
    x = layers.Conv1DTranspose(2, 3, padding="same")(x)
    return compiled(keras.Model(series, x), "mse", keras.optimizers.Adam(0.001))


def waves() -> Any:
    """Brain signals, classified with separable convolutions and L2, for weighted classes."""
    series = keras.Input((8, 2))
    x = layers.Conv1D(4, 3, strides=2, padding="same", activation="relu")(series)
    x = layers.BatchNormalization(synchronized=True)(x)
    x = layers.LeakyReLU()(layers.Dense(8, kernel_regularizer="l2")(layers.Flatten()(x)))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Recall(name="recall")]
    model = keras.Model(series, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, keras.losses.BinaryCrossentropy(), metrics=metrics)


ROADS = np.random.default_rng(4).normal(size=(ROWS, 5, 9, 1)).astype("float32")

PROGRAMS = {
    "forecaster": Program(forecaster, (SERIES, NEXT), is_random=True),
    "N-BEATS": Program(n_beats, (SERIES, NEXT)),
    "weather": Program(weather, (SERIES, NEXT[:, :1])),
    "convolutional classifier": Program(convolved, (SERIES, CLASSES), is_random=True),
    "transformer classifier": Program(transformer, (SERIES, CLASSES), is_random=True),
    "traffic": Program(traffic, (ROADS[:, :, :6], ROADS[:, :, 6:, 0])),
    "anomalies": Program(anomalies, (SERIES, SERIES), is_random=True),
    "brain waves": Program(
        waves, (SERIES, FLAGS.astype("float32")), settings={"class_weight": {0: 0.7, 1: 1.6}}
    ),
}
