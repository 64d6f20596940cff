"""Ways to write layers, optimizers, losses and training steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import LOGITS, Program, compiled
from programs.rows import CLASSES, FLAGS, IDS, IMAGES, NEXT, NUMBERS, ROWS


def low_rank() -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.layers[0].enable_lora(2)
    return compiled(model)


def half() -> Any:
    layer = [layers.Dense(8, "relu", dtype="mixed_float16") for _ in range(2)]
    head = layers.Dense(4, dtype="float32")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    return compiled(keras.Sequential([keras.Input((10,)), *layer, head]), optimizer=optimizer)


class Endpoint(layers.Layer):
    """A last layer that adds the loss and a metric of labels that are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits: Any, targets: Any = None) -> Any:
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits))
            self.accuracy_metric.update_state(targets, ops.sigmoid(logits))
        return ops.sigmoid(logits)


def endpoint() -> Any:
    numbers, targets = keras.Input((10,), name="numbers"), keras.Input((1,), name="targets")
    x = Endpoint()(layers.Dense(1)(layers.Dense(8, "relu")(numbers)), targets)
    model = keras.Model({"numbers": numbers, "targets": targets}, x)
    model.compile(keras.optimizers.Adam(1e-3))
    return model


class Trainer(keras.Model):
    """Trains the model that it is given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = LOGITS
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.accuracy_metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_metric, self.accuracy_metric]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            found = self.model(x, training=True)
            loss = self.loss_fn(y, found)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_metric.update_state(loss)
        self.accuracy_metric.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}

    def call(self, x: Any) -> Any:
        return self.model(x)


def trainer() -> Any:
    inner = keras.Sequential([keras.Input((10,)), layers.Dense(6, "relu"), layers.Dense(4)])
    model = Trainer(inner)
    model.build((None, 10))
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


class OwnTracker(keras.Model):
    """Lists only its own tracker, in addition to which Keras's train_step has another one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.mean((y - y_pred) ** 2)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.tracker.update_state(ops.mean((y - y_pred) ** 2, -1))
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


def own_tracker() -> Any:
    numbers = keras.Input((10,))
    model = OwnTracker(inputs=numbers, outputs=layers.Dense(3)(numbers))
    model.compile("sgd")
    return model


class Mixture(keras.losses.Loss):
    """Return the negative log-likelihood under a mixture of normal distributions."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        mean, width, weights = ops.split(y_pred, 3, axis=-1)
        width = ops.elu(width) + 1 + 1e-3
        chance = -0.5 * ((y_true - mean) / width) ** 2 - ops.log(width)
        return -ops.logsumexp(chance + ops.log_softmax(weights), axis=-1)


def mixture_density() -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu"), layers.Dense(9)])
    return compiled(model, Mixture(), keras.optimizers.Adam(1e-3))


class Fourier(layers.Layer):
    """Random features of a Gaussian kernel, drawn once."""

    def build(self, shape: Any) -> None:
        normal = keras.initializers.RandomNormal(stddev=0.5, seed=3)
        self.kernel = self.add_weight(shape=(shape[-1], 12), initializer=normal, trainable=False)

    def call(self, x: Any) -> Any:
        return ops.cos(ops.matmul(x, self.kernel))


def quasi_svm() -> Any:
    model = keras.Sequential([keras.Input((10,)), Fourier(), layers.Dense(4)])
    metrics = [keras.metrics.CategoricalAccuracy(name="acc")]
    return compiled(model, keras.losses.hinge, keras.optimizers.Adam(1e-3), metrics=metrics)


def small_tables() -> Any:
    """Two small tables instead of one, for the remainder and the quotient of a number."""
    ids = keras.Input((3,), dtype="int32")
    parts = layers.Embedding(5, 4)(ids % 5) * layers.Embedding(4, 4)(ids // 5)
    wide = layers.Embedding(20, 2)(ids)
    x = layers.Concatenate()([layers.Flatten()(parts), layers.Flatten()(layers.Dense(4)(wide))])
    return compiled(keras.Model(ids, layers.Dense(1)(x)), "mse", metrics=["mae"])


class Standardized(layers.Conv2D):
    """A convolution whose kernel has mean 0 and variance 1."""

    def call(self, x: Any) -> Any:
        mean, spread = ops.moments(self.kernel, axes=(0, 1, 2), keepdims=True)
        kernel = (self.kernel - mean) / ops.sqrt(spread + 1e-5)
        return ops.conv(x, kernel, padding=self.padding) + self.bias


def standardized() -> Any:
    model = keras.Sequential([keras.Input((8, 8, 3)), Standardized(6, 3, activation="relu")])
    for layer in (layers.GroupNormalization(3), layers.GlobalMaxPooling2D(), layers.Dense(4)):
        model.add(layer)
    return compiled(model)


class Centralized(keras.optimizers.RMSprop):
    """Subtracts the mean from each gradient of a matrix (gradient centralization)."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        centered = [
            g - ops.mean(g, axis=tuple(range(len(g.shape) - 1)), keepdims=True)
            if len(g.shape) > 1
            else g
            for g in grads
        ]
        super().apply(centered, trainable_variables)


def centralized() -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu"), layers.Dense(4)])
    return compiled(model, optimizer=Centralized(1e-3))


class Rounded(layers.Layer):
    """Rounds to 4 bits forward, and passes gradients; adds noise to the weights in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8)
        self.seeds = keras.random.SeedGenerator(2)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        kernel = self.inner.kernel
        size = ops.max(ops.abs(kernel)) / 7
        rounded = ops.round(kernel / size) * size
        if training:
            rounded += 0.01 * size * keras.random.uniform(kernel.shape, -1, 1, seed=self.seeds)
        kernel = kernel + ops.stop_gradient(rounded - kernel)
        return ops.relu(ops.matmul(x, kernel) + self.inner.bias)


def quantized() -> Any:
    return compiled(keras.Sequential([keras.Input((10,)), Rounded(), layers.Dense(4)]))


class Reptile(keras.Model):
    """Each row is a task: some steps on its samples from the same start, whose mean is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers.Dense(3)
        self.net.build((None, 4))
        self.built = True

    def learn(self, task: Any) -> Any:
        shots, answers = task
        start = [weight.value for weight in self.net.trainable_variables]
        weights = start
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = ops.mean((ops.matmul(shots, weights[0]) + weights[1] - answers) ** 2)
            steps = tape.gradient(loss, weights)
            weights = [weight - 0.1 * g for weight, g in zip(weights, steps, strict=True)]
        return [one - other for one, other in zip(start, weights, strict=True)]

    def train_step(self, data: Any) -> Any:
        x, y = data
        signature = [tf.TensorSpec(weight.shape) for weight in self.net.trainable_variables]
        moved = tf.map_fn(self.learn, (x, y), fn_output_signature=signature)
        means = [ops.mean(part, 0) for part in moved]
        self.optimizer.apply_gradients(zip(means, self.net.trainable_variables, strict=True))
        return {"moved": ops.mean(means[0])}


def reptile() -> Any:
    model = Reptile()
    model.compile(optimizer=keras.optimizers.SGD(0.5))
    return model


class Antirectifier(layers.Layer):
    """Concatenates both signs of the centered and normalized input."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(2 * shape[-1], 6), initializer="he_normal")

    def call(self, x: Any) -> Any:
        x = ops.normalize(x - ops.mean(x, -1, keepdims=True), axis=-1)
        return ops.matmul(ops.concatenate([ops.relu(x), ops.relu(-x)], -1), self.kernel)


def antirectifier() -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(6), Antirectifier()])
    model.add(layers.Dense(4))
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    return compiled(model, LOGITS, keras.optimizers.RMSprop(), metrics=metrics)


SHOTS = np.random.default_rng(8).normal(size=(ROWS, 5, 7)).astype("float32")
SIGNS = 2 * np.eye(4, dtype="float32")[CLASSES] - 1

PROGRAMS = {
    "low rank (LoRA)": Program(low_rank, (NUMBERS, CLASSES)),
    "mixed precision": Program(half, (NUMBERS, CLASSES), tolerance=1e-2),
    "endpoint layer": Program(endpoint, {"numbers": NUMBERS, "targets": FLAGS.astype("float32")}),
    "trainer of a model": Program(trainer, (NUMBERS, CLASSES)),
    "tracker of the loss": Program(own_tracker, (NUMBERS, NEXT)),
    "mixture density": Program(mixture_density, (NUMBERS, NEXT[:, :1])),
    "quasi-SVM": Program(quasi_svm, (NUMBERS, SIGNS)),
    "small embeddings": Program(small_tables, (IDS, NEXT[:, :1])),
    "standardized convolution": Program(standardized, (IMAGES, CLASSES)),
    "gradient centralization": Program(centralized, (NUMBERS, CLASSES)),
    "quantization": Program(quantized, (NUMBERS, CLASSES), is_random=True),
    "Reptile": Program(reptile, (SHOTS[..., :4], SHOTS[..., 4:]), lines=4),
    "antirectifier": Program(antirectifier, (NUMBERS, CLASSES)),
}
