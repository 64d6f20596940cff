"""Contents of images beyond their class: boxes, depth, texts and better images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import GLOBAL, LOGITS, Program, compiled
from programs.rows import CLASSES, FLAGS, IMAGES, LABELS, MASKS, NEXT, NUMBERS, POINTS, ROWS, WORDS
from programs.vision import convolve

SMALL = IMAGES[:, ::2, ::2]


class RetinaLoss(keras.losses.Loss):
    """Focal loss of classes and smooth distances of boxes, by the anchors that have an object."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        is_object = ops.cast(y_true[..., 4] >= 0, "float32")
        gap = ops.abs(y_true[..., :4] - y_pred[..., :4])
        boxes = ops.sum(ops.where(gap < 1, 0.5 * gap**2, gap - 0.5), -1) * is_object
        kinds = ops.one_hot(ops.cast(y_true[..., 4], "int32"), 3)
        chance = ops.sigmoid(y_pred[..., 4:])
        cross = ops.binary_crossentropy(kinds, chance)
        hit = kinds * chance + (1 - kinds) * (1 - chance)
        focal = ops.sum((0.25 * kinds + 0.75 * (1 - kinds)) * (1 - hit) ** 2 * cross, -1)
        count = ops.maximum(ops.sum(is_object, -1), 1.0)
        return (ops.sum(boxes, -1) + ops.sum(focal, -1)) / count


def retinanet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, 2, padding="same", activation="relu")(image)
    deep = layers.Conv2D(6, 3, 2, padding="same")(x)
    x = layers.Conv2D(6, 1)(x) + layers.UpSampling2D(2)(deep)
    prior = keras.initializers.Constant(-np.log(99))
    kinds = layers.Conv2D(3, 3, padding="same", bias_initializer=prior)(x)
    boxes = layers.Conv2D(4, 3, padding="same")(x)
    x = layers.Reshape((16, 7))(layers.Concatenate()([boxes, kinds]))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return compiled(keras.Model(image, x), RetinaLoss(), optimizer)


def detector() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Flatten()(convolve(image, 4, 2))
    outputs = {"box": layers.Dense(3, name="box")(x), "kind": layers.Dense(4, name="kind")(x)}
    return compiled(
        keras.Model(image, outputs),
        {"box": "huber", "kind": LOGITS},
        loss_weights={"box": 0.5, "kind": 1.0},
        metrics={"kind": ["accuracy"]},
    )


def super_resolution() -> Any:
    image = keras.Input((4, 4, 3))
    x = layers.Conv2D(12, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(4, 3, padding="same")(x)
    x = layers.Reshape((4, 4, 2, 2, 1))(x)
    x = layers.Reshape((8, 8, 1))(layers.Permute((1, 3, 2, 4, 5))(x))
    return compiled(keras.Model(image, x), "mae")


def denoiser() -> Any:
    image = keras.Input((8, 8, 1))
    x = layers.MaxPooling2D()(layers.Conv2D(6, 3, padding="same", activation="relu")(image))
    x = layers.Conv2DTranspose(6, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)
    return compiled(keras.Model(image, x), "binary_crossentropy")


class ZeroDce(keras.Model):
    """Learns curves that brighten an image, without labels."""

    def __init__(self) -> None:
        super().__init__()
        image = keras.Input((8, 8, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
        self.curves = keras.Model(image, layers.Conv2D(6, 3, padding="same", activation="tanh")(x))

    def compile(self, learning_rate: float) -> None:
        super().compile()
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.total = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def compute_losses(self, dark: Any, curves: Any) -> Any:
        bright = dark
        for curve in ops.split(curves, 2, axis=-1):
            bright = bright + curve * (ops.square(bright) - bright)
        exposed = ops.average_pool(ops.mean(bright, -1, keepdims=True), 4, 4)
        color = ops.mean(bright, (1, 2))
        color = ops.mean(ops.square(color - ops.roll(color, 1, 1)))
        steep = ops.mean(ops.square(curves[:, 1:] - curves[:, :-1]))
        return ops.mean(ops.square(exposed - 0.6)) + color + steep

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_losses(data, self.curves(data))
        weights = self.curves.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss)
        return {"total_loss": self.total.result()}


def zero_dce() -> Any:
    model = ZeroDce()
    model.compile(learning_rate=0.01)
    return model


class DepthModel(keras.Model):
    """Depth of each pixel, with three losses, one of which compares whole images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 3, padding="same", activation="leaky_relu"),
                layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def calculate_loss(self, target: Any, found: Any) -> Any:
        down, right = tf.image.image_gradients(target)
        found_down, found_right = tf.image.image_gradients(found)
        smooth = tf.reduce_mean(tf.abs(found_down * tf.exp(tf.reduce_mean(tf.abs(down)))))
        smooth += tf.reduce_mean(tf.abs(found_right * tf.exp(tf.reduce_mean(tf.abs(right)))))
        alike = tf.reduce_mean(1 - tf.image.ssim(target, found, 1.0, 5))
        return alike + 0.1 * tf.reduce_mean(tf.abs(target - found)) + 0.9 * smooth

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.calculate_loss(data[1], self(data[0], training=True))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def call(self, x: Any) -> Any:
        return self.net(x)


class DepthByRow(DepthModel):
    """Weights the smoothness of each image by its own edges, not the batch's."""

    def calculate_loss(self, target: Any, found: Any) -> Any:
        smooth = 0.0
        pairs = zip(tf.image.image_gradients(target), tf.image.image_gradients(found), strict=True)
        for edge, found_edge in pairs:
            weight = tf.exp(tf.reduce_mean(tf.abs(edge), (1, 2, 3), keepdims=True))
            smooth += tf.reduce_mean(tf.abs(found_edge * weight))
        alike = tf.reduce_mean(1 - tf.image.ssim(target, found, 1.0, 5))
        return alike + 0.1 * tf.reduce_mean(tf.abs(target - found)) + 0.9 * smooth


def depth(kind: Any) -> Any:
    model = kind()
    model.build((None, 8, 8, 3))
    model.compile(keras.optimizers.SGD(0.05))
    return model


class CtcEndpoint(layers.Layer):
    """Adds the loss of labels that are an input."""

    def call(self, labels: Any, found: Any) -> Any:
        rows = ops.shape(found)[0]
        times = ops.ones((rows, 1), "int32") * found.shape[1]
        lengths = ops.ones((rows, 1), "int32") * labels.shape[1]
        loss = keras.ops.ctc_loss(
            ops.cast(labels, "int32"), ops.log(found + 1e-7), lengths[:, 0], times[:, 0], 4
        )
        self.add_loss(ops.mean(loss))
        return found


def ocr() -> Any:
    image = keras.Input((8, 8, 3), name="image")
    labels = keras.Input((3,), name="label")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Reshape((8, 16))(layers.MaxPooling2D((1, 2))(x))
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    x = CtcEndpoint()(labels, layers.Dense(5, activation="softmax")(x))
    model = keras.Model({"image": image, "label": labels}, x)
    model.compile(keras.optimizers.Adam(0.01))
    return model


class Captioner(keras.Model):
    """A decoder of words over the features of an image, with a train_step for two captions."""

    def __init__(self) -> None:
        super().__init__()
        image, words = keras.Input((8, 8, 3)), keras.Input((6,), dtype="int32")
        seen = layers.Reshape((9, 6))(layers.Conv2D(6, 4, 2, activation="relu")(image))
        x = layers.Embedding(30, 6)(words)
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(1, 6, use_bias=False)(x, x, use_causal_mask=True)
        )
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(1, 6, use_bias=False)(x, seen)
        )
        self.decoder = keras.Model([image, words], layers.Dense(30, activation="softmax")(x))
        self.cross = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def calculate_loss(self, true: Any, found: Any) -> Any:
        mask = ops.cast(true != 0, "float32")
        return ops.sum(self.cross(true, found) * mask) / ops.sum(mask)

    def train_step(self, data: Any) -> Any:
        image, captions = data
        total = 0.0
        with tf.GradientTape() as tape:
            for words in (captions, captions[:, ::-1]):
                total += self.calculate_loss(words[:, 1:], self.decoder([image, words[:, :-1]]))
        weights = self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        self.loss_tracker.update_state(total)
        return {"loss": self.loss_tracker.result()}


class CaptionerOverBatch(Captioner):
    """Has its loss in `compute_loss`, which workers call with the rows of all."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        pairs = zip((y, y[:, ::-1]), y_pred, strict=True)
        return sum(self.calculate_loss(words[:, 1:], found) for words, found in pairs)

    def train_step(self, data: Any) -> Any:
        image, captions = data
        with tf.GradientTape() as tape:
            both = captions, captions[:, ::-1]
            found = [self.decoder([image, words[:, :-1]]) for words in both]
            total = self.compute_loss(y=captions, y_pred=found)
        weights = self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        self.loss_tracker.update_state(total)
        return {"loss": self.loss_tracker.result()}


def captioner(kind: Any) -> Any:
    model = kind()
    model.compile("adam")
    return model


class Rays(keras.Model):
    """A radiance field: colors along rays, composed by their densities."""

    def __init__(self, field: Any) -> None:
        super().__init__()
        self.field = field
        self.loss_tracker, self.psnr = keras.metrics.Mean("loss"), keras.metrics.Mean("psnr")

    def compile(self, optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.optimizer, self.loss_fn = optimizer, loss_fn

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.psnr]

    def train_step(self, data: Any) -> Any:
        points, colors = data
        with tf.GradientTape() as tape:
            found = self.field(points)
            alpha = 1 - ops.exp(-ops.relu(found[..., 3]) * 0.1)
            left = tf.math.cumprod(1 - alpha + 1e-10, axis=-1, exclusive=True)
            made = ops.sum((alpha * left)[..., None] * ops.sigmoid(found[..., :3]), axis=1)
            loss = self.loss_fn(colors, made)
        weights = self.field.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.psnr.update_state(tf.image.psnr(colors[:, None, None], made[:, None, None], 1.0))
        return {"loss": self.loss_tracker.result(), "psnr": self.psnr.result()}


def nerf() -> Any:
    field = keras.Sequential([keras.Input((12, 3)), layers.Dense(8, "relu"), layers.Dense(4)])
    model = Rays(field)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    return model


def bags() -> Any:
    """Several instances in a bag; attention finds the decisive ones."""
    instances = [keras.Input((10,)) for _ in range(3)]
    share = layers.Dense(5, activation="relu")
    found = [share(one) for one in instances]
    score = layers.Dense(1, use_bias=False)
    gate, value = layers.Dense(4, activation="sigmoid"), layers.Dense(4, activation="tanh")
    scores = layers.Softmax(axis=1)(
        layers.Concatenate()([score(gate(one) * value(one)) for one in found])
    )
    weighted = [one * scores[:, n : n + 1] for n, one in enumerate(found)]
    x = layers.Dense(2, activation="softmax")(layers.Concatenate()(weighted))
    return compiled(keras.Model(instances, x), "sparse_categorical_crossentropy")


ANCHORS = np.concatenate(
    [
        np.random.default_rng(2).normal(size=(ROWS, 16, 4)),
        np.random.default_rng(3).integers(-1, 3, (ROWS, 16, 1)),
    ],
    -1,
).astype("float32")
PROGRAMS = {
    "RetinaNet": Program(retinanet, (IMAGES, ANCHORS)),
    "boxes and classes": Program(
        detector, (IMAGES, {"box": NEXT, "kind": CLASSES}), is_random=True
    ),
    "ESPCN": Program(super_resolution, (SMALL, MASKS)),
    "denoising autoencoder": Program(denoiser, (MASKS, MASKS)),
    "Zero-DCE": Program(zero_dce, IMAGES),
    "depth, edges of a batch": Program(
        lambda: depth(DepthModel), (IMAGES, MASKS), error="loss_over='global batch'"
    ),
    "depth": Program(lambda: depth(DepthByRow), (IMAGES, MASKS), lines=3),
    "CTC for captchas": Program(ocr, {"image": IMAGES, "label": LABELS.astype("float32")}),
    "captions, words of a batch": Program(
        lambda: captioner(Captioner), (IMAGES, WORDS), error="self.compute_loss()"
    ),
    "captions": Program(
        lambda: captioner(CaptionerOverBatch), (IMAGES, WORDS), lines=10, settings=GLOBAL
    ),
    "NeRF": Program(nerf, (POINTS, MASKS[:, 0, :3, 0])),
    "multiple instances": Program(
        bags,
        ([NUMBERS, NUMBERS[::-1].copy(), NUMBERS**2], FLAGS[:, 0].astype("int32")),
        settings={"class_weight": {0: 0.7, 1: 1.6}},
    ),
}
