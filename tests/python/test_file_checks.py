"""HDF5 files that would read other files, fill the memory, or never end: all are rejected."""

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

from pybackend.core.errors import SerializationError
from pybackend.core.model import file_checks
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes, sha256_of

STATE = "tfdist_optimizer_state"
# The momentum of the kernel, from the optimizer below.
MOMENTUM = f"{STATE}/2"
SECRET = np.arange(40, dtype="float32") + 1000


@pytest.fixture(scope="module")
def data() -> bytes:
    """Return a model file with its optimizer's state."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model_to_bytes(model, include_optimizer=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that a model file must not read."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET.tobytes())
    return path


def alter(data: bytes, change: Callable[[Any], object], folder: Path) -> bytes:
    """Return a model file that h5py changed."""
    path = folder / "altered.h5"
    path.write_bytes(data)
    with h5py.File(path, "r+") as file:
        change(file)
    return path.read_bytes()


def kernel_of(file: Any) -> str:
    """Return the name of the model's own kernel in a file."""
    names: list[str] = []
    file["model_weights"].visit(names.append)
    return next(f"model_weights/{name}" for name in names if name.endswith("kernel"))


def replace_with_external(file: Any, name: str, secret: Path) -> None:
    """Make HDF5 read the values of a data set from another file."""
    shape = file[name].shape
    del file[name]
    file.create_dataset(name, shape, "float32", external=[(str(secret), 0, SECRET.nbytes)])
    assert np.array_equal(file[name][()].reshape(-1), SECRET)  # this is how it would be read


@pytest.mark.parametrize("place", ["state", "weights"])
def test_values_in_another_file_are_not_read(
    data: bytes, secret: Path, tmp_path: Path, place: str
) -> None:
    def change(file: Any) -> None:
        replace_with_external(file, MOMENTUM if place == "state" else kernel_of(file), secret)

    hostile = alter(data, change, tmp_path)
    for digest in (None, sha256_of(hostile)):
        with pytest.raises(SerializationError, match="stores its values in another file"):
            model_from_bytes(hostile, sha256=digest)


def link_outside(file: Any, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["secret"] = SECRET.reshape(8, 5)
    del file[MOMENTUM]
    file[MOMENTUM] = h5py.ExternalLink(str(folder / "other.h5"), "/secret")


def link_inside(file: Any, folder: Path) -> None:
    del file[MOMENTUM]
    file[MOMENTUM] = h5py.SoftLink("/" + kernel_of(file))


def link_group(file: Any, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["state"] = SECRET
    del file[STATE]
    file[STATE] = h5py.ExternalLink(str(folder / "other.h5"), "/")


def link_optimizer_of_keras(file: Any, folder: Path) -> None:
    file["optimizer_weights"] = h5py.SoftLink("/model_weights")


@pytest.mark.parametrize("change", [link_outside, link_inside, link_group, link_optimizer_of_keras])
def test_links_are_not_followed(data: bytes, tmp_path: Path, change: Any) -> None:
    hostile = alter(data, lambda file: change(file, tmp_path), tmp_path)
    with pytest.raises(SerializationError, match="is a link to another location"):
        model_from_bytes(hostile)


def test_virtual_data_sets_are_not_read(data: bytes, tmp_path: Path) -> None:
    def change(file: Any) -> None:
        with h5py.File(tmp_path / "other.h5", "w") as other:
            other["secret"] = SECRET.reshape(8, 5)
        layout = h5py.VirtualLayout((8, 5), "float32")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", (8, 5))
        del file[MOMENTUM]
        file.create_virtual_dataset(MOMENTUM, layout)

    with pytest.raises(SerializationError, match="takes its values from other data sets"):
        model_from_bytes(alter(data, change, tmp_path))


def claim(file: Any, name: str, **options: Any) -> None:
    """Claim 2**30 values, which the file does not contain."""
    del file[name]
    file.create_dataset(name, (2**30,), "float32", chunks=(2**20,), **options)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "fillvalue": 1.0}])
@pytest.mark.parametrize("place", ["state", "weights"])
def test_more_values_than_the_file_can_hold_are_not_read(
    data: bytes, tmp_path: Path, place: str, options: Any
) -> None:
    def change(file: Any) -> None:
        claim(file, MOMENTUM if place == "state" else kernel_of(file), **options)

    with pytest.raises(
        SerializationError, match=r"claims to contain 4,294,967,\d+ bytes of values"
    ):
        model_from_bytes(alter(data, change, tmp_path))


def test_many_small_claims_add_up(data: bytes, tmp_path: Path) -> None:
    def change(file: Any) -> None:
        for number in range(200):
            file.create_dataset(f"more/{number}", (2**18,), "float32", chunks=(2**18,))

    with pytest.raises(SerializationError, match="claims to contain 209,"):
        model_from_bytes(alter(data, change, tmp_path))


def test_a_claim_is_rejected_before_it_takes_memory(data: bytes, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for number, options in enumerate([{}, {"compression": "gzip", "fillvalue": 1.0}]):
        altered = alter(data, lambda file, o=options: claim(file, MOMENTUM, **o), tmp_path)
        assert len(altered) < 40_000
        (hostile / f"{number}.h5").write_bytes(altered)
    assert check_in_little_memory(hostile) == 2


def test_values_of_variable_length_are_not_read(data: bytes, tmp_path: Path) -> None:
    def change(file: Any) -> None:
        del file[MOMENTUM]
        file.create_dataset(MOMENTUM, (40,), h5py.vlen_dtype("float32"))

    with pytest.raises(SerializationError, match="has values of variable length"):
        model_from_bytes(alter(data, change, tmp_path))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((40,), "float32"), ((5, 8), "float32"), ((8, 5), "float64"), ((8, 5), "int32"), ((), "S9")],
)
def test_state_of_another_shape_or_type_is_rejected(
    data: bytes, tmp_path: Path, shape: Any, dtype: str
) -> None:
    def change(file: Any) -> None:
        del file[MOMENTUM]
        file.create_dataset(MOMENTUM, shape, dtype)

    with pytest.raises(SerializationError, match=r"expected float32 of shape \(8, 5\)"):
        model_from_bytes(alter(data, change, tmp_path))


def drop_one(file: Any) -> None:
    del file[MOMENTUM]


def add_one(file: Any) -> None:
    file[f"{STATE}/9"] = SECRET


def rename_one(file: Any) -> None:
    file.move(MOMENTUM, f"{STATE}/momentum")


def make_group(file: Any) -> None:
    del file[MOMENTUM]
    file.create_group(MOMENTUM)


def make_values(file: Any) -> None:
    del file[STATE]
    file[STATE] = SECRET


@pytest.mark.parametrize("change", [drop_one, add_one, rename_one, make_group, make_values])
def test_state_of_another_optimizer_is_rejected(data: bytes, tmp_path: Path, change: Any) -> None:
    with pytest.raises(
        SerializationError, match="not belong to its optimizer, SGD with 4 variables"
    ):
        model_from_bytes(alter(data, change, tmp_path))


def test_files_may_be_compressed(data: bytes, tmp_path: Path) -> None:
    def change(file: Any) -> None:
        for name in (MOMENTUM, kernel_of(file)):
            values = file[name][()]
            del file[name]
            file.create_dataset(name, data=values, compression="gzip", shuffle=True)

    again, model = model_from_bytes(alter(data, change, tmp_path)), model_from_bytes(data)
    for one, other in zip(again.get_weights(), model.get_weights(), strict=True):
        assert np.array_equal(one, other)


def put_in_one_place(content: bytes, size: int, count: int) -> bytes:
    """Write a file in which all texts of an attribute are the first one, with this size."""
    altered = bytearray(content)
    # HDF5's 16 bytes of a text's length and address: those of the first for all.
    begin = altered.index(size.to_bytes(4, "little"))
    altered[begin : begin + 16 * count] = altered[begin : begin + 16] * count
    return bytes(altered)


def test_texts_that_lie_in_one_place_are_not_read(data: bytes, tmp_path: Path) -> None:
    size = 1_000_003

    def change(file: Any) -> None:
        file["model_weights"].attrs["layer_names"] = [b"a" * size, *[b"b"] * 3000]

    altered = put_in_one_place(alter(data, change, tmp_path), size, 3001)
    with pytest.raises(SerializationError, match="would take far more memory than the file has"):
        model_from_bytes(altered)


def test_objects_behind_one_without_attributes_are_looked_at(data: bytes, tmp_path: Path) -> None:
    size = 1_000_003

    def change(file: Any) -> None:
        file.create_group("a")  # before all others, and without attributes
        file.create_group("z").attrs["names"] = [b"a" * size, *[b"b"] * 3000]

    altered = put_in_one_place(alter(data, change, tmp_path), size, 3001)
    with pytest.raises(SerializationError, match="would take far more memory than the file has"):
        model_from_bytes(altered)


def nest(file: Any, depth: int) -> None:
    group = file.create_group("deep").id
    for _ in range(depth):
        group = h5py.h5g.create(group, b"g")


def name_it_twice(file: Any, depth: int) -> None:
    """Write a group that contains itself through hard links, on which HDF5 would loop forever."""
    group = file.create_group("round")
    for name in range(depth):
        group[str(name)] = group


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("depth", [200, 12_000])
def test_groups_nested_by_the_thousand_are_rejected(
    data: bytes, tmp_path: Path, depth: int, digest: bool
) -> None:
    hostile = alter(data, lambda file: nest(file, depth), tmp_path)
    with pytest.raises(SerializationError, match="'/' has groups nested more than 100 deep"):
        model_from_bytes(hostile, sha256=sha256_of(hostile) if digest else None)


def test_an_object_of_many_names_is_looked_at_once(data: bytes, tmp_path: Path) -> None:
    again = model_from_bytes(alter(data, lambda file: name_it_twice(file, 1000), tmp_path))
    assert again.count_params() == model_from_bytes(data).count_params()


def test_a_file_in_which_hdf5_loops_forever_is_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(file_checks, "_PROBE_SECONDS", 3.0)
    with pytest.raises(SerializationError, match="did not finish within 3 s"):
        model_from_bytes(Path(__file__).with_name("files").joinpath("endless.h5").read_bytes())


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


def archive_kernel_of(file: Any) -> str:
    """Return the name of the kernel in an archive's file of weights."""
    names: list[str] = []
    file.visit(names.append)
    return next(name for name in names if name.endswith("vars/0"))


def claim_terabytes(file: Any) -> None:
    name = archive_kernel_of(file)
    del file[name]
    file.create_dataset(name, (2**38,), "float32", chunks=(2**20,))


def link(file: Any) -> None:
    name = archive_kernel_of(file)
    del file[name]
    file[name] = h5py.SoftLink("/")


def store_elsewhere(file: Any) -> None:
    name = archive_kernel_of(file)
    del file[name]
    file.create_dataset(name, (8, 5), "float32", external=[("/dev/zero", 0, 160)])


@pytest.fixture(scope="module")
def hostile(members: Members) -> dict[str, tuple[bytes, str]]:
    """Archives with the expected messages."""
    good = pack(members)
    # So large that the total allows for more metadata.
    large = {**members, "assets/a.txt": np.random.default_rng(0).bytes(50_000)}
    too_much = r"claims to contain [\d,]+ bytes"
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
        "a link": (change_weights(members, link), "is a link to another location"),
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
