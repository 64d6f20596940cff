"""Random rows of the shapes that the programs train on."""

from __future__ import annotations

import numpy as np

_RNG = np.random.default_rng(11)
ROWS = 45  # on two workers 23 and 22: uneven batches
IMAGES = _RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
CLASSES = _RNG.integers(0, 4, ROWS)
FLAGS = CLASSES[:, None] > 1
MASKS = _RNG.integers(0, 2, (ROWS, 8, 8, 1)).astype("float32")
WORDS = _RNG.integers(1, 30, (ROWS, 7))
WORDS[:, 5:] *= _RNG.integers(0, 2, (ROWS, 2))
OTHER_WORDS = _RNG.integers(1, 20, (ROWS, 6))
OTHER_WORDS[:, 4:] *= _RNG.integers(0, 2, (ROWS, 2))
TAGS = _RNG.integers(0, 4, (ROWS, 7))
NUMBERS = _RNG.normal(size=(ROWS, 10)).astype("float32")
SERIES = _RNG.normal(size=(ROWS, 8, 2)).astype("float32")
NEXT = _RNG.normal(size=(ROWS, 3)).astype("float32")
NODES = _RNG.normal(size=(ROWS, 5, 4)).astype("float32")
EDGES = _RNG.integers(0, 2, (ROWS, 5, 5)).astype("float32")
IDS = _RNG.integers(0, 20, (ROWS, 3))
VIDEOS = _RNG.normal(size=(ROWS, 4, 6, 6, 1)).astype("float32")
POINTS = _RNG.normal(size=(ROWS, 12, 3)).astype("float32")
SOUNDS = _RNG.normal(size=(ROWS, 32, 1)).astype("float32")
LABELS = _RNG.integers(0, 4, (ROWS, 3))
