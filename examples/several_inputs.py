"""Predict rented bicycles by hour, weekday and weather: a model with several inputs.

The inputs are columns of a data frame. `make_rentals` generates the rows from a seed: people ride
to work and back on weekdays, in the afternoon at weekends, and less in rain and cold.

    python examples/several_inputs.py [EPOCHS]
"""

import sys

import keras
import numpy as np
import pandas as pd

import pybackend

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 8


def make_rentals(hours, seed):
    """Return rows of ``hour``, ``weekday`` (0: Monday), ``temperature``, ``rain``, ``rentals``."""
    rng = np.random.default_rng(seed)
    time = np.arange(hours)
    hour, weekday = time % 24, time // 24 % 7
    cold = 12 - 9 * np.cos(2 * np.pi * time / 24 / 365) - 4 * np.cos(2 * np.pi * (hour - 3) / 24)
    temperature = cold + rng.normal(0, 3, hours)
    rain = rng.gamma(0.2, 2.0, hours)
    commuting = np.exp(-((hour - 8) ** 2) / 3) + np.exp(-((hour - 17) ** 2) / 5)
    leisure = np.exp(-((hour - 14) ** 2) / 18)
    mean = np.where(weekday < 5, commuting, leisure) * (5 + temperature.clip(0, 30)) * 8 + 5
    rentals = rng.poisson(mean * np.exp(-rain))
    return pd.DataFrame(
        {
            "hour": hour,
            "weekday": weekday,
            "temperature": temperature,
            "rain": rain,
            "rentals": rentals,
        }
    )


def build_model():
    weather = keras.Input((2,), name="weather")
    hour = keras.Input((1,), name="hour", dtype="int32")
    weekday = keras.Input((1,), name="weekday", dtype="int32")
    parts = [keras.layers.BatchNormalization()(weather)]
    for column, values in ((hour, 24), (weekday, 7)):
        parts.append(keras.layers.Flatten()(keras.layers.Embedding(values, 8)(column)))
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()(parts))
    rate = keras.layers.Dense(1, "softplus")(keras.layers.Dense(32, "relu")(hidden))
    model = keras.Model({"weather": weather, "hour": hour, "weekday": weekday}, rate)
    model.compile(keras.optimizers.Adam(0.01), "poisson", metrics=["mae"])
    return model


rentals = make_rentals(24 * 7 * 40, seed=1)
train, test = rentals[: -24 * 28], rentals[-24 * 28 :]
result = pybackend.barrier_train(
    "local",
    build_model,
    train,
    label="rentals",
    features={"weather": ["temperature", "rain"], "hour": "hour", "weekday": "weekday"},
    workers=2,
    epochs=EPOCHS,
    seed=1,
    verbose=0,
)
inputs = {
    "weather": test[["temperature", "rain"]].to_numpy("float32"),
    "hour": test[["hour"]].to_numpy("int32"),
    "weekday": test[["weekday"]].to_numpy("int32"),
}
guesses = result.model.predict(inputs, verbose=0)[:, 0]
error = np.abs(guesses - test.rentals).mean()
guessed = np.abs(train.rentals.mean() - test.rentals).mean()
print(f"{len(train)} hours, {len(test)} for the test")
print(f"mean error {error:.1f} rentals; of the mean as a guess: {guessed:.1f}")
