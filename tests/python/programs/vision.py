"""Images, videos and point clouds."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops
from programs.program import Program, compiled
from programs.rows import CLASSES, FLAGS, IMAGES, MASKS, POINTS, ROWS, VIDEOS


def convolve(x: Any, filters: int, strides: int = 1) -> Any:
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def classify(image: Any, x: Any, **options: Any) -> Any:
    return compiled(keras.Model(image, layers.Dense(4)(x)), **options)


def pooled(x: Any) -> Any:
    return layers.GlobalAveragePooling2D()(x)


def convnet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.MaxPooling2D()(layers.Conv2D(6, 3, activation="relu")(image))
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    return classify(image, x, metrics=["accuracy"])


def resnet() -> Any:
    image = keras.Input((8, 8, 3))
    x = convolve(image, 6)
    for filters, strides in ((6, 1), (8, 2)):
        short = layers.Conv2D(filters, 1, strides)(x)
        x = convolve(x, filters, strides)
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x) + short)
    return classify(image, pooled(x), metrics=["accuracy"])


def mobilenet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.ReLU(6)(layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(image)))
    x = layers.ReLU(6)(layers.BatchNormalization()(layers.DepthwiseConv2D(3, use_bias=False)(x)))
    x = layers.BatchNormalization()(layers.Conv2D(4, 1, use_bias=False)(x))
    x = layers.Dropout(0.2)(layers.GlobalMaxPooling2D()(x))
    return classify(image, x, optimizer="rmsprop")


def efficientnet() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Activation("swish")(
        layers.BatchNormalization()(layers.Conv2D(8, 3, use_bias=False)(image))
    )
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(2, 1, activation="swish")(gate)
    x = layers.Multiply()([x, layers.Conv2D(8, 1, activation="sigmoid")(gate)])
    x = layers.Dropout(0.3)(pooled(x))
    return classify(image, x, optimizer=keras.optimizers.Nadam(0.01))


def augmented() -> Any:
    """Augments, normalizes by statistics of the rows, and stops the gradient of its trunk."""
    image = keras.Input((8, 8, 3))
    known = layers.Normalization()
    known.adapt(IMAGES)
    x = layers.RandomFlip("horizontal")(image)
    x = layers.RandomRotation(0.1)(x)
    x = layers.RandomContrast(0.1)(layers.RandomZoom(0.1)(x))
    trunk = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(6, 3), layers.ReLU()])
    trunk.trainable = False
    return classify(image, pooled(trunk(known(x))))


def unet() -> Any:
    image = keras.Input((8, 8, 3))
    down = convolve(image, 4)
    x = convolve(layers.MaxPooling2D()(down), 8)
    x = layers.Conv2DTranspose(4, 2, strides=2)(x)
    x = convolve(layers.Concatenate()([x, down]), 4)
    x = layers.Conv2D(1, 1, activation="sigmoid")(x)
    return compiled(keras.Model(image, x), "binary_crossentropy", metrics=["accuracy", "AUC"])


def deeplab() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, 2, padding="same", activation="relu")(image)
    whole = layers.GlobalAveragePooling2D(keepdims=True)(x)
    whole = layers.UpSampling2D(4, interpolation="bilinear")(layers.Conv2D(4, 1)(whole))
    wide = [layers.Conv2D(4, 3, padding="same", dilation_rate=rate)(x) for rate in (1, 2)]
    x = layers.Conv2D(6, 1, activation="relu")(layers.Concatenate()([whole, *wide]))
    x = layers.Conv2D(2, 1)(layers.UpSampling2D(2, interpolation="bilinear")(x))
    return compiled(keras.Model(image, x))


# Patches and tokens.


class Positions(layers.Layer):
    """Projects patches and adds learned vectors of their positions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = layers.Dense(size)
        self.size = size

    def build(self, shape: Any) -> None:
        self.places = self.add_weight(shape=(shape[1], self.size), name="places")
        self.project.build(shape)

    def call(self, x: Any) -> Any:
        return self.project(x) + self.places


def patches(image: Any) -> Any:
    found = ops.image.extract_patches(image, 4)
    return Positions(8)(ops.reshape(found, (-1, 4, 48)))


def transform(x: Any, rate: float = 0.1) -> Any:
    found = layers.MultiHeadAttention(2, 4, dropout=rate, use_bias=False)(x, x)
    x = layers.LayerNormalization()(x + found)
    found = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    return layers.LayerNormalization()(x + layers.Dropout(rate)(found))


def vit() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.RandomFlip("horizontal")(image)
    x = layers.Flatten()(transform(patches(x)))
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=1e-4)
    return classify(image, x, optimizer=optimizer)


def tokens(mix: Any) -> Any:
    """Return a classifier whose patches are mixed by a function."""
    image = keras.Input((8, 8, 3))
    x = patches(image)
    for _ in range(2):
        x = mix(x)
    return classify(image, layers.GlobalAveragePooling1D()(x), metrics=["accuracy"])


def mixer() -> Any:
    def mix(x: Any) -> Any:
        across = ops.transpose(layers.LayerNormalization()(x), (0, 2, 1))
        across = layers.Dense(4)(layers.Dense(4, activation="gelu")(across))
        x = x + ops.transpose(across, (0, 2, 1))
        return x + layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))

    return tokens(mix)


def fnet() -> Any:
    def mix(x: Any) -> Any:
        real = ops.fft2((x, ops.zeros_like(x)))[0]
        x = layers.LayerNormalization()(x + real)
        return layers.LayerNormalization()(x + layers.Dense(8, activation="gelu")(x))

    return tokens(mix)


def gmlp() -> Any:
    def mix(x: Any) -> Any:
        wide = layers.Dense(12, activation="gelu")(layers.LayerNormalization()(x))
        one, other = ops.split(wide, 2, axis=-1)
        other = ops.transpose(layers.LayerNormalization()(other), (0, 2, 1))
        gate = ops.transpose(layers.Dense(4, bias_initializer="ones")(other), (0, 2, 1))
        return x + layers.Dense(8)(one * gate)

    return tokens(mix)


class External(layers.Layer):
    """Attends to a memory that all rows share."""

    def build(self, shape: Any) -> None:
        self.keys, self.values = layers.Dense(5, use_bias=False), layers.Dense(shape[-1])
        self.keys.build(shape)
        self.values.build((*shape[:-1], 5))

    def call(self, x: Any) -> Any:
        found = ops.softmax(self.keys(x), axis=1)
        return self.values(found / (1e-9 + ops.sum(found, axis=2, keepdims=True)))


def eanet() -> Any:
    image = keras.Input((8, 8, 3))
    x = patches(image)
    x = layers.LayerNormalization()(x + External()(x))
    x = layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    return compiled(keras.Model(image, x), loss)


class Depth(layers.Layer):
    """Drops a branch for some rows (stochastic depth)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        drawn = keras.random.uniform(shape, seed=self.seeds)
        return x / (1 - self.rate) * ops.floor(1 - self.rate + drawn)


def cct() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, activation="relu", use_bias=False)(image)
    x = layers.Reshape((9, 8))(layers.MaxPooling2D(2)(x))
    found = layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
    x = x + Depth(0.2)(layers.LayerNormalization()(found))
    weights = ops.softmax(layers.Dense(1)(x), axis=1)
    x = ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), x), 1)
    return classify(image, x)


class Windows(layers.Layer):
    """Attention within windows of 2x2, shifted by one position or not, with position biases."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.attention = layers.MultiHeadAttention(2, 4, use_bias=False)
        self.normalization = layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(4, 8), name="bias")
        self.attention.build((None, 4, 8), (None, 4, 8))
        self.normalization.build((None, 4, 8))

    def call(self, x: Any) -> Any:
        moved = ops.roll(x, (-self.shift, -self.shift), (1, 2))
        parts = ops.reshape(moved, (-1, 2, 2, 2, 2, 8))
        parts = ops.reshape(ops.transpose(parts, (0, 1, 3, 2, 4, 5)), (-1, 4, 8)) + self.bias
        found = self.attention(self.normalization(parts), parts)
        found = ops.transpose(ops.reshape(found, (-1, 2, 2, 2, 2, 8)), (0, 1, 3, 2, 4, 5))
        found = ops.reshape(found, (-1, 4, 4, 8))
        return x + ops.roll(found, (self.shift, self.shift), (1, 2))


def swin() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 2, 2)(image)
    x = Windows(1)(Windows(0)(x))
    merged = ops.concatenate([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)
    return classify(image, pooled(layers.Dense(8, use_bias=False)(merged)))


def convmixer() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Activation("gelu")(layers.Conv2D(8, 2, 2)(image))
    found = layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.BatchNormalization(synchronized=True)(x + found)
    x = layers.BatchNormalization(synchronized=True)(layers.Conv2D(8, 1, activation="gelu")(x))
    return classify(image, pooled(x))


def token_learner() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 2, 2)(image)
    maps = layers.Conv2D(3, 3, padding="same", activation="gelu")(layers.LayerNormalization()(x))
    maps = ops.reshape(layers.Conv2D(3, 1, activation="sigmoid")(maps), (-1, 16, 3, 1))
    learned = ops.mean(maps * ops.reshape(x, (-1, 16, 1, 8)), axis=1)
    return classify(image, layers.GlobalAveragePooling1D()(transform(learned, 0.0)))


def focal_modulation() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 2, 2)(image)
    query, context, gates = layers.Dense(8)(x), layers.Dense(8)(x), layers.Dense(3)(x)
    total: Any = 0
    for level in range(2):
        context = layers.DepthwiseConv2D(3, padding="same", activation="gelu")(context)
        total = total + context * gates[..., level : level + 1]
    whole = ops.mean(context, (1, 2), keepdims=True)
    total = total + layers.Activation("gelu")(whole) * gates[..., 2:]
    x = x + layers.Dense(8)(query * layers.Conv2D(8, 1)(total))
    return classify(image, pooled(layers.LayerNormalization()(x)))


class Involution(layers.Layer):
    """Generates a kernel for each position from its content."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.span = layers.Conv2D(2, 1, activation="relu"), layers.Conv2D(9, 1)

    def build(self, shape: Any) -> None:
        self.reduce.build(shape)
        self.span.build((*shape[:-1], 2))

    def call(self, x: Any) -> Any:
        kernels = self.span(self.reduce(x))[..., None]
        found = ops.image.extract_patches(x, 3, strides=1, padding="same")
        found = ops.reshape(found, (-1, *x.shape[1:3], 9, x.shape[-1]))
        return ops.sum(kernels * found, axis=3)


def involution() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.MaxPooling2D()(layers.ReLU()(Involution()(image)))
    return classify(image, layers.Flatten()(Involution()(x)))


def resizer() -> Any:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="leaky_relu")(image)
    small = layers.Resizing(5, 5)(x)
    x = small + layers.Conv2D(4, 3, padding="same")(small)
    x = layers.Conv2D(3, 3, padding="same")(x) + layers.Resizing(5, 5)(image)
    return classify(image, layers.Flatten()(layers.Conv2D(6, 3, activation="relu")(x)))


def volume() -> Any:
    video = keras.Input((4, 6, 6, 1))
    x = layers.MaxPooling3D((1, 2, 2))(layers.Conv3D(4, 3, activation="relu")(video))
    x = layers.GlobalAveragePooling3D()(layers.BatchNormalization()(x))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.96, staircase=True)
    model = keras.Model(video, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, "binary_crossentropy", keras.optimizers.Adam(schedule))


def video_rnn() -> Any:
    frames, mask = keras.Input((4, 36)), keras.Input((4,), dtype="bool")
    x = layers.GRU(6, return_sequences=True)(frames, mask=mask)
    x = layers.Dropout(0.4)(layers.GRU(4)(x))
    x = layers.Dense(4, activation="softmax")(layers.Dense(5, activation="relu")(x))
    return compiled(keras.Model([frames, mask], x), "sparse_categorical_crossentropy")


def vivit() -> Any:
    video = keras.Input((4, 6, 6, 1))
    x = layers.Reshape((8, 8))(layers.Conv3D(8, (2, 3, 3), (2, 3, 3))(video))
    x = layers.GlobalAveragePooling1D()(transform(Positions(8)(x), 0.0))
    return classify(video, x)


class Orthogonal(keras.regularizers.Regularizer):
    """Regularizes a learned transformation towards a rotation."""

    def __call__(self, x: Any) -> Any:
        matrix = ops.reshape(x, (-1, 3, 3))
        near = ops.matmul(matrix, ops.transpose(matrix, (0, 2, 1))) - ops.eye(3)
        return 0.001 * ops.sum(ops.square(near))


def pointnet(penalty: Any) -> Any:
    points = keras.Input((12, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(points))
    bias = keras.initializers.Constant(np.eye(3).ravel())
    turn = layers.Dense(9, kernel_initializer="zeros", bias_initializer=bias)
    turn.activity_regularizer = penalty
    x = ops.matmul(points, layers.Reshape((3, 3))(turn(x)))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(x))
    return classify(points, x)


PRESENT = np.arange(4) < np.arange(ROWS)[:, None] % 4 + 1

PROGRAMS = {
    "convnet": Program(convnet, (IMAGES, CLASSES), is_random=True),
    "ResNet": Program(resnet, (IMAGES, CLASSES), is_random=True),
    "MobileNet": Program(mobilenet, (IMAGES, CLASSES), is_random=True),
    "EfficientNet": Program(efficientnet, (IMAGES, CLASSES), is_random=True),
    "augmentation and fine-tuning": Program(augmented, (IMAGES, CLASSES), is_random=True),
    "U-Net": Program(unet, (IMAGES, MASKS), is_random=True),
    "DeepLab": Program(deeplab, (IMAGES, MASKS[..., 0])),
    "ViT": Program(vit, (IMAGES, CLASSES), is_random=True),
    "MLP-Mixer": Program(mixer, (IMAGES, CLASSES)),
    "FNet": Program(fnet, (IMAGES, CLASSES)),
    "gMLP": Program(gmlp, (IMAGES, CLASSES)),
    "EANet": Program(eanet, (IMAGES, np.eye(4, dtype="float32")[CLASSES])),
    "CCT": Program(cct, (IMAGES, CLASSES), is_random=True),
    "Swin": Program(swin, (IMAGES, CLASSES), tolerance=1e-4),
    "ConvMixer": Program(convmixer, (IMAGES, CLASSES)),
    "TokenLearner": Program(token_learner, (IMAGES, CLASSES), tolerance=1e-4),
    "focal modulation": Program(focal_modulation, (IMAGES, CLASSES)),
    "involution": Program(involution, (IMAGES, CLASSES)),
    "learnable resizer": Program(resizer, (IMAGES, CLASSES)),
    "3D convolution": Program(volume, (VIDEOS, FLAGS), is_random=True),
    "CNN-RNN for video": Program(
        video_rnn, ([VIDEOS.reshape(ROWS, 4, 36), PRESENT], CLASSES), is_random=True
    ),
    "ViViT": Program(vivit, (VIDEOS, CLASSES), tolerance=1e-4),
    "PointNet": Program(lambda: pointnet(Orthogonal()), (POINTS, CLASSES)),
}
