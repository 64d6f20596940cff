"""Networks of the kinds that people train, small: their audits raise no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from replicas import Case, Trained, named

from pybackend.job.options import Exchange

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(420)

_RNG = np.random.default_rng(11)
ROWS = 45  # on two workers 23 and 22: uneven batches
IMAGES = _RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
CLASSES = _RNG.integers(0, 4, ROWS)
MASKS = _RNG.integers(0, 2, (ROWS, 8, 8, 1)).astype("float32")
WORDS = _RNG.integers(1, 30, (ROWS, 7))
WORDS[:, 5:] *= _RNG.integers(0, 2, (ROWS, 2))
NUMBERS = _RNG.normal(size=(ROWS, 10)).astype("float32")
SERIES = _RNG.normal(size=(ROWS, 12, 2)).astype("float32")
NEXT = _RNG.normal(size=(ROWS, 3)).astype("float32")
GRAPHS = _RNG.integers(0, 2, (ROWS, 5, 5)).astype("float32")
IDS = _RNG.integers(0, 20, (ROWS, 3))
CODES = "sparse_categorical_crossentropy"
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GLOBAL = {"exchange": Exchange(loss_over="global batch")}


def compiled(model: Any, loss: Any = LOGITS, optimizer: Any = "adam", **options: Any) -> Any:
    model.compile(optimizer, loss, **options)
    return model


def convolve(x: Any, filters: int, strides: int = 1) -> Any:
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def resnet() -> Any:
    image = keras.Input((8, 8, 3))
    x = convolve(image, 6)
    for filters, strides in ((6, 1), (8, 2)):
        short = layers.Conv2D(filters, 1, strides)(x)
        x = convolve(x, filters, strides)
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
        x = layers.ReLU()(x + short)
    x = layers.GlobalAveragePooling2D()(x)
    return compiled(keras.Model(image, layers.Dense(4)(x)), metrics=["accuracy"])


def mobilenet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.ReLU(6)(layers.BatchNormalization()(layers.Conv2D(8, 1)(image)))
    x = layers.ReLU(6)(layers.BatchNormalization()(layers.DepthwiseConv2D(3)(x)))
    x = layers.BatchNormalization()(layers.Conv2D(4, 1)(x))
    x = layers.Dropout(0.2)(layers.GlobalMaxPooling2D()(x))
    return compiled(keras.Model(image, layers.Dense(4)(x)), optimizer="rmsprop")


def efficientnet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Activation("swish")(layers.BatchNormalization()(layers.Conv2D(8, 3)(image)))
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(2, 1, activation="swish")(gate)
    x = layers.Multiply()([x, layers.Conv2D(8, 1, activation="sigmoid")(gate)])
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(image, layers.Dense(4)(x)), optimizer=keras.optimizers.Nadam(0.01))


def unet() -> Any:
    image = keras.Input((8, 8, 3))
    down = convolve(image, 4)
    x = convolve(layers.MaxPooling2D()(down), 8)
    x = layers.Conv2DTranspose(4, 2, strides=2)(x)
    x = convolve(layers.Concatenate()([x, down]), 4)
    x = layers.Conv2D(1, 1, activation="sigmoid")(x)
    return compiled(keras.Model(image, x), "binary_crossentropy", metrics=["accuracy", "AUC"])


@keras.saving.register_keras_serializable("tests")
class Tokens(layers.Layer):
    """Sums learned vectors of words and of their positions."""

    def __init__(self, masks: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.words = layers.Embedding(30, 8, mask_zero=masks)
        self.positions = layers.Embedding(7, 8)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.words.build(shape)
        self.positions.build(shape)

    def call(self, words: Any) -> Any:
        return self.words(words) + self.positions(ops.arange(words.shape[-1]))

    def compute_mask(self, words: Any, previous: Any = None) -> Any:
        return self.words.compute_mask(words)


def transform(x: Any, causal: bool = False) -> Any:
    found = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=causal)
    x = layers.LayerNormalization()(x + found)
    found = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    return layers.LayerNormalization()(x + layers.Dropout(0.1)(found))


def bert() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(transform(Tokens()(words)))
    return compiled(keras.Model(words, layers.Dense(4)(x)), metrics=["accuracy"])


def gpt() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = transform(Tokens(masks=False)(words), causal=True)
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=1.0)
    return compiled(keras.Model(words, layers.Dense(30)(x)), optimizer=optimizer)


def vit() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Reshape((4, 8))(layers.Conv2D(8, 4, 4)(image))
    x = x + layers.Embedding(4, 8)(ops.arange(4))
    x = layers.Flatten()(transform(x))
    return compiled(keras.Model(image, layers.Dense(4)(x)))


def tagger() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 6, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    return compiled(keras.Model(words, layers.Dense(4)(x)))


def forecaster() -> Any:
    series = keras.Input((12, 2))
    x = layers.GRU(6, dropout=0.1, return_sequences=True)(series)
    x = layers.Conv1D(6, 3, padding="causal", activation="relu")(x)
    return compiled(keras.Model(series, layers.Dense(3)(layers.LSTM(5)(x))), "huber")


def n_beats() -> Any:
    series = keras.Input((12, 2))
    left = layers.Flatten()(series)
    forecast: Any = 0
    for _ in range(3):
        x = layers.Dense(12, activation="relu")(layers.Dense(12, activation="relu")(left))
        left = left - layers.Dense(24)(x)
        forecast = forecast + layers.Dense(3)(x)
    return compiled(keras.Model(series, forecast), "mae", metrics=["mse"])


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


def graph_network() -> Any:
    nodes, edges = keras.Input((5, 4)), keras.Input((5, 5))
    x = nodes
    for _ in range(2):
        degree = ops.sum(edges, -1, keepdims=True) + 1
        x = layers.Dense(6, activation="relu")((ops.matmul(edges, x) + x[..., :]) / degree)
    x = layers.GlobalAveragePooling1D()(x)
    return compiled(keras.Model([nodes, edges], layers.Dense(4)(x)))


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


def low_rank() -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.layers[0].enable_lora(2)
    return compiled(model)


def half() -> Any:
    layer = [layers.Dense(8, "relu", dtype="mixed_float16") for _ in range(2)]
    head = layers.Dense(4, dtype="float32")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    return compiled(keras.Sequential([keras.Input((10,)), *layer, head]), optimizer=optimizer)


def siamese() -> Any:
    branch = keras.Sequential([keras.Input((5,)), layers.Dense(6, "relu"), layers.Dense(3)])
    one, other = keras.Input((5,)), keras.Input((5,))
    distance = ops.sum(ops.square(branch(one) - branch(other)), -1, keepdims=True)
    return compiled(keras.Model([one, other], ops.exp(-distance)), "binary_crossentropy")


@keras.saving.register_keras_serializable("tests")
class InBatch(keras.losses.Loss):
    """Each row's second half of the output is the answer to its first, and not to the others'."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        query, answer = ops.split(y_pred, 2, axis=-1)
        scores = ops.matmul(query, ops.transpose(answer))
        return -ops.diagonal(ops.log_softmax(scores, -1))


def two_towers() -> Any:
    ids = keras.Input((3,), dtype="int32")
    query = layers.Dense(4)(layers.Embedding(20, 6)(ids[:, 0]))
    answer = layers.Dense(4)(layers.Flatten()(layers.Embedding(20, 6)(ids[:, 1:])))
    return compiled(keras.Model(ids, layers.Concatenate()([query, answer])), InBatch())


@keras.saving.register_keras_serializable("tests")
class Vae(keras.Model):
    """A variational autoencoder in the style of Keras's own example."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoder = layers.Dense(4)
        self.decoder = layers.Dense(10)
        self.noise = keras.random.SeedGenerator(3)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    def build(self, shape: Any) -> None:
        self.encoder.build(shape)
        self.decoder.build((None, 2))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[:, :2])

    @property
    def metrics(self) -> list[Any]:
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x = data[0]
        with tf.GradientTape() as tape:
            mean, spread = ops.split(self.encoder(x), 2, axis=-1)
            drawn = mean + ops.exp(0.5 * spread) * keras.random.normal((2,), seed=self.noise)
            kl = ops.mean(ops.sum(ops.exp(spread) + ops.square(mean) - 1 - spread, -1))
            loss = ops.mean(ops.sum(ops.square(self.decoder(drawn) - x), -1)) + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.total_loss_tracker.update_state(loss)
        self.kl_loss_tracker.update_state(kl)
        return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}


def vae() -> Any:
    model = Vae()
    model.build((None, 10))
    model.compile("adam")
    return model


def case(build: Callable[[], Any], x: Any, y: Any = CLASSES, **options: Any) -> Case:
    return Case(build, (x, y), epochs=2, batch_size=4, **options)


CASES = {
    "ResNet": case(resnet, IMAGES),
    "MobileNet": case(mobilenet, IMAGES),
    "EfficientNet": case(efficientnet, IMAGES),
    "UNet": case(unet, IMAGES, MASKS),
    "BERT": case(bert, WORDS, custom_objects={"Tokens": Tokens}),
    "GPT": case(gpt, WORDS, np.roll(WORDS, -1, 1), custom_objects={"Tokens": Tokens}),
    "ViT": case(vit, IMAGES),
    "tagger": case(tagger, WORDS, _RNG.integers(0, 4, (ROWS, 7))),
    "forecaster": case(forecaster, SERIES, NEXT),
    "N-BEATS": case(n_beats, SERIES, NEXT),
    "DLRM": case(dlrm, [NUMBERS, IDS], CLASSES[:, None] > 1),
    "TabNet": case(tabnet, NUMBERS),
    "graph convolution": case(
        graph_network, [SERIES.reshape(ROWS, -1)[:, :20].reshape(ROWS, 5, 4), GRAPHS]
    ),
    "detection": case(detector, IMAGES, {"box": NEXT, "kind": CLASSES}),
    "super-resolution": case(super_resolution, IMAGES[:, ::2, ::2], MASKS),
    "low rank": case(low_rank, NUMBERS),
    "mixed precision": case(half, NUMBERS),
    "siamese": case(siamese, [NUMBERS[:, :5], NUMBERS[:, 5:]], CLASSES[:, None] > 1),
    "two towers": case(two_towers, IDS, settings=GLOBAL, custom_objects={"InBatch": InBatch}),
    "VAE": case(vae, NUMBERS, NUMBERS, custom_objects={"Vae": Vae}),
}
# One of each kind: `make test-full` trains the others, too.
DAILY = ["MobileNet", "BERT", "tagger", "DLRM", "detection", "two towers", "VAE"]


@pytest.mark.parametrize("name", named(CASES, DAILY))
def test_there_is_no_false_alarm(name: str, trained: dict[str, Any]) -> None:
    found = trained[name]
    assert isinstance(found, Trained), found
    assert len(set(found.digests)) == 1
    assert found.audit is not None
    assert (found.audit["steps"], found.audit["skipped"]) == (3, [])
