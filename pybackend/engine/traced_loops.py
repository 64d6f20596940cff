"""Recurrent layers that run as graphs, where the rest of a model is run step by step.

Run eagerly, a layer takes milliseconds for each place of a sequence: with hundreds of them, and
dozens of calls, what is tried before a training would take minutes.
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
    """Meanwhile Keras's own recurrent layers run as graphs, as they do in a training.

    Not those of a model that is to run eagerly, nor those with cells of the user's own.

    Parameters
    ----------
    traced
        What was traced before, and is now.
    """
    kept = {} if traced is None else traced
    with ExitStack() as stack:
        for layer in [] if model.run_eagerly else find_layers(model):
            if _is_of_keras(layer):
                own = kept.setdefault(id(layer), {})
                stack.enter_context(override(layer, "call", _trace(layer.call, own)))
        yield


@contextmanager
def running_functions(eagerly: bool) -> Iterator[None]:
    """Meanwhile each ``tf.function`` runs as Python, or as the graph that it is traced to."""
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
    # One for each value of `training`: to trace a function often makes TensorFlow warn.
    # A function of TensorFlow's that is an attribute would count as a part of the layer.
    def run(*args: Any, training: Any = False, **options: Any) -> Any:
        if training not in traced:
            traced[training] = tf.function(partial(call, training=training), reduce_retracing=True)
        with running_functions(eagerly=False):
            return traced[training](*args, **options)

    return run
