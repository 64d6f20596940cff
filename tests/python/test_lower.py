"""Keras models as graphs: the numbers equal the model's, and unsupported parts are named."""

from __future__ import annotations

import numpy as np
import pytest
from graph_numpy import compute
from sql_models import MODELS, make

from pybackend.sql.lower import lower_model


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_computes_what_the_model_does(name: str) -> None:
    model, rows, outputs = make(name)
    graph = lower_model(model)
    for number in range(len(rows[0])):
        inputs = {node.name: x[number] for node, x in zip(graph.inputs, rows, strict=True)}
        for got, wanted in zip(compute(graph, inputs), outputs, strict=True):
            np.testing.assert_allclose(got, wanted[number].ravel(), rtol=1e-4, atol=2e-6)
