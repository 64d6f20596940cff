"""A first example: train on MNIST with several workers."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pybackend.core.api.calls import Target, TrainingCall, explain_arguments
from pybackend.core.api.display import say
from pybackend.core.api.observer import split_trackers
from pybackend.core.api.train_result import TrainResult
from pybackend.core.api.training_run import run_training
from pybackend.core.data.mnist_file import Digits, Mnist, find_mnist
from pybackend.core.job.call_options import PathOrUri
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.storage_options import Recovery
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers import count_workers, launcher_for
from pybackend.core.quiet import import_tensorflow

_DOWNLOAD_SECONDS = 15.0


def mnist(path: str | Path | None = None, *, limit: int | None = None) -> Mnist:
    """Load MNIST from ``path``, TFDIST_MNIST, Keras's cache, Keras's download or a built-in subset.

    Parameters
    ----------
    path
        An ``mnist.npz``. The file must exist, as must the file that TFDIST_MNIST names, if it is
        set.
    limit
        Maximum number of training images and of test images; the first ones are used.

    Raises
    ------
    InputError
        A named file is missing or is not an ``mnist.npz``.
    """
    return find_mnist(path, limit, _download)


def digit_model() -> Any:
    """Return a small, compiled convolutional network for 28 x 28 x 1 images in [0, 1].

    Conv2D (32, 3 x 3, relu), max pooling, Dense (64, relu), Dense (10 logits); Adam.
    """
    import_tensorflow()
    import keras

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


@explain_arguments
def train_mnist(
    spark: Target = "local",
    *,
    workers: int | None = None,
    epochs: int = 3,
    batch_size: int = 64,
    path: str | Path | None = None,
    limit: int | None = None,
    callbacks: Sequence[Any] | None = None,
    seed: int | None = 1,
    resources: Resources | None = None,
    recovery: Recovery | PathOrUri | None = None,
    verbose: int = 1,
) -> TrainResult:
    """Train a small network on MNIST and evaluate it on the test images.

    The network is `digit_model`.

    Parameters
    ----------
    spark, epochs, batch_size, callbacks, seed, resources, recovery, verbose
        As in `barrier_train`.
    workers
        Number of workers. None (default): 3, or the number of processes that join.
    path, limit
        As in `mnist`.

    Returns
    -------
    TrainResult
        ``metrics`` holds ``test_loss`` and ``test_accuracy``.
    """
    launcher = launcher_for(spark)
    options: Any = {"epochs": epochs, "batch_size": batch_size, "callbacks": callbacks}
    options |= {"seed": seed, "resources": resources, "recovery": recovery, "verbose": verbose}
    options["workers"] = count_workers(launcher, workers, default=3)
    call = TrainingCall(spark=launcher, model=digit_model, data=None, options=options)
    # Check the arguments before the images are searched, or even downloaded.
    call.make_job(TrainingJob)
    split_trackers(callbacks)
    digits = _find_digits(path, limit, verbose)

    def evaluate(result: TrainResult) -> TrainResult:
        values = result.model.evaluate(
            _scaled(digits.x_test), digits.y_test, batch_size=256, verbose=0, return_dict=True
        )
        metrics = {f"test_{name}": float(value) for name, value in values.items()}
        say(f"test accuracy {metrics['test_accuracy']:.4f} on {len(digits.x_test)} images", verbose)
        return replace(result, metrics=metrics)

    data = (_scaled(digits.x_train), digits.y_train)
    return run_training(replace(call, data=data), evaluate)


def _find_digits(path: str | Path | None, limit: int | None, verbose: int) -> Mnist:
    """Return MNIST as `mnist` does, and show if Keras is needed for it, or if it is a subset."""

    def download() -> Digits | None:
        say("Loading Keras to read or download MNIST ...", verbose)
        return _download()

    digits = find_mnist(path, limit, download)
    if digits.subset:
        say(
            "MNIST is not on this machine and cannot be downloaded: using "
            f"the {len(digits.x_train)} training images that come with tfdist. To use all 60,000, "
            "set TFDIST_MNIST to the path of an mnist.npz.",
            verbose,
        )
    return digits


def _scaled(images: Any) -> Any:
    return images[..., None].astype("float32") / 255


def _download() -> Digits | None:
    """Download with Keras, which checks the file's hash and caches it; None without a network."""
    try:
        import_tensorflow()
        # Keras announces the download and draws its progress, even without a network.
        with _limited_sockets(_DOWNLOAD_SECONDS), contextlib.redirect_stdout(io.StringIO()):
            import keras

            train, test = keras.datasets.mnist.load_data()
    except Exception:  # Keras raises various errors if there is no network, or for a wrong hash
        return None
    return train, test


@contextlib.contextmanager
def _limited_sockets(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
