"""Representations and teachers: rows compared with other rows, or with a network's outputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import GLOBAL, LOGITS, Program, compiled
from programs.rows import CLASSES, FLAGS, IMAGES, NUMBERS


def network(units: int = 6, activation: Any = None) -> Any:
    hidden = layers.Dense(8, activation="relu")
    return keras.Sequential([keras.Input((10,)), hidden, layers.Dense(units, activation)])


def step(model: Any, tape: Any, loss: Any, weights: Any, optimizer: Any = None) -> None:
    """Apply the gradients of a loss."""
    found = zip(tape.gradient(loss, weights), weights, strict=True)
    (optimizer or model.optimizer).apply_gradients(found)


class Tracked(keras.Model):
    """A model with its own train_step and the mean of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def log(self, loss: Any) -> Any:
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# Models that compare rows with each other.


def contrast(one: Any, other: Any) -> Any:
    """Return the loss of each row of one view against all rows of the other (NT-Xent)."""
    one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
    alike = ops.matmul(one, ops.transpose(other)) / 0.1
    right = ops.arange(ops.shape(one)[0])
    both = [
        keras.losses.sparse_categorical_crossentropy(right, logits, from_logits=True)
        for logits in (alike, ops.transpose(alike))
    ]
    return ops.mean(both[0] + both[1]) / 2


class SimClr(Tracked):
    """Two noisy views of each row, an encoder, and a probe with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.views = [layers.GaussianNoise(0.1, seed=n) for n in (1, 2)]
        self.encoder, self.probe = network(), keras.Sequential([keras.Input((6,)), layers.Dense(4)])

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any) -> None:
        super().compile()
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = LOGITS

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        return contrast(one, other)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            both = [self.encoder(view(x, training=True)) for view in self.views]
            loss = self.contrastive_loss(*both)
        step(self, tape, loss, self.encoder.trainable_weights, self.contrastive_optimizer)
        with tf.GradientTape() as tape:
            probed = self.probe_loss(y, self.probe(self.encoder(x)))
        step(self, tape, probed, self.probe.trainable_weights, self.probe_optimizer)
        return self.log(loss)


class SimClrOverBatch(SimClr):
    """Compares rows in `compute_loss`."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return contrast(*y_pred)

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        return self.compute_loss(y_pred=(one, other))


def simclr(kind: Any) -> Any:
    model = kind()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


class Supervised(keras.losses.Loss):
    """Return the loss that draws rows of one class together (supervised contrastive)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        vectors = ops.normalize(y_pred, axis=1)
        logits = ops.matmul(vectors, ops.transpose(vectors)) / 0.5
        y_true = ops.reshape(y_true, (-1, 1))
        same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), "float32")
        same = same / ops.sum(same, 1, keepdims=True)
        return ops.categorical_crossentropy(same, logits, from_logits=True)


def supervised() -> Any:
    return compiled(network(), Supervised(), keras.optimizers.SGD(0.05))


class BarlowTwins(Tracked):
    """Makes the correlation of two views over the batch the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network()
        self.noise = layers.GaussianNoise(0.1, seed=4)

    def correlate(self, one: Any, other: Any) -> Any:
        one, other = (
            (part - ops.mean(part, 0)) / (ops.std(part, 0) + 1e-2) for part in (one, other)
        )
        count = ops.cast(ops.shape(one)[0], "float32")
        found = ops.matmul(ops.transpose(one), other) / count
        weights = ops.eye(6) + 0.005 * (1 - ops.eye(6))
        return ops.sum(weights * ops.square(found - ops.eye(6)))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            views = (self.noise(data[0], training=True) for _ in range(2))
            loss = self.compare(*(self.encoder(view) for view in views))
        step(self, tape, loss, self.encoder.trainable_variables)
        return self.log(loss)

    def compare(self, one: Any, other: Any) -> Any:
        return self.correlate(one, other)


class BarlowTwinsOverBatch(BarlowTwins):
    """Calls `compute_loss`."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return self.correlate(y, y_pred)

    def compare(self, one: Any, other: Any) -> Any:
        return self.compute_loss(y=one, y_pred=other)


def barlow(kind: Any) -> Any:
    model = kind()
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    return model


class Queue(SimClr):
    """Compares with the nearest of the last rows, which a variable stores (NNCLR)."""

    def __init__(self) -> None:
        super().__init__()
        first = np.random.default_rng(1).normal(size=(16, 6)).astype("float32")
        self.kept = keras.Variable(first, trainable=False, name="feature_queue")

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        near = ops.argmax(ops.matmul(ops.normalize(one, axis=1), ops.transpose(self.kept)), 1)
        loss = contrast(ops.take(self.kept, near, axis=0), other)
        self.kept.assign(ops.concatenate([ops.stop_gradient(one), self.kept], 0)[:16])
        return loss


class QueueOverBatch(Queue):
    """Compares with, and fills the queue from, the rows of all workers."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return Queue.contrastive_loss(self, *y_pred)

    def contrastive_loss(self, one: Any, other: Any) -> Any:
        return self.compute_loss(y_pred=(one, other))


class Similarity(keras.Model):
    """Metric learning: each anchor should find its positive among a batch's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network()
        self.encoder.build((None, 10))

    def train_step(self, data: Any) -> Any:
        anchors, positives = data
        with tf.GradientTape() as tape:
            one, other = self.encoder(anchors), self.encoder(positives)
            loss = self.compare(one, other)
        step(self, tape, loss, self.trainable_variables)
        return {"loss": loss}

    def compare(self, one: Any, other: Any) -> Any:
        alike = ops.einsum("ae,pe->ap", one, other) / 0.2
        return self.compute_loss(y=ops.arange(ops.shape(one)[0]), y_pred=alike)


class SimilarityOverBatch(Similarity):
    """Passes `compute_loss` the vectors, not their products with those of a worker's rows."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        alike = ops.einsum("ae,pe->ap", y, y_pred) / 0.2
        return super().compute_loss(y=ops.arange(ops.shape(y)[0]), y_pred=alike)

    def compare(self, one: Any, other: Any) -> Any:
        return self.compute_loss(y=one, y_pred=other)


def image_similarity(kind: Any) -> Any:
    return compiled(kind(), LOGITS, keras.optimizers.SGD(0.05))


# Models that use each row separately.


class Triplets(Tracked):
    """An anchor, a similar and a different row, compared by distances; no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.margin = network(), 5.0

    def distances(self, data: Any) -> Any:
        anchor, like, unlike = (self.encoder(part) for part in data)
        return ops.sum((anchor - like) ** 2, -1), ops.sum((anchor - unlike) ** 2, -1)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            near, far = self.distances(data)
            loss = ops.mean(ops.maximum(near - far + self.margin, 0.0))
        step(self, tape, loss, self.encoder.trainable_weights)
        return self.log(loss)

    def test_step(self, data: Any) -> Any:
        near, far = self.distances(data)
        return self.log(ops.mean(ops.maximum(near - far + self.margin, 0.0)))


def triplets() -> Any:
    model = Triplets()
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return model


def siamese() -> Any:
    branch = keras.Sequential([keras.Input((5,)), layers.Dense(6, "relu"), layers.Dense(3)])
    one, other = keras.Input((5,)), keras.Input((5,))
    distance = ops.sum(ops.square(branch(one) - branch(other)), -1, keepdims=True)
    return compiled(keras.Model([one, other], ops.exp(-distance)), "binary_crossentropy")


class SimSiam(Tracked):
    """Two views and a predictor, with a gradient that is stopped on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network()
        self.predictor = keras.Sequential([keras.Input((6,)), layers.Dense(6)])

    def gap(self, p: Any, z: Any) -> Any:
        z = ops.normalize(ops.stop_gradient(z), axis=1)
        return -ops.mean(ops.sum(ops.normalize(p, axis=1) * z, 1))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            z = [self.encoder(view) for view in data]
            p = [self.predictor(part) for part in z]
            loss = self.gap(p[0], z[1]) / 2 + self.gap(p[1], z[0]) / 2
        step(
            self, tape, loss, self.encoder.trainable_variables + self.predictor.trainable_variables
        )
        return self.log(loss)


class Byol(SimSiam):
    """Compares with a teacher that follows the encoder slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.models.clone_model(self.encoder)
        self.teacher.set_weights(self.encoder.get_weights())
        self.teacher.trainable = False

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            p = [self.predictor(self.encoder(view)) for view in data]
            z = [self.teacher(view) for view in data]
            loss = self.gap(p[0], z[1]) + self.gap(p[1], z[0])
        step(
            self, tape, loss, self.encoder.trainable_variables + self.predictor.trainable_variables
        )
        for mean, weight in zip(self.teacher.weights, self.encoder.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        return self.log(loss)


def views(kind: Any) -> Any:
    model = kind()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.6))
    return model


class MaskedPatches(keras.Model):
    """Encodes a quarter of the patches, chosen at random, and reconstructs the others (MAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((None, 48)), layers.Dense(6, "gelu")])
        self.decoder = keras.Sequential([keras.Input((4, 6)), layers.Flatten(), layers.Dense(192)])
        self.places = self.add_weight(shape=(4, 6), name="places")
        self.absent = self.add_weight(shape=(1, 6), name="absent")
        self.seeds = keras.random.SeedGenerator(42)
        self.built = True

    def train_step(self, images: Any) -> Any:
        patches = ops.reshape(ops.image.extract_patches(images, 4), (-1, 4, 48))
        order = ops.argsort(keras.random.uniform(ops.shape(patches)[:2], seed=self.seeds), 1)
        hidden = ops.one_hot(order[:, 1:], 4)
        with tf.GradientTape() as tape:
            seen = ops.transpose(ops.one_hot(order[:, :1], 4), (0, 2, 1))
            states = self.encoder(patches) + self.places
            states = states * seen + (1 - seen) * (self.absent + self.places)
            drawn = ops.reshape(self.decoder(states), (-1, 4, 48))
            loss = self.compute_loss(
                y=ops.matmul(hidden, patches), y_pred=ops.matmul(hidden, drawn)
            )
        step(self, tape, loss, self.trainable_variables)
        self.compute_metrics(None, patches, drawn, None)
        return {m.name: m.result() for m in self.metrics}


def masked_patches() -> Any:
    optimizer = keras.optimizers.AdamW(0.001, weight_decay=0.01)
    model = MaskedPatches()
    return compiled(model, keras.losses.MeanSquaredError(), optimizer, metrics=["mae"])


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher, by a `compute_loss` of its own."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(
        self, optimizer: Any, metrics: Any, student_loss_fn: Any, distillation_loss_fn: Any
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        allow_empty: bool = False,
    ) -> Any:
        soft = [ops.softmax(part / 3, axis=1) for part in (self.teacher(x), y_pred)]
        return 0.1 * self.student_loss_fn(y, y_pred) + 0.9 * 9 * self.distillation_loss_fn(*soft)

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> Any:
    teacher = network(4)
    teacher.trainable = False
    model = Distiller(network(4), teacher)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    model.build((None, 10))
    model.compile(keras.optimizers.Adam(), metrics, LOGITS, keras.losses.KLDivergence())
    return model


class Consistent(Tracked):
    """Trained on labels, and to predict for a noisy row a teacher's result for the plain one."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(self, optimizer: Any, loss: Any, temperature: float) -> None:
        super().compile(optimizer=optimizer, loss=loss)
        self.consistency_loss, self.temperature = keras.losses.KLDivergence(), temperature

    def train_step(self, data: Any) -> Any:
        (clean, noisy), y = data
        told = self.teacher(clean) / self.temperature
        with tf.GradientTape() as tape:
            found = self.student(noisy)
            gap = self.consistency_loss(ops.softmax(told), ops.softmax(found / self.temperature))
            total = self.compute_loss(y=y, y_pred=found) + gap
        step(self, tape, total, self.student.trainable_variables)
        return self.log(total)


def consistent() -> Any:
    model = Consistent(network(4), network(4))
    model.compile(keras.optimizers.Adam(), LOGITS, 10)
    return model


class AdaMatch(Tracked):
    """Rows with labels, and rows of another domain, whose confident predictions become labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(4)
        self.current_step = tf.Variable(0, dtype="int64")

    def threshold(self, chances: Any) -> Any:
        return 0.9 * ops.mean(ops.max(chances, -1))

    def train_step(self, data: Any) -> Any:
        (source, y), (target, _) = data
        with tf.GradientTape() as tape:
            logits = self.net(ops.concatenate([source, target], 0))
            count = ops.shape(source)[0]
            chances = ops.softmax(logits[:count]), ops.softmax(logits[count:])
            likely = ops.max(chances[1], -1) > self.threshold(chances[0])
            pseudo = ops.stop_gradient(chances[1])
            each = keras.losses.categorical_crossentropy(pseudo, chances[1])
            weight = ops.minimum(1.0, ops.cast(self.current_step, "float32") / 4)
            chosen = ops.mean(each * ops.cast(likely, "float32"))
            loss = LOGITS(y, logits[:count]) + weight * chosen
            self.current_step.assign_add(1)
        step(self, tape, loss, self.net.trainable_variables)
        return self.log(loss)


class AdaMatchOverBatch(AdaMatch):
    """Computes the threshold as a mean over the rows of all workers."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return super().threshold(y_pred)

    def threshold(self, chances: Any) -> Any:
        return self.compute_loss(y_pred=chances)


def adamatch(kind: Any) -> Any:
    model = kind()
    model.compile(optimizer=keras.optimizers.Adam(0.03))
    return model


PAIRS = NUMBERS, NUMBERS + 0.1 * NUMBERS[::-1]
TRIPLES = NUMBERS, NUMBERS * 1.1, NUMBERS[::-1].copy()
ROWS_WITH_LABELS = NUMBERS, CLASSES
DOMAINS = (NUMBERS, CLASSES), (0.5 + NUMBERS[::-1], CLASSES)

PROGRAMS = {
    "SimCLR, in a train_step": Program(
        lambda: simclr(SimClr), ROWS_WITH_LABELS, error="self.compute_loss()"
    ),
    "SimCLR": Program(
        lambda: simclr(SimClrOverBatch),
        ROWS_WITH_LABELS,
        lines=5,
        is_random=True,
        settings=GLOBAL,
    ),
    "supervised contrastive, of a worker's rows": Program(
        supervised, ROWS_WITH_LABELS, error="loss_over"
    ),
    "supervised contrastive": Program(supervised, ROWS_WITH_LABELS, lines=2, settings=GLOBAL),
    "Barlow Twins, in a train_step": Program(
        lambda: barlow(BarlowTwins), ROWS_WITH_LABELS, error="self.compute_loss()"
    ),
    "Barlow Twins": Program(
        lambda: barlow(BarlowTwinsOverBatch),
        ROWS_WITH_LABELS,
        lines=5,
        is_random=True,
        settings=GLOBAL,
    ),
    "NNCLR, a queue of a worker's rows": Program(
        lambda: simclr(Queue), ROWS_WITH_LABELS, error="self.compute_loss()"
    ),
    "NNCLR": Program(
        lambda: simclr(QueueOverBatch),
        ROWS_WITH_LABELS,
        lines=5,
        is_random=True,
        settings=GLOBAL,
    ),
    "image similarity, of a worker's rows": Program(
        lambda: image_similarity(Similarity), PAIRS, error="loss_over"
    ),
    "image similarity": Program(
        lambda: image_similarity(SimilarityOverBatch), PAIRS, lines=6, settings=GLOBAL
    ),
    "triplets": Program(triplets, TRIPLES, validation=tuple(part[:32] for part in TRIPLES)),
    "siamese": Program(siamese, ([NUMBERS[:, :5], NUMBERS[:, 5:]], FLAGS)),
    "SimSiam": Program(lambda: views(SimSiam), PAIRS),
    "BYOL": Program(lambda: views(Byol), PAIRS),
    "masked autoencoder": Program(masked_patches, IMAGES, is_random=True),
    "distillation": Program(distiller, ROWS_WITH_LABELS, validation=(NUMBERS[:31], CLASSES[:31])),
    "consistency": Program(consistent, (list(PAIRS), CLASSES)),
    "AdaMatch, a threshold of a batch": Program(
        lambda: adamatch(AdaMatch), DOMAINS, error="self.compute_loss()"
    ),
    "AdaMatch": Program(lambda: adamatch(AdaMatchOverBatch), DOMAINS, lines=5, settings=GLOBAL),
}
