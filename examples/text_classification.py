"""Classify sentences by the library that they describe, with two workers.

The sentences are real: those of the documentation of numpy and of Keras's layers. A function whose
name has a checksum divisible by five is in the test set, with all of its sentences.

    python examples/text_classification.py [EPOCHS]
"""

import inspect
import re
import sys
import zlib

import keras
import numpy as np

import pybackend

LIBRARIES = (np, keras.layers)
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 6


def read_sentences(module):
    """Return the sentences of a module's docstrings, each with the name of the described object."""
    for name, thing in sorted(vars(module).items()):
        text = inspect.getdoc(thing) if callable(thing) and not name.startswith("_") else None
        for sentence in re.split(r"\n\n|\. ", text or ""):
            if len(sentence.split()) > 4 and ">>>" not in sentence:
                yield name, sentence


rows = [
    (zlib.crc32(name.encode()) % 5 == 0, sentence, label)
    for label, module in enumerate(LIBRARIES)
    for name, sentence in read_sentences(module)
]
is_test, sentences, labels = map(np.array, zip(*rows, strict=True))

# Words become numbers here, once; the workers get arrays of numbers.
words = keras.layers.TextVectorization(max_tokens=3000, output_sequence_length=30)
words.adapt(sentences[~is_test])
tokens = np.asarray(words(sentences))

model = keras.Sequential(
    [
        keras.Input((30,), dtype="int64"),
        keras.layers.Embedding(3000, 16),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
train = (tokens[~is_test], labels[~is_test])
result = pybackend.barrier_train("local", model, train, workers=2, epochs=EPOCHS, seed=1, verbose=0)

guesses = result.model.predict(tokens[is_test], verbose=0)[:, 0] > 0.5
right, most = np.mean(guesses == labels[is_test]), max(np.bincount(labels[is_test])) / is_test.sum()
print(f"{len(train[1])} sentences, {is_test.sum()} for the test")
print(f"accuracy {right:.3f}; always the more frequent library: {most:.3f}")
