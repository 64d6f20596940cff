"""``.keras`` archives that would fill the memory or read other files: all are rejected."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from little_memory import check_in_little_memory

from pybackend.errors import SerializationError
from pybackend.model.serialization import model_from_bytes, model_to_bytes, sha256_of

WEIGHTS = "model.weights.h5"
Members = dict[str, bytes]
ZEROS = bytes(40 << 20)


@pytest.fixture(scope="module")
def members() -> Members:
    """Members of a model's archive."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    with zipfile.ZipFile(io.BytesIO(model_to_bytes(model, format="keras"))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(members: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Write an archive."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return content.getvalue()


def change_weights(members: Members, change: Callable[[Any], None]) -> bytes:
    """Write an archive whose weights h5py changed."""
    weights = io.BytesIO(members[WEIGHTS])
    with h5py.File(weights, "r+") as file:
        change(file)
    return pack({**members, WEIGHTS: weights.getvalue()})


def claim_size(data: bytes, size: int) -> bytes:
    """Write an archive whose directory has a wrong size for its first member."""
    entry = data.index(b"PK\x01\x02")
    return data[: entry + 24] + size.to_bytes(4, "little") + data[entry + 28 :]


def repeat_last_name(members: Members) -> bytes:
    """Write an archive that names one member several times."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `zipfile` warns, too
        for name in [*members, WEIGHTS, WEIGHTS]:
            archive.writestr(name, members[name])
    return content.getvalue()


def kernel_of(file: Any) -> str:
    names: list[str] = []
    file.visit(names.append)
    return next(name for name in names if name.endswith("vars/0"))


def claim_terabytes(file: Any) -> None:
    name = kernel_of(file)
    del file[name]
    file.create_dataset(name, (2**38,), "float32", chunks=(2**20,))


def link(file: Any) -> None:
    name = kernel_of(file)
    del file[name]
    file[name] = h5py.SoftLink("/")


def store_elsewhere(file: Any) -> None:
    name = kernel_of(file)
    del file[name]
    file.create_dataset(name, (8, 5), "float32", external=[("/dev/zero", 0, 160)])


@pytest.fixture(scope="module")
def hostile(members: Members) -> dict[str, tuple[bytes, str]]:
    """Archives with the expected messages."""
    good = pack(members)
    # So large that the total allows for more metadata.
    large = {**members, "assets/a.txt": np.random.default_rng(0).bytes(50_000)}
    too_much = r"claims to hold [\d,]+ bytes"
    return {
        "a large description": (pack({**members, "config.json": ZEROS}), too_much),
        "large metadata": (pack({**large, "metadata.json": ZEROS[: 2 << 20]}), "2,097,152 bytes"),
        "a large asset": (pack({**members, "assets/a.txt": ZEROS}), too_much),
        "large weights": (pack({**members, WEIGHTS: members[WEIGHTS] + ZEROS}), too_much),
        "a claim": (claim_size(good, 2**31), too_much),
        "too small a claim": (claim_size(good, 3), "damaged at"),
        "another method": (pack(members, zipfile.ZIP_LZMA), "compressed by method 14"),
        "a name several times": (repeat_last_name(members), "damaged at"),
        "weights of numpy": (
            pack({("model.weights.npz" if n == WEIGHTS else n): m for n, m in members.items()}),
            f"damaged at '{WEIGHTS}'",
        ),
        "terabytes of weights": (change_weights(members, claim_terabytes), too_much),
        "a link": (change_weights(members, link), "is a link to another place"),
        "external weights": (change_weights(members, store_elsewhere), "in another file"),
        "deep metadata": (pack({**members, "metadata.json": b"[" * 10**5}), "corrupted"),
    }


def test_hostile_archives_are_rejected(hostile: dict[str, tuple[bytes, str]]) -> None:
    for data, expected in hostile.values():
        for digest in (None, sha256_of(data)):
            with pytest.raises(SerializationError, match=expected):
                model_from_bytes(data, sha256=digest)


def test_nothing_is_unpacked_before_it_is_rejected(
    hostile: dict[str, tuple[bytes, str]], tmp_path: Path
) -> None:
    for number, (data, _) in enumerate(hostile.values()):
        (tmp_path / f"{number}.keras").write_bytes(data)
    assert check_in_little_memory(tmp_path) == len(hostile)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_may_be_packed_again(members: Members, method: int) -> None:
    assert model_from_bytes(pack(members, method)).compiled
