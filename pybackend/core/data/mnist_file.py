"""MNIST (LeCun, Cortes and Burges) from a file in the layout of Keras's ``mnist.npz``."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np

from pybackend.core.data.arrays import Array
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.words import show

Digits = tuple[tuple[Array, Array], tuple[Array, Array]]
Download = Callable[[], Digits | None]

_NAMES = ("x_train", "y_train", "x_test", "y_test")
# The last two: a file of a single array (.npy) is not a context manager.
_UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, EOFError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error, TypeError, AttributeError)


@dataclass(frozen=True)
class Mnist:
    """Images as uint8 (rows, 28, 28) from 0 to 255, labels as int64 (rows,) from 0 to 9."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    source: str  # the file they were read from, or "download"
    subset: bool = False  # only the few thousand images that ship with tfdist


def find_mnist(path: str | Path | None, limit: int | None, download: Download) -> Mnist:
    """Find MNIST: ``path``, TFDIST_MNIST, Keras's cache, a download, or the built-in subset.

    ``path`` and ``limit`` are those of `pybackend.mnist`. ``download`` is called if there is no
    file; it returns the images and labels of the training and test sets, or None. Raises
    `InputError` if a named file is missing or is not an ``mnist.npz``.
    """
    if limit is not None:
        limit = check_whole_number("limit", limit, least=1)
    digits = _find(path, download)
    return replace(digits, **{name: getattr(digits, name)[:limit] for name in _NAMES})


def _find(path: str | Path | None, download: Download) -> Mnist:
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"`path` must name an mnist.npz, not {show(path)}")
        return _read(Path(path), f"`path` is {show(str(path))}")
    if named := os.environ.get("TFDIST_MNIST"):
        return _read(Path(named), f"TFDIST_MNIST is {show(named)}")
    cached = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "datasets" / "mnist.npz"
    if cached.exists():
        with contextlib.suppress(InputError):  # a download that broke off: Keras repeats it
            return _read(cached, "Keras's cache")
    if digits := download():
        return _build((*digits[0], *digits[1]), "download")
    return _read(_subset(), "the built-in subset")


def _subset() -> Traversable:
    # On hosts of scripts, this package is in an archive, which forked processes must not share.
    return files("pybackend.core.data").joinpath("mnist_subset.npz")


def _read(path: Path | Traversable, why: str) -> Mnist:
    if not path.is_file():
        raise InputError(f"{why}, but there is no such file: expected Keras's mnist.npz")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            parts = [file[name] for name in _NAMES]
        for images, labels in (parts[:2], parts[2:]):
            if labels.ndim != 1 or images.shape != (len(labels), 28, 28):
                raise ValueError(f"images of shape {images.shape}, labels of {labels.shape}")
    except _UNREADABLE as error:
        raise InputError(
            f"{why}, but {path} is not an mnist.npz ({error}): expected the arrays "
            f"{', '.join(_NAMES)}"
        ) from error
    return replace(_build(parts, str(path)), subset=str(path) == str(_subset()))


def _build(parts: Sequence[Array], source: str) -> Mnist:
    x_train, y_train, x_test, y_test = parts
    return Mnist(x_train, y_train.astype(np.int64), x_test, y_test.astype(np.int64), source)
