"""Transfer learning: a network trained on five digits learns the other five from few images.

The base is trained on 0 to 4; with its layers frozen, a new last layer learns 5 to 9. The data are
MNIST, from TFDIST_MNIST or Keras's cache, or the images that come with tfdist.

    python examples/transfer_learning.py [EPOCHS]
"""

import sys

import keras
import numpy as np

import pybackend

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 8

digits = pybackend.mnist(limit=4000)
images, labels = digits.x_train / np.float32(255), digits.y_train
is_known = labels < 5


def add_head(base, name):
    """Return a compiled classifier of five digits on top of ``base``."""
    guess = keras.layers.Dense(5, activation="softmax", name=name)(base.outputs[0])
    model = keras.Model(base.inputs, guess)
    model.compile(
        keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


keras.utils.set_random_seed(1)
base = keras.Sequential(
    [
        keras.Input((28, 28)),
        keras.layers.Reshape((28, 28, 1)),
        keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
        keras.layers.Flatten(name="strokes"),
    ]
)
known = pybackend.barrier_train(
    "local",
    add_head(base, "known"),
    (images[is_known], labels[is_known]),
    workers=2,
    epochs=3,
    seed=1,
    verbose=0,
)

frozen = keras.Model(known.model.input, known.model.get_layer("strokes").output)
frozen.trainable = False
few, test = np.flatnonzero(~is_known)[:300], np.flatnonzero(~is_known)[-1000:]
result = pybackend.barrier_train(
    "local",
    add_head(frozen, "new"),
    (images[few], labels[few] - 5),
    workers=2,
    epochs=EPOCHS,
    batch_size=16,
    seed=1,
    verbose=0,
)
right = result.model.evaluate(images[test], labels[test] - 5, verbose=0, return_dict=True)
trained = sum(variable.value.shape.num_elements() for variable in result.model.trainable_variables)
print(f"{len(few)} images, {len(test)} for the test; {trained} weights trained of ", end="")
print(f"{result.model.count_params()}")
print(f"accuracy {right['accuracy']:.3f}; guessing: 0.200")
