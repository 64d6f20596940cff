"""One training on MNIST for every launcher, in both languages, with its result on this machine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from conftest import R_VARIABLES, largest_difference

import pybackend

# The same values as `seed_fit()` of R's tests, which compares both languages on this machine.
CASE = {"workers": 2, "epochs": 1, "batch_size": 32, "limit": 256, "seed": 3}
_PROGRAM = Path(__file__).parent / "programs" / "mnist.py"
IN_PYTHON = str(_PROGRAM)
IN_R = str(_PROGRAM.with_suffix(".R"))


@functools.cache
def trained_here() -> pybackend.types.TrainResult:
    """Return the result of workers that this process starts."""
    return pybackend.train_mnist("local", verbose=0, **CASE)


def check(model: Any) -> None:
    """Return whether a model has the same weights as the one trained here."""
    assert largest_difference(model, trained_here().model) < 1e-6


def check_files(folder: Path, count: int) -> None:
    """Return whether this number of programs wrote such a model."""
    import keras

    written = sorted(folder.glob("*.h5"))
    assert len(written) == count
    for path in written:
        check(keras.models.load_model(path, compile=False))


def describe(folder: Path, **more: Any) -> str:
    """Return the argument of a program that writes its model into a folder."""
    return json.dumps({"folder": str(folder), "index": 0, "arguments": CASE, **more})


def check_r(folder: Path, launcher: str, /, **options: Any) -> None:
    """Train from R with a launcher, and compare."""
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
