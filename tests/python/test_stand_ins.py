"""Random numbers that become constants, and those that are drawn again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from threads import Threads

from pybackend.core.engine.audit.stand_ins import Noise, stand_in_noise

random = keras.random
SEED = random.SeedGenerator(3)
LOGITS = np.array([[0.1, 2.0, 1.0], [3.0, 0.0, 1.0]])
DRAWS = {
    "normal": (lambda n: random.normal((n, 3), 1.0, 2.0, seed=SEED), 2.4),
    "without a generator": (lambda n: random.normal((n,)), 0.7),
    "truncated": (lambda n: random.truncated_normal((n, 3), seed=SEED), 0.7),
    "uniform": (lambda n: random.uniform((n, 3), -1.0, 1.0, seed=SEED), 0.4),
    "integers": (lambda n: random.randint((n,), 0, 10, seed=SEED), 7),
    "gamma": (lambda n: random.gamma((n, 2), 3.0, seed=SEED), 3.0),
    "beta": (lambda n: random.beta((n, 1), 1.0, 3.0, seed=SEED), 0.25),
    "binomial": (lambda n: random.binomial((n,), 5.0, 0.4, seed=SEED), 2.0),
    "TensorFlow's": (lambda n: tf.random.normal([tf.constant(n), 2], stddev=2.0), 1.4),
    "TensorFlow's integers": (lambda n: tf.random.uniform([n], 0, 10, tf.int64), 7),
    "dropout": (lambda n: keras.layers.Dropout(0.5, seed=1)(tf.ones((n, 4)), training=True), 1.0),
    "noise": (lambda n: keras.layers.GaussianNoise(0.5)(tf.zeros((n, 4)), training=True), 0.35),
    "TensorFlow's dropout": (lambda n: tf.nn.dropout(tf.ones((n, 4)), 0.5), 1.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_one_number_for_all_rows(name: str) -> None:
    draw, expected = DRAWS[name]
    state = SEED.state.numpy()
    with stand_in_noise():
        for rows in (1, 4):
            np.testing.assert_allclose(draw(rows), np.full(np.shape(draw(rows)), expected), 1e-6)
    np.testing.assert_array_equal(SEED.state.numpy(), state)
    assert len(np.unique(np.concatenate([np.ravel(draw(50)) for _ in range(2)]))) > 1


def test_an_order_stays_as_it_is_and_a_choice_is_the_likeliest() -> None:
    with stand_in_noise():
        np.testing.assert_array_equal(random.shuffle(np.arange(20), seed=SEED), np.arange(20))
        np.testing.assert_array_equal(tf.random.shuffle(tf.range(20)), np.arange(20))
        chosen = random.categorical(LOGITS, 2, seed=SEED)
        np.testing.assert_array_equal(chosen, [[1, 1], [0, 0]])


def test_other_threads_draw_as_they_do() -> None:
    def draw() -> Any:
        return random.normal((50,), seed=SEED).numpy()

    with stand_in_noise(), Threads() as threads:
        assert np.ptp(threads.submit(draw).result()) > 0
        assert np.ptp(draw()) == 0


def test_draws_are_noticed_while_they_are_watched() -> None:
    dropout, dense = keras.layers.Dropout(0.5), keras.layers.Dense(2)
    x = tf.ones((2, 3))
    dense(x)
    noise, before = Noise(), tf.random.normal
    with noise.watch():
        dropout(x, training=False)
        dense(x)
        assert not noise.is_drawn
        tf.function(lambda: dropout(x, training=True))()
        assert noise.is_drawn
    assert tf.random.normal is before
    assert (noise.has_seeds, noise.is_stateless) == (True, True)


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda: keras.random.normal((2,), seed=3), (False, True)),
        (lambda: tf.random.stateless_uniform((2,), [1, 2]), (False, True)),
        (lambda: keras.random.normal((2,), seed=keras.random.SeedGenerator(1)), (True, True)),
        (lambda: tf.random.normal((2,)), (False, False)),
    ],
)
def test_where_seeds_come_from_is_noticed(draw: Any, found: tuple[bool, bool]) -> None:
    noise = Noise()
    with noise.watch():
        draw()
    assert (noise.has_seeds, noise.is_stateless) == found
