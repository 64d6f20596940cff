"""Comparison of a model's loss and gradients with those of its copy."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.model.compare import is_random_state
from pybackend.model.layers import find_custom_parts, find_variables


def find_other_behavior(model: Any, copy: Any, rows: Any) -> list[str]:
    """Describe how a copy of a model computes differently, in words that continue "it loses".

    The training loss and its gradients are compared if the model is built and has user-defined
    parts; parts of Keras are determined by their configuration. Random results are not compared.

    Parameters
    ----------
    rows
        Some rows as ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """
    if not (model.built and copy.built and find_custom_parts(model)):
        return []
    states = [v for v in copy.variables if is_random_state(v)]
    for state, own in zip(states, filter(is_random_state, model.variables), strict=False):
        state.assign(own)
    try:
        own, again = _compute_gradients(model, rows), _compute_gradients(model, rows)
    except Exception:  # rows that do not fit are reported later
        return []
    if not _is_close(own, again):
        return []
    try:
        others = _compute_gradients(copy, rows)
    except Exception as error:
        return [f"something without which it fails ({error})"]
    return [] if _is_close(own, others) else ["something that changes its loss or gradients"]


@contextmanager
def keep_state(model: Any) -> Iterator[None]:
    """Restore a model's variables and the random states of Python and numpy at the end."""
    values = [(variable, variable.numpy()) for variable in find_variables(model)]
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        random.setstate(states[0])
        np.random.set_state(states[1])


def compute_loss(model: Any, rows: Any, y_pred: Any, training: bool) -> Any:
    """Return a model's loss for predictions, as a tensor."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(rows)
    arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    if "training" in inspect.signature(model.compute_loss).parameters:
        arguments["training"] = training
    return model.compute_loss(**arguments)


def _compute_gradients(model: Any, rows: Any) -> list[Any]:
    """Return the loss, and the gradients of the trainable variables."""
    variables = [v.value for v in model.trainable_variables]
    with keep_state(model):
        with tf.GradientTape() as tape:
            x = keras.utils.unpack_x_y_sample_weight(rows)[0]
            loss = compute_loss(model, rows, model(x, training=True), True)
        gradients = tape.gradient(loss, variables)
    found = [loss, *(gradient for gradient in gradients if gradient is not None)]
    return [keras.ops.convert_to_numpy(each) for each in found]


def _is_close(own: list[Any], others: list[Any]) -> bool:
    if len(own) != len(others):
        return False
    return all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
        for one, other in zip(own, others, strict=True)
    )
