"""Graphs: one for each row, or one whose nodes are the rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import LOGITS, Program, compiled
from programs.rows import CLASSES, EDGES, FLAGS, IDS, NODES

_RNG = np.random.default_rng(6)
PAPERS = _RNG.normal(size=(20, 4)).astype("float32")
CITED = _RNG.integers(0, 20, (60, 2))


def convolution() -> Any:
    nodes, edges = keras.Input((5, 4)), keras.Input((5, 5))
    x = nodes
    for _ in range(2):
        degree = ops.sum(edges, -1, keepdims=True) + 1
        x = layers.Dense(6, activation="relu")((ops.matmul(edges, x) + x[..., :]) / degree)
    x = layers.GlobalAveragePooling1D()(x)
    return compiled(keras.Model([nodes, edges], layers.Dense(4)(x)))


class Citations(keras.Model):
    """Has the whole graph in the model: a row is the number of a node."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.message = layers.Dense(6, "gelu"), layers.Dense(6, "gelu")
        self.update, self.head = layers.Dense(6, "gelu"), layers.Dense(4)
        self(np.zeros(2, "int64"))

    def call(self, numbers: Any) -> Any:
        x = self.before(ops.array(PAPERS))
        for _ in range(2):
            messages = self.message(ops.take(x, CITED[:, 0], axis=0))
            total = tf.math.unsorted_segment_mean(messages, CITED[:, 1], 20)
            x = x + self.update(ops.concatenate([x, total], 1))
        return self.head(ops.take(x, numbers, axis=0))


def citations() -> Any:
    return compiled(Citations(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Attention(layers.Layer):
    """Weights the neighbours of each node of the graph (GAT)."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")
        self.attention = self.add_weight(shape=(8, 1), initializer="glorot_uniform")

    def call(self, states: Any, edges: Any) -> Any:
        states = ops.matmul(states, self.kernel)
        ends = ops.reshape(ops.take(states, edges, axis=0), (-1, 8))
        scores = ops.leaky_relu(ops.matmul(ends, self.attention))[:, 0]
        scores = ops.exp(ops.clip(scores, -2, 2))
        total = ops.segment_sum(scores, edges[:, 0], 20)
        shares = scores / ops.take(total, edges[:, 0])
        neighbours = ops.take(states, edges[:, 1], axis=0) * shares[:, None]
        return ops.segment_sum(neighbours, edges[:, 0], 20)


class GraphAttention(keras.Model):
    """Classifies nodes with a train_step over the whole graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = layers.Dense(4, activation="relu"), Attention()
        self.head = layers.Dense(4)
        self.call(None)

    def call(self, _: Any) -> Any:
        x = self.first(ops.array(PAPERS))
        return self.head(self.attention(x, CITED) + x)

    def train_step(self, data: Any) -> Any:
        indices, labels = data
        with tf.GradientTape() as tape:
            found = self.call(None)
            loss = self.compute_loss(y=labels, y_pred=tf.gather(found, indices))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.compute_metrics(None, labels, tf.gather(found, indices), None)
        return {m.name: m.result() for m in self.metrics}


def graph_attention() -> Any:
    model = GraphAttention()
    model.built = True
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
    return compiled(model, LOGITS, optimizer, metrics=["accuracy"])


class Messages(layers.Layer):
    """Sends messages along bonds between atoms, which a GRU aggregates."""

    def build(self, shapes: Any) -> None:
        self.bonds = self.add_weight(shape=(3, 4 * 4), initializer="glorot_uniform")
        self.cell = layers.GRUCell(4)
        self.cell.build((None, 4))

    def call(self, inputs: Any) -> Any:
        atoms, bonds, mask = inputs
        shape = ops.shape(atoms)
        kernels = ops.reshape(ops.matmul(ops.one_hot(bonds, 3), self.bonds), (-1, 5, 5, 4, 4))
        for _ in range(2):
            sent = ops.einsum("bijkl,bjl->bik", kernels, atoms) * mask
            atoms = self.cell(ops.reshape(sent, (-1, 4)), [ops.reshape(atoms, (-1, 4))])[0]
            atoms = ops.reshape(atoms, shape)
        return atoms


def molecules() -> Any:
    atoms, bonds = keras.Input((5, 4)), keras.Input((5, 5), dtype="int32")
    mask = keras.Input((5, 1))
    x = Messages()([atoms, bonds, mask])
    attended = ops.cast(ops.matmul(mask, ops.transpose(mask, (0, 2, 1))) > 0, "bool")
    x = x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, attention_mask=attended)
    x = ops.sum(x * mask, 1) / ops.sum(mask, 1)
    x = layers.Dense(1, activation="sigmoid")(layers.Dense(6, activation="relu")(x))
    model = keras.Model([atoms, bonds, mask], x)
    optimizer = keras.optimizers.Adam(5e-4)
    metrics = [keras.metrics.AUC(name="AUC")]
    return compiled(model, keras.losses.BinaryCrossentropy(), optimizer, metrics=metrics)


def walks() -> Any:
    target, context = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    table = layers.Embedding(20, 5, embeddings_initializer="he_normal", embeddings_regularizer="l2")
    x = layers.Dot(axes=1)([table(target), table(context)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return compiled(keras.Model([target, context], x), loss, keras.optimizers.Adam(0.001))


BONDS = np.argmax(np.stack([EDGES, EDGES[::-1], EDGES * 0.5], -1), -1)
ATOMS = (np.arange(5) < np.arange(len(NODES))[:, None] % 4 + 2)[..., None].astype("float32")

PROGRAMS = {
    "graph convolution": Program(convolution, ([NODES, EDGES], CLASSES)),
    "citations": Program(citations, (IDS[:, 0], CLASSES)),
    "graph attention": Program(graph_attention, (IDS[:, 0], CLASSES)),
    "message passing": Program(molecules, ([NODES, BONDS, ATOMS], FLAGS)),
    "random walks": Program(walks, ([IDS[:, 0], IDS[:, 1]], FLAGS.astype("float32"))),
}
