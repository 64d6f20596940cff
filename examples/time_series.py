"""Predict the load of a power grid six hours ahead with a recurrent network and two workers.

`make_load` generates the series from a seed: daily and weekly cycles with autocorrelated noise. The
last tenth is the test set.

    python examples/time_series.py [EPOCHS]
"""

import sys

import keras
import numpy as np

import pybackend

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 6
PAST, AHEAD = 48, 6


def make_load(hours, seed):
    """Return hourly load with the mean 0, higher by day and on weekdays, with noise of order 1."""
    time = np.arange(hours)
    daily = np.sin(2 * np.pi * (time - 8) / 24) + 0.4 * np.sin(4 * np.pi * time / 24)
    weekly = np.where(time // 24 % 7 < 5, 0.3, -0.75)
    noise = np.random.default_rng(seed).normal(0, 0.1, hours)
    for hour in range(1, hours):
        noise[hour] += 0.8 * noise[hour - 1]
    return (daily * (1 + weekly / 2) + weekly + noise).astype("float32")


load = make_load(24 * 7 * 16, seed=1)
windows = np.lib.stride_tricks.sliding_window_view(load, PAST + AHEAD)
x, y = windows[:, :PAST, None], windows[:, -1]
cut = len(x) * 9 // 10
# No window of the test set overlaps with the training data.
train, test = slice(0, cut - PAST - AHEAD), slice(cut, None)

model = keras.Sequential([keras.Input((PAST, 1)), keras.layers.GRU(16), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
result = pybackend.barrier_train(
    "local", model, (x[train], y[train]), workers=2, epochs=EPOCHS, seed=1, verbose=0
)

guesses = result.model.predict(x[test], verbose=0)[:, 0]
error = np.abs(guesses - y[test]).mean()
yesterday = np.abs(x[test, AHEAD - 1 - 24, 0] - y[test]).mean()
print(f"{train.stop} windows, {len(guesses)} for the test")
print(f"mean error {error:.3f}; of the same hour of the day before: {yesterday:.3f}")
