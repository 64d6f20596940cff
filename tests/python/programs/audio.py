"""Sound: speakers, speech and its spectra."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import Program, compiled
from programs.rows import CLASSES, OTHER_WORDS, SOUNDS


def speakers() -> Any:
    sound = keras.Input((32, 1))
    x = sound
    for filters in (4, 6):
        short = layers.Conv1D(filters, 1, padding="same")(x)
        x = layers.Activation("relu")(layers.Conv1D(filters, 3, padding="same")(x))
        x = layers.Activation("relu")(layers.Conv1D(filters, 3, padding="same")(x) + short)
        x = layers.MaxPooling1D(2, 2)(x)
    x = layers.Flatten()(layers.AveragePooling1D(3, 3)(x))
    model = keras.Model(sound, layers.Dense(4, activation="softmax")(x))
    return compiled(model, "sparse_categorical_crossentropy", metrics=["accuracy"])


def spectra() -> Any:
    sound = keras.Input((32,))
    real, imaginary = ops.stft(sound, 8, 4, 8)
    x = ops.log(ops.sqrt(real**2 + imaginary**2 + 1e-6))
    x = layers.Normalization(axis=-1, mean=0.0, variance=1.0)(x)
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 3, activation="relu")(x))
    return compiled(keras.Model(sound, layers.Dense(4)(x)))


class SpeechLoss(keras.losses.Loss):
    """Return the connectionist temporal classification of padded texts."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        count = ops.shape(y_true)[0]
        times = ops.ones((count,), "int32") * y_pred.shape[1]
        lengths = ops.sum(ops.cast(y_true > 0, "int32"), 1)
        return ops.ctc_loss(ops.cast(y_true, "int32"), y_pred, lengths, times, mask_index=0)


def speech() -> Any:
    sound = keras.Input((32, 1))
    x = layers.Reshape((32, 1, 1))(sound)
    x = layers.Conv2D(4, (5, 1), (2, 1), padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(synchronized=True)(x))
    x = layers.Reshape((16, 4))(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True, reset_after=True))(x)
    model = keras.Model(sound, layers.Dense(20)(layers.Dense(6, activation="relu")(x)))
    return compiled(model, SpeechLoss(), keras.optimizers.Adam(1e-3))


class Transcriber(keras.Model):
    """Reads sound with convolutions and writes words with a decoder, in its own train_step."""

    def __init__(self) -> None:
        super().__init__()
        sound, words = keras.Input((32, 1)), keras.Input((5,), dtype="int32")
        heard = layers.Conv1D(6, 5, 4, padding="same", activation="relu")(sound)
        heard = layers.LayerNormalization()(
            heard + layers.MultiHeadAttention(1, 6, use_bias=False)(heard, heard)
        )
        x = layers.Embedding(20, 6)(words)
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(1, 6, use_bias=False)(x, x, use_causal_mask=True)
        )
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(1, 6, use_bias=False)(x, heard)
        )
        self.net = keras.Model([sound, words], layers.Dense(20)(x))
        self.loss_metric = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_metric]

    def train_step(self, batch: Any) -> Any:
        source, target = batch["source"], batch["target"]
        with tf.GradientTape() as tape:
            found = self.net([source, target[:, :-1]])
            wanted = ops.one_hot(target[:, 1:], 20)
            mask = ops.not_equal(target[:, 1:], 0)
            loss = self.compute_loss(None, wanted, found, sample_weight=mask)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


def transcriber() -> Any:
    model = Transcriber()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return compiled(model, loss)


class MelGan(keras.Model):
    """Generates sound from spectra, with the discriminator's layers compared, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((8, 2)), layers.Conv1DTranspose(1, 8, 4, padding="same")]
        )
        sound = keras.Input((32, 1))
        first = layers.Conv1D(3, 5, 2, activation="leaky_relu")(sound)
        self.discriminator = keras.Model(sound, [first, layers.Conv1D(1, 3)(first)])
        self.losses_seen = [keras.metrics.Mean(name) for name in ("gen_loss", "disc_loss")]

    def compile(self, gen_optimizer: Any, disc_optimizer: Any) -> None:
        super().compile()
        self.gen_optimizer, self.disc_optimizer = gen_optimizer, disc_optimizer
        self.mse, self.mae = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()

    @property
    def metrics(self) -> list[Any]:
        return self.losses_seen

    def train_step(self, batch: Any) -> Any:
        spectra, real = batch
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            made = self.generator(spectra, training=True)
            found, true = self.discriminator(made), self.discriminator(real)
            gen_loss = self.mse(ops.ones_like(found[1]), found[1])
            gen_loss += 10 * self.mae(true[0], found[0])
            disc_loss = self.mse(ops.ones_like(true[1]), true[1])
            disc_loss += self.mse(ops.zeros_like(found[1]), found[1])
        for tape, loss, part, optimizer in (
            (gen_tape, gen_loss, self.generator, self.gen_optimizer),
            (disc_tape, disc_loss, self.discriminator, self.disc_optimizer),
        ):
            found = tape.gradient(loss, part.trainable_weights)
            optimizer.apply_gradients(zip(found, part.trainable_weights, strict=True))
        for metric, loss in zip(self.losses_seen, (gen_loss, disc_loss), strict=True):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.losses_seen}


def melgan() -> Any:
    model = MelGan()
    rates = keras.optimizers.Adam(1e-3, clipnorm=1), keras.optimizers.Adam(1e-3)
    model.compile(*rates)
    return model


PAIRS = {"source": SOUNDS, "target": OTHER_WORDS}
MELS = np.stack([SOUNDS[:, ::4, 0], SOUNDS[:, 1::4, 0]], -1)

PROGRAMS = {
    "speakers": Program(speakers, (SOUNDS, CLASSES)),
    "spectra": Program(spectra, (SOUNDS[..., 0], CLASSES)),
    "speech by CTC": Program(speech, (SOUNDS, OTHER_WORDS)),
    "speech by a transformer": Program(transcriber, PAIRS),
    "MelGAN": Program(melgan, (MELS, SOUNDS)),
}
