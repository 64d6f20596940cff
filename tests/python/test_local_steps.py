"""Local steps: averages of weights, and DiLoCo, compared with their definition in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from replicas import Case, Trained, check_equal, difference
from test_exact_cases import OwnStep, X, Y, dense, subclassed

from pybackend.core.data.sharding import Visits, cut_shards, shard_slice
from pybackend.core.job.worker_options import LocalSteps

ADAM = {"optimizer": lambda: keras.optimizers.Adam(0.01)}
DILOCO = {"exchange": LocalSteps(3, learning_rate=0.7, momentum=0.9)}
TWO_STEPS = {"exchange": LocalSteps(2)}
THREE_STEPS = {"exchange": LocalSteps(3)}
CASES = {
    "local sgd": Case(dense(), (X, Y), settings=THREE_STEPS),
    "diloco": Case(dense(**ADAM), (X, Y), settings=DILOCO, tolerance=1e-5),
    "longer than an epoch": Case(dense(), (X, Y), settings={"exchange": LocalSteps(100)}),
    "steps without rows": Case(dense(), (X[:7], Y[:7]), batch_size=1, settings=TWO_STEPS),
    "several steps at once": Case(dense(steps_per_execution=3), (X, Y), settings=TWO_STEPS),
    "eager": Case(dense(run_eagerly=True), (X, Y), settings=TWO_STEPS),
    "jit_compile": Case(dense(jit_compile=True), (X, Y), settings=THREE_STEPS),
    "own train_step": Case(
        subclassed(OwnStep),
        (X, Y),
        settings=THREE_STEPS,
        custom_objects={"OwnStep": OwnStep},
        trainable_only=True,
    ),
}


def simulate(case: Case) -> Any:
    """Train two replicas in this process, each on its shard, with the defined outer step."""
    x, y = case.data
    exchange = case.settings["exchange"]
    every, rate, momentum = exchange.steps, exchange.learning_rate, exchange.momentum
    replicas = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = case.build()
        model.jit_compile, model.run_eagerly, model.steps_per_execution = False, False, 1
        replicas.append(model)
    shards = [np.arange(len(x))[shard_slice(len(x), 2, rank)] for rank in range(2)]
    cuts = cut_shards([len(shard) for shard in shards], case.batch_size)
    steps = cuts.shape[1] - 1
    values = lambda m: [v.numpy().astype("float64") for v in m.trainable_variables]  # noqa: E731
    last = values(replicas[0])
    velocity = [np.zeros_like(value) for value in last]
    rows_since = np.zeros(2)
    for epoch in range(case.epochs):
        for step in range(steps):
            for rank, model in enumerate(replicas):
                own = shards[rank]
                visits = own[Visits(len(own), 3, rank, True).between(0, len(own), epoch)]
                rows = visits[cuts[rank, step] : cuts[rank, step + 1]]
                rows_since[rank] += len(rows)
                if len(rows):
                    model.fit(x[rows], y[rows], batch_size=len(rows), verbose=0)
            if (step + 1) % every and step + 1 < steps:
                continue
            share = rows_since / rows_since.sum()
            found = [values(model) for model in replicas]
            for place, start in enumerate(last):
                change = start - sum(share[r] * found[r][place] for r in range(2))
                velocity[place] = momentum * velocity[place] + change
                last[place] = start - rate * (change + momentum * velocity[place])
            for model in replicas:
                for variable, value in zip(model.trainable_variables, last, strict=True):
                    variable.assign(value)
            rows_since[:] = 0
    return replicas[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_workers_do_what_the_definition_says(name: str, trained: dict[str, Any]) -> None:
    case, found = CASES[name], trained[name]
    assert isinstance(found, Trained), found
    expected = simulate(case)
    assert len(set(found.digests)) == 1
    assert difference(case, expected, found.model) <= case.tolerance


@pytest.mark.parametrize("name", ["longer than an epoch"])
def test_local_steps_differ_from_one_process(name: str, trained: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_equal(CASES[name], trained[name])
