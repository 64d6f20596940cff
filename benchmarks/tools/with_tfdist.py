"""The job with tfdist."""

import os
import sys

import case
import keras
import numpy as np

import pybackend


class MayDie(keras.callbacks.Callback):
    """Callback that kills the worker in the middle of the job, if that is asked for."""

    def on_epoch_begin(self, epoch, logs=None):
        """Kill this process if it is its turn."""
        case.may_die(int(os.environ["TFDIST_RANK"]), epoch)


def build():
    """Return the compiled model."""
    layers = [keras.layers.Dense(case.HIDDEN, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((case.FEATURES,)), *layers])
    model.set_weights(case.weights())
    model.compile(keras.optimizers.SGD(case.RATE), "mse")
    return model


result = pybackend.barrier_train(
    "local",
    build,
    case.rows(),
    workers=case.WORKERS,
    batch_size=case.BATCH,
    epochs=case.EPOCHS,
    shuffle=False,
    callbacks=[MayDie()],
)
np.savez(sys.argv[1], *result.model.get_weights())
