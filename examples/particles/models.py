"""The three classifiers, as published."""

from __future__ import annotations

from typing import Any

from layout import CLASSES, HIGH_LEVEL_FEATURES, PARTICLE_FEATURES

INPUTS: dict[str, tuple[str, ...]] = {
    "HLF": ("hlf_input",),
    "particle sequence": ("gru_input",),
    "inclusive": ("gru_input", "hlf_input"),
}


def build(name: str, learning_rate: float = 0.0005, dropout: float = 0.2) -> Any:
    """Return a compiled classifier: ``"HLF"``, ``"particle sequence"`` or ``"inclusive"``.

    Parameters
    ----------
    learning_rate
        Learning rate of one worker.
    dropout
        Dropout of the branches of the models with particles.
    """
    import keras

    layers = keras.layers
    hlf = keras.Input((len(HIGH_LEVEL_FEATURES),), name="hlf_input")
    # Any number of slots for particles: slots of zeros are masked.
    particles = keras.Input((None, len(PARTICLE_FEATURES)), name="gru_input")
    if name == "HLF":
        hidden = hlf
        for units in (50, 20, 10):
            hidden = layers.Dense(units, activation="relu")(hidden)
    else:
        sequence = layers.GRU(50)(layers.Masking()(particles))
        hidden = layers.Dropout(dropout)(sequence)
        if name == "inclusive":
            hidden = layers.Concatenate()([hidden, layers.Dropout(dropout)(hlf)])
            hidden = layers.Dense(25, activation="relu")(hidden)
    scores = layers.Dense(len(CLASSES), activation="softmax")(hidden)
    inputs = {"hlf_input": hlf, "gru_input": particles}
    model = keras.Model({key: inputs[key] for key in INPUTS[name]}, scores, name=name.split()[0])
    optimizer = keras.optimizers.Adam(learning_rate)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model
