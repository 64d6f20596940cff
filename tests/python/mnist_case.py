"""One training on MNIST for every launcher, in both languages; what it gives on this machine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from conftest import R_VARIABLES, largest_difference

import pybackend

# As `seed_fit()` of R's tests, which compares what both languages give on this machine.
CASE = {"workers": 2, "epochs": 1, "batch_size": 32, "limit": 256, "seed": 3}
_PROGRAM = Path(__file__).parent / "programs" / "mnist.py"
IN_PYTHON = str(_PROGRAM)
IN_R = str(_PROGRAM.with_suffix(".R"))


@functools.cache
def trained_here() -> pybackend.TrainResult:
    """What the workers of this process give."""
    return pybackend.train_mnist("local", verbose=0, **CASE)


def check(model: Any) -> None:
    """Whether a model has the weights of the one that was trained here."""
    assert largest_difference(model, trained_here().model) < 1e-6


def check_files(folder: Path, count: int) -> None:
    """Whether so many programs have written such a model."""
    import keras

    written = sorted(folder.glob("*.h5"))
    assert len(written) == count
    for path in written:
        check(keras.models.load_model(path, compile=False))


def describe(folder: Path, **more: Any) -> str:
    """The argument of a program that is to write its model into a folder."""
    return json.dumps({"folder": str(folder), "index": 0, "arguments": CASE, **more})


def check_r(folder: Path, launcher: str, /, **options: Any) -> None:
    """Train from R by a launcher, and compare."""
    spec = describe(folder, launcher=launcher, options=options)
    done = subprocess.run(
        ["Rscript", IN_R, spec],
        capture_output=True,
        text=True,
        env={**os.environ, **R_VARIABLES},
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_files(folder, 1)
