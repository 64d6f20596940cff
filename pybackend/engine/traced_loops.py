"""Recurrent layers that run as graphs, while the rest of a model runs eagerly.

An eager layer takes milliseconds for each time step of a sequence: with hundreds of them, and
dozens of calls, the checks before a training would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pybackend.engine.overrides import override
from pybackend.model.layers import find_layers, is_of_keras


@contextmanager
def trace_loops(model: Any, traced: dict[Any, Any] | None = None) -> Iterator[None]:
    """Run Keras's own recurrent layers as graphs in this context, as in a training.

    Except in models with ``run_eagerly=True``, and layers with custom cells.

    Parameters
    ----------
    traced
        Cache of the functions that were traced.
    """
    cache = {} if traced is None else traced
    with ExitStack() as stack:
        for layer in [] if model.run_eagerly else find_layers(model):
            if _is_of_keras(layer):
                own = cache.setdefault(id(layer), {})
                stack.enter_context(override(layer, "call", _trace(layer.call, own)))
        yield


@contextmanager
def running_functions(eagerly: bool) -> Iterator[None]:
    """Run each ``tf.function`` as Python, or as its traced graph, in this context."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(eagerly)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _is_of_keras(layer: Any) -> bool:
    if not isinstance(layer, keras.layers.RNN) or not is_of_keras(type(layer).call):
        return False
    cells = getattr(layer.cell, "cells", [layer.cell])
    return all(is_of_keras(type(cell).call) for cell in cells)


def _trace(call: Callable[..., Any], traced: dict[Any, Any]) -> Callable[..., Any]:
    # One for each value of `training`: TensorFlow warns if a function is traced often.
    # A TensorFlow function that is an attribute would count as a part of the layer.
    def run(*args: Any, training: Any = False, **options: Any) -> Any:
        if training not in traced:
            traced[training] = tf.function(partial(call, training=training), reduce_retracing=True)
        with running_functions(eagerly=False):
            return traced[training](*args, **options)

    return run
