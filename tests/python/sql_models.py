"""Small models that cover all layers which can be translated to SQL, with rows for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import keras
import numpy as np

L = keras.layers


def _sequence(*layers: Any, shape: tuple[int, ...] = (6,)) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input(shape), *[layer() for layer in layers]])


def _after(*makers: Callable[[], Any], shape: tuple[int, ...]) -> Callable[[], Any]:
    return _sequence(*makers, shape=shape)


def _branches() -> Any:
    left, right = keras.Input((4,), name="left"), keras.Input((3, 2), name="right side")
    shared = L.Dense(4, activation="tanh")
    flat = L.Dense(4)(L.Flatten()(right))
    both = [shared(left), shared(flat)]
    merged = [layer()(both) for layer in (L.Add, L.Subtract, L.Multiply, L.Average, L.Maximum)]
    joined = L.Concatenate()([*merged, L.Minimum()([left, flat])])
    scores = L.Dense(3, activation="softmax", name="scores")(joined)
    return keras.Model([left, right], [scores, L.Dense(1, name="amount")(merged[0])])


def _nested() -> Any:
    inner = keras.Sequential([keras.Input((3,)), L.Dense(4, activation="relu"), L.Dropout(0.5)])
    tensor = keras.Input((3,))
    middle = keras.Model(tensor, L.Concatenate()([inner(tensor), tensor]))
    outer = keras.Input((3,))
    return keras.Model(outer, L.Dense(2)(L.Add()([middle(outer), middle(L.Dense(3)(outer))])))


def _axes() -> Any:
    picture = keras.Input((4, 3, 2))
    side = L.Concatenate(axis=1)([picture, picture])
    scaled = L.Multiply()([side, L.GlobalAveragePooling2D(keepdims=True)(side)])
    turned = L.Permute((3, 1, 2))(L.Concatenate(axis=-2)([scaled, side]))
    return keras.Model(picture, L.Reshape((-1,))(turned))


def _normalized() -> Any:
    adapted = L.Normalization()
    adapted.adapt(np.random.default_rng(3).normal(2, 3, (50, 6)))
    batch = L.BatchNormalization()
    layers = [adapted, batch, L.Rescaling(0.5, 1.0), L.Reshape((2, 3)), L.LayerNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers])
    rng = np.random.default_rng(4)
    batch.set_weights([rng.uniform(0.5, 2, 6) for _ in range(4)])
    return model


def _functions() -> Any:
    from pybackend.sql.builder import FUNCTIONS

    tensor = keras.Input((6,))
    scaled = L.Rescaling(3.0)(tensor)
    several = [L.Activation(name)(scaled) for name in (*FUNCTIONS, "softmax", "linear")]
    several += [
        L.LeakyReLU(0.1)(scaled),
        L.ELU(0.7)(scaled),
        L.ReLU(6)(scaled),
        L.Softmax()(scaled),
    ]
    several += [L.ReLU(negative_slope=0.3)(scaled), L.PReLU("random_uniform")(scaled)]
    return keras.Model(tensor, L.Concatenate()(several))


def _dictionaries() -> Any:
    """Build a model with outputs in another order than Keras's, and inputs named like values."""
    first, second = keras.Input((3,), name="v2"), keras.Input((3,), name="v3")
    outputs = {"b": L.Subtract()([L.Dense(3)(first), second]), "a": L.Dense(2)(second)}
    inner = keras.Model({"y": first, "x": second}, outputs)
    one, other = keras.Input((3,), name="v1"), keras.Input((3,), name="v4")
    made = inner({"x": one, "y": other})
    return keras.Model([one, other], {"s": made["b"], "r": L.Activation("tanh")(made["a"])})


def _calls() -> Any:
    """Build a model with outputs of one functional model at two of its calls."""
    tensor = keras.Input((3,))
    inner = keras.Model(tensor, L.Dense(3, activation="tanh")(tensor))
    outer = keras.Input((3,))
    once = inner(outer)
    return keras.Model(outer, [once, L.Dense(2)(inner(inner(once)))])


def _whole_numbers() -> Any:
    """Build a model with an activation whose numbers the next one makes whole."""
    tensor = keras.Input((6,))
    large = L.Rescaling(9.0)(tensor)
    found = [
        L.Activation(second)(L.Activation(first)(large))
        for first in ("hard_tanh", "relu6", "hard_sigmoid")
        for second in ("softsign", "hard_sigmoid", "hard_silu")
    ]
    return keras.Model(tensor, L.Concatenate()(found))


MODELS: dict[str, Callable[[], Any]] = {
    "dense": _sequence(
        lambda: L.Dense(5, activation="sigmoid"), lambda: L.Dense(3, activation="softmax")
    ),
    "without a bias": _sequence(lambda: L.Dense(5, use_bias=False), lambda: L.Dense(1)),
    "functions": _functions,
    "branches": _branches,
    "nested models": _nested,
    "dictionaries": _dictionaries,
    "calls of a model": _calls,
    "whole numbers": _whole_numbers,
    "large numbers": _sequence(
        lambda: L.Normalization(mean=[1e6, 1e5, 0.0, -1e6, 2e3, 0.5], variance=[4.0] * 6),
        lambda: L.Dense(3),
    ),
    "axes": _axes,
    "normalizations": _normalized,
    "a picture": _after(
        lambda: L.Conv2D(4, 3, activation="relu"),
        lambda: L.MaxPooling2D(),
        lambda: L.BatchNormalization(),
        lambda: L.Flatten(),
        lambda: L.Dense(3, activation="softmax"),
        shape=(9, 8, 2),
    ),
    "padded windows": _after(
        lambda: L.Conv2D(4, (3, 2), strides=2, padding="same"),
        lambda: L.MaxPooling2D(2, strides=1, padding="same"),
        lambda: L.AveragePooling2D(2, strides=2, padding="same"),
        lambda: L.GlobalMaxPooling2D(),
        shape=(9, 8, 2),
    ),
    "groups and depths": _after(
        lambda: L.Conv2D(6, 3, groups=2, dilation_rate=2),
        lambda: L.DepthwiseConv2D(2, depth_multiplier=2, activation="tanh"),
        lambda: L.SeparableConv2D(5, 2, depth_multiplier=2, padding="same"),
        lambda: L.GlobalAveragePooling2D(),
        shape=(9, 8, 2),
    ),
    "a sequence of windows": _after(
        lambda: L.ZeroPadding1D(1),
        lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="relu"),
        lambda: L.SeparableConv1D(3, 2),
        lambda: L.DepthwiseConv1D(2),
        lambda: L.MaxPooling1D(2),
        lambda: L.AveragePooling1D(2, padding="same"),
        lambda: L.Cropping1D((1, 0)),
        lambda: L.GlobalAveragePooling1D(),
        lambda: L.RepeatVector(3),
        shape=(12, 2),
    ),
    "a frame": _after(
        lambda: L.ZeroPadding2D(((1, 0), (0, 2))), lambda: L.Cropping2D(1), shape=(4, 5, 2)
    ),
    "gated units": _after(
        lambda: L.GRU(3, return_sequences=True), lambda: L.GRU(2, reset_after=False), shape=(5, 4)
    ),
    "long memory": _after(
        lambda: L.LSTM(3, return_sequences=True, go_backwards=True),
        lambda: L.TimeDistributed(L.Dense(4, activation="relu")),
        lambda: L.LSTM(2, use_bias=False),
        shape=(5, 4),
    ),
    "both directions": _after(
        lambda: L.Bidirectional(L.SimpleRNN(3, return_sequences=True)),
        lambda: L.Bidirectional(L.GRU(2), merge_mode="ave"),
        shape=(5, 4),
    ),
    "words": _after(
        lambda: L.Embedding(11, 3),
        lambda: L.GlobalAveragePooling1D(),
        lambda: L.Dense(2),
        shape=(7,),
    ),
}
# Together these cover all operations.
OPERATIONS = [
    "functions",
    "branches",
    "normalizations",
    "groups and depths",
    "long memory",
    "words",
]


@lru_cache
def make(name: str) -> tuple[Any, list[Any], list[Any]]:
    """Return a model, rows for each of its inputs, and its results, each a list of arrays."""
    keras.utils.set_random_seed(7)
    model = MODELS[name]()
    rng = np.random.default_rng(8)
    for variable in model.trainable_variables:
        if not np.asarray(variable).any():  # biases, which are initialized with zeros
            variable.assign(rng.normal(0, 0.5, variable.shape))
    rows = [rng.normal(0, 1, (5, *tensor.shape[1:])).astype("f4") for tensor in model.inputs]
    if name == "large numbers":
        rows = [(2 * rows[0] + [1e6, 1e5, 0.0, -1e6, 2e3, 0.5]).astype("f4")]
    if name == "words":
        rows = [rng.integers(0, 11, (5, 7))]
    outputs = keras.tree.flatten(model.predict(rows if len(rows) > 1 else rows[0], verbose=0))
    return model, rows, outputs
