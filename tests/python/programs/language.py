"""Text: classification, generation, translation, tags, and pairs of texts and images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.program import GLOBAL, LOGITS, Program, compiled
from programs.rows import CLASSES, FLAGS, IMAGES, OTHER_WORDS, ROWS, TAGS, WORDS


class Tokens(layers.Layer):
    """Sums learned vectors of words and of their positions."""

    masks = False

    def __init__(self, words: int = 30) -> None:
        super().__init__()
        self.words = layers.Embedding(words, 8, mask_zero=self.masks)
        self.positions = layers.Embedding(7, 8)

    def build(self, shape: Any) -> None:
        self.words.build(shape)
        self.positions.build(shape)

    def call(self, words: Any) -> Any:
        return self.words(words) + self.positions(ops.arange(words.shape[-1]))


class MaskedTokens(Tokens):
    """Leaves out padding."""

    masks = True

    def compute_mask(self, words: Any, previous: Any = None) -> Any:
        return self.words.compute_mask(words)


def transform(x: Any, causal: bool = False, rate: float = 0.1, seen: Any = None) -> Any:
    found = layers.MultiHeadAttention(2, 4, dropout=rate, use_bias=False)(
        x, x, use_causal_mask=causal
    )
    x = layers.LayerNormalization()(x + found)
    if seen is not None:
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, seen)
        )
    found = layers.Dense(8)(layers.Dense(16, activation="relu")(x))
    return layers.LayerNormalization()(x + layers.Dropout(rate)(found))


def bert() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(transform(MaskedTokens()(words)))
    return compiled(keras.Model(words, layers.Dense(4)(x)), metrics=["accuracy"])


def convolved() -> Any:
    words = keras.Input((7,), dtype="int64")
    x = layers.Dropout(0.5)(layers.Embedding(30, 8)(words))
    x = layers.Conv1D(8, 3, activation="relu", strides=2)(x)
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(layers.GlobalMaxPooling1D()(x)))
    model = keras.Model(words, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, "binary_crossentropy", metrics=["accuracy"])


def bidirectional() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 6)(words)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    model = keras.Model(words, layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, "binary_crossentropy", metrics=["accuracy"])


def gpt() -> Any:
    """As the miniature GPT has them: two outputs, of which one has no loss."""
    words = keras.Input((7,), dtype="int32")
    x = transform(Tokens()(words), causal=True)
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=1.0)
    return compiled(keras.Model(words, [layers.Dense(30)(x), x]), [LOGITS, None], optimizer)


def translator() -> Any:
    """An encoder and a decoder, whose masks reach the loss."""
    words, others = keras.Input((7,), dtype="int64"), keras.Input((5,), dtype="int64")
    seen = transform(MaskedTokens()(words), rate=0.0)
    x = transform(MaskedTokens(words=20)(others), causal=True, rate=0.0, seen=seen)
    model = keras.Model([words, others], layers.Dense(20, activation="softmax")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    return compiled(model, loss, "rmsprop", metrics=["accuracy"])


def seq2seq() -> Any:
    letters, others = keras.Input((7, 5)), keras.Input((5, 4))
    *_, hidden, cell = layers.LSTM(6, return_state=True)(letters)
    x, *_ = layers.LSTM(6, return_sequences=True, return_state=True)(
        others, initial_state=[hidden, cell]
    )
    model = keras.Model([letters, others], layers.Dense(4, activation="softmax")(x))
    return compiled(model, "categorical_crossentropy", "rmsprop", metrics=["accuracy"])


def tagger() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 6, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    return compiled(keras.Model(words, layers.Dense(4)(x)))


class NoPadding(keras.losses.Loss):
    """The mean loss of the words of a batch that are not padding."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(each(y_true, y_pred) * mask) / ops.sum(mask)


def entities() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = transform(Tokens()(words), rate=0.0)
    model = keras.Model(words, layers.Dense(4, activation="softmax")(x))
    return compiled(model, NoPadding())


class Masked(keras.Model):
    """Masked language modelling with weights of words: a summed loss and its own metric."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = self.loss_fn(y, y_pred, sample_weight)
        self.track(loss, sample_weight)
        return ops.sum(loss)

    def track(self, loss: Any, sample_weight: Any) -> None:
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


class MaskedByRow(Masked):
    """Tracks its loss in `compute_metrics`, where a worker has its own rows."""

    def track(self, loss: Any, sample_weight: Any) -> None:
        pass

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = self.loss_fn(y, y_pred, sample_weight)
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def masked(kind: Any) -> Any:
    words = keras.Input((7,), dtype="int64")
    x = transform(Tokens()(words), rate=0.0)
    model = kind(inputs=words, outputs=layers.Dense(30, activation="softmax")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.001))
    return model


class Experts(layers.Layer):
    """Sends each word to one expert, in words of the batch (a switch), and balances them."""

    def __init__(self, balance_by: Any) -> None:
        super().__init__()
        self.balance_by = balance_by
        self.route = layers.Dense(3)
        self.experts = [layers.Dense(8, activation="relu") for _ in range(3)]

    def build(self, shape: Any) -> None:
        for part in (self.route, *self.experts):
            part.build(shape)

    def call(self, x: Any) -> Any:
        chances = ops.softmax(self.route(x))
        best = ops.one_hot(ops.argmax(chances, -1), 3)
        shares = ops.mean(best, self.balance_by), ops.mean(chances, self.balance_by)
        self.add_loss(3 * ops.mean(shares[0] * shares[1]))
        gates = best * chances
        return sum(gates[..., n : n + 1] * each(x) for n, each in enumerate(self.experts))


def switch(balance_by: Any) -> Any:
    words = keras.Input((7,), dtype="int32")
    x = Tokens()(words)
    x = layers.LayerNormalization()(x + Experts(balance_by)(x))
    x = layers.Dense(4)(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(words, x), metrics=["accuracy"])


def spans() -> Any:
    """Where an answer begins and ends in a text: two outputs over its words."""
    words, kinds = keras.Input((7,), dtype="int32"), keras.Input((7,), dtype="int32")
    x = transform(Tokens()(words) + layers.Embedding(2, 8)(kinds), rate=0.0)
    ends = [layers.Flatten()(layers.Dense(1, use_bias=False)(x)) for _ in range(2)]
    names = ("first", "last")
    outputs = {name: layers.Softmax(name=name)(end) for name, end in zip(names, ends, strict=True)}
    model = keras.Model([words, kinds], outputs)
    loss = keras.losses.SparseCategoricalCrossentropy()
    return compiled(model, {"first": loss, "last": loss}, keras.optimizers.SGD(0.05))


def several_labels() -> Any:
    words = keras.Input((30,))
    x = layers.Dense(8, activation="relu")(words)
    model = keras.Model(words, layers.Dense(4, activation="sigmoid")(x))
    return compiled(model, "binary_crossentropy", metrics=["binary_accuracy"])


class DualEncoder(keras.Model):
    """Captions and images: of a batch, each caption is to find its image (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = keras.Sequential(
            [keras.Input((7,)), layers.Embedding(30, 6), layers.GlobalAveragePooling1D()]
        )
        self.texts.add(layers.Dense(4))
        self.images = keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, 2), layers.Flatten(), layers.Dense(4)]
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def call(self, features: Any, training: bool = False) -> Any:
        return self.texts(features["caption"]), self.images(features["image"])

    def compare(self, captions: Any, images: Any) -> Any:
        logits = ops.matmul(captions, ops.transpose(images)) / 0.5
        alike = ops.matmul(images, ops.transpose(images))
        alike += ops.matmul(captions, ops.transpose(captions))
        wanted = keras.activations.softmax(alike / (2 * 0.5))
        one = keras.losses.categorical_crossentropy(wanted, logits, from_logits=True)
        other = keras.losses.categorical_crossentropy(
            ops.transpose(wanted), ops.transpose(logits), from_logits=True
        )
        return (one + other) / 2

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute(self(data, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def compute(self, found: Any) -> Any:
        return ops.mean(self.compare(*found))


class DualEncoderOverBatch(DualEncoder):
    """Calls `compute_loss`, whose arguments have the rows of all workers."""

    def compute_loss(self, caption_embeddings: Any, image_embeddings: Any) -> Any:
        return ops.mean(self.compare(caption_embeddings, image_embeddings))

    def compute(self, found: Any) -> Any:
        return self.compute_loss(*found)


def dual_encoder(kind: Any) -> Any:
    model = kind()
    model.compile(optimizer=keras.optimizers.AdamW(0.001, weight_decay=0.001))
    return model


class CrossEncoder(keras.Model):
    """Which of two texts follows from which: shared layers, fine-tuned after a first fit."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = layers.Embedding(30, 6, mask_zero=True)
        self.read = layers.Bidirectional(layers.LSTM(4))
        self.tokens.build((None, 7))
        self.read.build((None, 7, 6))
        self.head = layers.Dense(4, activation="softmax")
        self.head.build((None, 24))
        self.built = True

    def call(self, pair: Any) -> Any:
        one, other = (self.read(self.tokens(words)) for words in pair)
        return self.head(ops.concatenate([one, other, ops.abs(one - other)], -1))


def similarity() -> Any:
    return compiled(CrossEncoder(), "sparse_categorical_crossentropy", metrics=["acc"])


LETTERS = np.eye(5, dtype="float32")[WORDS % 5]
OTHERS = np.eye(4, dtype="float32")[OTHER_WORDS % 4]
KEPT = np.where(np.arange(7) % 3, 0.0, 1.0)[None].repeat(ROWS, 0).astype("float32")
NAMED = {"caption": WORDS, "image": IMAGES}
COUNTS = np.eye(30, dtype="float32")[WORDS].sum(1)

PROGRAMS = {
    "BERT": Program(bert, (WORDS, CLASSES), is_random=True),
    "convolutions over words": Program(convolved, (WORDS, FLAGS), is_random=True),
    "bidirectional LSTM": Program(bidirectional, (WORDS, FLAGS)),
    "GPT": Program(gpt, (WORDS, np.roll(WORDS, -1, 1)), is_random=True),
    "translation with transformers": Program(
        translator, ([WORDS, OTHER_WORDS[:, :-1]], OTHER_WORDS[:, 1:])
    ),
    "translation with LSTM": Program(seq2seq, ([LETTERS, OTHERS[:, :-1]], OTHERS[:, 1:])),
    "tagger": Program(tagger, (WORDS, TAGS)),
    "entities, words of a batch": Program(entities, (WORDS, TAGS), error="loss_over"),
    "entities": Program(entities, (WORDS, TAGS), lines=2, settings=GLOBAL),
    "masked words, a sum": Program(lambda: masked(Masked), (WORDS, WORDS, KEPT), error="loss_over"),
    "masked words": Program(
        lambda: masked(MaskedByRow), (WORDS, WORDS, KEPT), lines=5, settings=GLOBAL
    ),
    "switch, balanced by batches": Program(
        lambda: switch((0, 1)), (WORDS, CLASSES), error="combines the rows of a batch"
    ),
    "switch": Program(lambda: switch(1), (WORDS, CLASSES), lines=3),
    "spans of answers": Program(
        spans, ([WORDS, WORDS % 2], {"first": CLASSES, "last": CLASSES + 2})
    ),
    "several labels": Program(several_labels, (COUNTS, COUNTS[:, :4].clip(0, 1))),
    "captions find images, in a train_step": Program(
        lambda: dual_encoder(DualEncoder), NAMED, error="self.compute_loss()"
    ),
    "captions find images": Program(
        lambda: dual_encoder(DualEncoderOverBatch), NAMED, lines=2, settings=GLOBAL
    ),
    "pairs of texts": Program(similarity, ([WORDS, WORDS[::-1].copy()], CLASSES)),
}
