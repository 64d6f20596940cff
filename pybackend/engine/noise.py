"""Stands in for random numbers, so that a step comes to the same whatever batch a row is in.

Keras's layers, `keras.random` and most of what users write draw by a few functions of TensorFlow.
Each draw becomes one number, the same for all rows, and dropout leaves out nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from pybackend.engine.overrides import override

Arguments = Mapping[str, Any]

# Where in its range a number is: most draws ask whether it is larger than some rate.
_PLACE = 0.7


def _normal(given: Arguments) -> Any:
    value = tf.cast(given["mean"], given["dtype"])
    spread = tf.cast(given["stddev"], given["dtype"])
    return tf.broadcast_to(value + _PLACE * spread, given["shape"])


def _uniform(given: Arguments) -> Any:
    dtype = tf.as_dtype(given["dtype"])
    if given["minval"] is None:  # any integer
        return tf.fill(given["shape"], tf.constant(1, dtype))
    low = tf.cast(given["minval"], tf.float64)
    high = tf.cast(1 if given["maxval"] is None else given["maxval"], tf.float64)
    return tf.broadcast_to(tf.cast(low + _PLACE * (high - low), dtype), given["shape"])


def _categorical(given: Arguments) -> Any:
    likeliest = tf.argmax(given["logits"], -1)[:, None]
    return tf.cast(tf.repeat(likeliest, given["num_samples"], axis=1), given["dtype"] or tf.int64)


def _gamma(given: Arguments) -> Any:
    beta = 1 if given["beta"] is None else given["beta"]
    mean = tf.cast(given["alpha"], given["dtype"]) / tf.cast(beta, given["dtype"])
    return tf.broadcast_to(mean, given["shape"])


def _binomial(given: Arguments) -> Any:
    mean = tf.cast(given["counts"], tf.float64) * tf.cast(given["probs"], tf.float64)
    return tf.broadcast_to(tf.cast(tf.round(mean), given["output_dtype"]), given["shape"])


def _first(given: Arguments) -> Any:
    return tf.convert_to_tensor(next(iter(given.values())))


_STAND_INS: tuple[tuple[Any, Mapping[str, Callable[[Arguments], Any]]], ...] = (
    (
        tf.random,
        {
            "normal": _normal,
            "truncated_normal": _normal,
            "stateless_normal": _normal,
            "stateless_truncated_normal": _normal,
            "uniform": _uniform,
            "stateless_uniform": _uniform,
            "categorical": _categorical,
            "stateless_categorical": _categorical,
            "stateless_gamma": _gamma,
            "stateless_binomial": _binomial,
            "shuffle": _first,
        },
    ),
    (tf.nn, {"dropout": _first}),
    (tf.nn.experimental, {"stateless_dropout": _first}),
)


class Noise:
    """The random numbers of a training's steps.

    Attributes
    ----------
    is_drawn
        Whether some were drawn while `watch` lasted, be it while a step was traced.
    """

    def __init__(self) -> None:
        self.is_drawn = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note in this context whether random numbers are drawn."""

        def note(draw: Callable[..., Any], stand_in: Callable[[Arguments], Any]) -> Any:
            @wraps(draw)
            def noting(*args: Any, **options: Any) -> Any:
                self.is_drawn = True
                return draw(*args, **options)

            return noting

        with _replace(note):
            yield


@contextmanager
def stand_in_noise() -> Iterator[None]:
    """Let nothing be drawn at random in this context; generators stay as they are.

    Other threads, such as those of a pipeline that makes the next batch, draw as they do.
    """
    own = threading.get_ident()
    advance = keras.random.SeedGenerator.next

    def constant(draw: Callable[..., Any], stand_in: Callable[[Arguments], Any]) -> Any:
        signature = inspect.signature(draw)

        def standing_in(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != own:
                return draw(*args, **options)
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            return stand_in(bound.arguments)

        return standing_in

    def keep(generator: Any, ordered: bool = True) -> Any:
        if threading.get_ident() != own:
            return advance(generator, ordered=ordered)
        return tf.convert_to_tensor(generator.state)

    with _replace(constant), override(keras.random.SeedGenerator, "next", keep):
        yield


@contextmanager
def _replace(wrap: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, stand_ins in _STAND_INS:
            for name, stand_in in stand_ins.items():
                wrapped = wrap(getattr(module, name), stand_in)
                stack.enter_context(override(module, name, wrapped))
        yield
