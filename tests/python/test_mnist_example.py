"""The search for MNIST, its order, and the errors for a wrong file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybackend.core.data import mnist_file as module
from pybackend.core.errors import InputError
from pybackend.mnist_example import mnist

SUBSET = Path(module.__file__).with_name("mnist_subset.npz")


def arrays(rows: int = 30, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    return {
        "x_train": rng.integers(0, 256, (rows, 28, 28), "uint8"),
        "y_train": rng.integers(0, 10, rows, "uint8"),
        "x_test": rng.integers(0, 256, (rows // 3, 28, 28), "uint8"),
        "y_test": rng.integers(0, 10, rows // 3, "uint8"),
        **changes,
    }


def write(path: Path, rows: int = 30, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays(rows, **changes))
    return path


@pytest.fixture
def nothing_set(monkeypatch: Any, tmp_path: Path) -> Any:
    """Unset TFDIST_MNIST, and use an empty cache."""
    monkeypatch.delenv("TFDIST_MNIST", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return monkeypatch


def check_types(found: Any) -> None:
    for images, labels in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        assert images.dtype == "uint8"
        assert images.shape == (len(labels), 28, 28)
        assert labels.dtype == "int64"
        assert set(np.unique(labels)) <= set(range(10))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_read(nothing_set: Any, tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "mine.npz")
    found = mnist(kind(path))
    check_types(found)
    assert (found.source, found.subset) == (str(path), False)
    np.testing.assert_array_equal(found.x_train, arrays()["x_train"])
    np.testing.assert_array_equal(found.y_test, arrays()["y_test"])


def test_the_order_is_path_then_variable_then_cache(nothing_set: Any, tmp_path: Path) -> None:
    cached = write(tmp_path / "keras" / "datasets" / "mnist.npz", rows=3)
    assert (mnist().source, mnist().subset) == (str(cached), False)
    named = write(tmp_path / "named.npz", rows=6)
    nothing_set.setenv("TFDIST_MNIST", str(named))
    assert mnist().source == str(named)
    given = write(tmp_path / "given.npz", rows=9)
    assert mnist(given).source == str(given)
    nothing_set.setenv("TFDIST_MNIST", "")
    assert mnist().source == str(cached)


@pytest.mark.parametrize("limit", [1, 7, 10, 20, 1000, 7.0])
def test_a_limit_takes_the_first_images(nothing_set: Any, tmp_path: Path, limit: Any) -> None:
    path = write(tmp_path / "mine.npz")
    found, whole = mnist(path, limit=limit), mnist(path)
    assert len(found.x_train) == min(30, limit)
    assert len(found.x_test) == min(10, limit)
    np.testing.assert_array_equal(found.x_train, whole.x_train[: int(limit)])
    np.testing.assert_array_equal(found.y_test, whole.y_test[: int(limit)])


@pytest.mark.parametrize("limit", [0, -1, 2.5, "all", True])
def test_a_wrong_limit_is_named(limit: Any) -> None:
    with pytest.raises(InputError, match=r"^`limit` must be "):
        mnist(limit=limit)


@pytest.mark.parametrize("path", [5, b"mnist.npz", ["mnist.npz"]])
def test_a_path_of_another_type_is_named(path: Any) -> None:
    with pytest.raises(InputError, match=r"^`path` must name an mnist\.npz, not "):
        mnist(path)


@pytest.mark.parametrize("name", ["missing.npz", ""])
def test_a_missing_file_is_named(nothing_set: Any, tmp_path: Path, name: str) -> None:
    wrong = str(tmp_path / name)
    with pytest.raises(InputError, match=r"^`path` is '.*', but there is no such file"):
        mnist(wrong)
    nothing_set.setenv("TFDIST_MNIST", wrong)
    with pytest.raises(InputError, match=r"^TFDIST_MNIST is '.*', but there is no such file"):
        mnist()


def damaged(path: Path) -> Path:
    np.savez_compressed(path, **arrays())
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100] = bytes(100)
    path.write_bytes(bytes(content))
    return path


def truncated(path: Path) -> Path:
    content = write(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def text(path: Path) -> Path:
    path.write_text("x_train,y_train\n1,2\n")
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


def one_array(path: Path) -> Path:
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 28, 28), "uint8"))
    return path


def other_names(path: Path) -> Path:
    np.savez(path, x=np.zeros((3, 28, 28), "uint8"))
    return path


def objects(path: Path) -> Path:
    return write(path, y_train=np.array([None] * 30))


def flat(path: Path) -> Path:
    return write(path, x_train=np.zeros((30, 784), "uint8"))


def uneven(path: Path) -> Path:
    return write(path, y_test=np.zeros(7, "uint8"))


@pytest.mark.parametrize(
    "make",
    [damaged, truncated, text, empty, one_array, other_names, objects, flat, uneven],
    ids=lambda make: make.__name__,
)
def test_a_file_that_is_no_mnist_is_told_so(tmp_path: Path, make: Any) -> None:
    with pytest.raises(InputError, match=r"is not an mnist\.npz .*expected the arrays x_train"):
        mnist(make(tmp_path / "wrong.npz"))


def test_the_built_in_subset_has_the_same_form() -> None:
    found = mnist(SUBSET)
    check_types(found)
    assert found.subset
    assert len(found.x_train) >= 3000
    assert len(found.x_test) >= 1000
    for labels in (found.y_train, found.y_test):
        assert np.bincount(labels, minlength=10).min() >= len(labels) // 20
    assert found.x_train.max() == 255


@pytest.mark.full
def test_without_file_and_network_the_subset_is_taken(tmp_path: Path) -> None:
    # A proxy without a server blocks the network, wherever the tests run.
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{unserved.getsockname()[1]}"
        environment = {
            name: value for name, value in os.environ.items() if name != "TFDIST_MNIST"
        } | {
            "KERAS_HOME": str(tmp_path),
            "https_proxy": proxy,
            "HTTPS_PROXY": proxy,
            "no_proxy": "",
        }
        broken = tmp_path / "datasets" / "mnist.npz"
        truncated(write(broken))
        shown = subprocess.run(
            [
                sys.executable,
                "-c",
                "import pybackend; found = pybackend.mnist(limit=5);"
                "print(found.subset, found.source, len(found.x_train))",
            ],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    assert shown.stdout.splitlines()[-1] == f"True {SUBSET} 5"


def test_the_real_data_where_they_are_named() -> None:
    named = os.environ.get("TFDIST_MNIST")
    if named is None:  # then the subset replaces them
        named = str(SUBSET)
    found = mnist(named)
    check_types(found)
    if not found.subset:
        assert (len(found.x_train), len(found.x_test)) == (60_000, 10_000)
        assert found.y_train[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
