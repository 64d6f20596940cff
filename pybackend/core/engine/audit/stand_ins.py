"""Replacements for random numbers and loops when a step is repeated eagerly.

Keras's layers, `keras.random` and most custom code draw random numbers with a few TensorFlow
functions. Each draw becomes a constant that is the same for all rows, and dropout drops nothing.
Seed generators always return the same seed, so other draws from it are equal if their shapes are
equal.

An eager layer takes milliseconds for each time step of a sequence. With hundreds of time steps and
dozens of calls, the checks before training would take minutes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import keras
import tensorflow as tf

from pybackend.core.engine.step_changes import configure, override, override_each
from pybackend.core.model.view import ModelView, has_own

Arguments = Mapping[str, Any]

# Positions of a constant in its range: an event of a small rate does not happen, or happens.
POSITIONS: tuple[float, ...] = (0.7, 0.03)
_SEED = 1337


def _normal(given: Arguments, position: float) -> Any:
    value = tf.cast(given["mean"], given["dtype"])
    spread = tf.cast(given["stddev"], given["dtype"])
    return tf.broadcast_to(value + position * spread, given["shape"])


def _uniform(given: Arguments, position: float) -> Any:
    dtype = tf.as_dtype(given["dtype"])
    if given["minval"] is None:  # any integer
        return tf.fill(given["shape"], tf.constant(1, dtype))
    low = tf.cast(given["minval"], tf.float64)
    high = tf.cast(1 if given["maxval"] is None else given["maxval"], tf.float64)
    return tf.broadcast_to(tf.cast(low + position * (high - low), dtype), given["shape"])


def _categorical(given: Arguments, position: float) -> Any:
    likeliest = tf.argmax(given["logits"], -1)[:, None]
    return tf.cast(tf.repeat(likeliest, given["num_samples"], axis=1), given["dtype"] or tf.int64)


def _gamma(given: Arguments, position: float) -> Any:
    beta = 1 if given["beta"] is None else given["beta"]
    mean = tf.cast(given["alpha"], given["dtype"]) / tf.cast(beta, given["dtype"])
    return tf.broadcast_to(mean, given["shape"])


def _binomial(given: Arguments, position: float) -> Any:
    mean = tf.cast(given["counts"], tf.float64) * tf.cast(given["probs"], tf.float64)
    return tf.broadcast_to(tf.cast(tf.round(mean), given["output_dtype"]), given["shape"])


def _first(given: Arguments, position: float) -> Any:
    return tf.convert_to_tensor(next(iter(given.values())))


StandIn = Callable[[Arguments, float], Any]
_OF_MODULES: Mapping[str, StandIn] = {
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
}
_OF_GENERATORS = {"normal": _normal, "truncated_normal": _normal, "uniform": _uniform}
_STAND_INS: tuple[tuple[Any, Mapping[str, StandIn]], ...] = (
    (tf.random, _OF_MODULES),
    (tf.compat.v2.random, _OF_MODULES),
    (tf.random.Generator, _OF_GENERATORS),
    (tf.nn, {"dropout": _first}),
    (tf.nn.experimental, {"stateless_dropout": _first}),
)


@dataclass
class Noise:
    """Record of the random numbers that steps draw while `watch` is active, even while traced."""

    is_drawn: bool = False
    has_seeds: bool = False  # a Keras generator returned seeds for them
    is_stateless: bool = False  # some were drawn with an explicit seed
    is_unseeded: bool = False  # some came from the global generator: they cannot be drawn again
    # Identities of the state variables of the generators that drew them.
    states: set[int] = field(default_factory=set)

    @contextmanager
    def watch(self) -> Iterator[None]:
        def note(draw: Callable[..., Any], stand_in: StandIn | None = None) -> Any:
            @wraps(draw)
            def noting(*args: Any, **options: Any) -> Any:
                self.is_drawn = True
                self.has_seeds |= stand_in is None
                is_seeded = draw.__name__.startswith("stateless")
                self.is_stateless |= is_seeded
                has_state = stand_in is None or "Generator." in draw.__qualname__
                if has_state:
                    state = args[0].state
                    self.states.add(id(state.value if stand_in is None else state))
                self.is_unseeded |= not is_seeded and not has_state
                return draw(*args, **options)

            return noting

        generator = keras.random.SeedGenerator
        with _replace(note), override(generator, "next", note(generator.next)):
            yield


@contextmanager
def stand_in_noise(position: float = POSITIONS[0]) -> Iterator[None]:
    """Replace random draws by constants within this context; the state of generators is unchanged.

    Draws in other threads, such as a pipeline that prepares the next batch, are unchanged.
    ``position`` is one of `POSITIONS`.
    """
    own = threading.get_ident()
    advance = keras.random.SeedGenerator.next

    def constant(draw: Callable[..., Any], stand_in: StandIn) -> Any:
        signature = inspect.signature(draw)

        def standing_in(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != own:
                return draw(*args, **options)
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            return stand_in(bound.arguments, position)

        return standing_in

    def keep(generator: Any, ordered: bool = True) -> Any:
        if threading.get_ident() != own:
            return advance(generator, ordered=ordered)
        return tf.fill(generator.state.shape, tf.cast(_SEED, generator.state.dtype))

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


def trace_loops(
    view: ModelView, traced: dict[Any, Any] | None = None
) -> AbstractContextManager[None]:
    """Run Keras's own recurrent layers as graphs within this context, as in training.

    This excludes models with ``run_eagerly=True``, and layers with custom cells. ``traced`` is a
    cache of the functions that were traced.
    """
    cache = {} if traced is None else traced
    loops = [] if view.model.run_eagerly else [one for one in view.layers if _is_of_keras(one)]
    return override_each(
        loops, "call", lambda layer, call: _trace(call, cache.setdefault(id(layer), {}))
    )


def running_functions(eagerly: bool) -> AbstractContextManager[None]:
    """Run each ``tf.function`` as Python, or as its traced graph."""
    config = tf.config
    return configure(config.functions_run_eagerly, config.run_functions_eagerly, eagerly)


def _is_of_keras(layer: Any) -> bool:
    if not isinstance(layer, keras.layers.RNN) or has_own(layer, "call"):
        return False
    cells = getattr(layer.cell, "cells", [layer.cell])
    return not any(has_own(cell, "call") for cell in cells)


def _trace(call: Callable[..., Any], traced: dict[Any, Any]) -> Callable[..., Any]:
    # One for each value of `training`: TensorFlow warns if a function is traced often.
    # A TensorFlow function that is an attribute would count as a part of the layer.
    def run(*args: Any, training: Any = False, **options: Any) -> Any:
        if training not in traced:
            traced[training] = tf.function(partial(call, training=training), reduce_retracing=True)
        with running_functions(eagerly=False):
            return traced[training](*args, **options)

    return run
