"""Files by path and by URI; fsspec's memory file system stands for remote ones."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from conftest import build_dense

import pybackend
from pybackend.core.data.files import (
    check_writable,
    find_files,
    get_size,
    open_file,
    open_folder,
    read_file,
    write_whole,
)
from pybackend.core.errors import InputError


def fill(root: str) -> None:
    names = ["b.parquet", "a.parquet", "_SUCCESS", ".a.parquet.crc", "k=1/c.parquet", "_tmp/d"]
    for name in names:
        with open_file(f"{root}/{name}", "wb") as file:
            file.write(name.encode())


@pytest.mark.parametrize("kind", ["path", "file://", "memory://"])
def test_a_folder_gives_its_data_files_in_order(kind: str, tmp_path: Path) -> None:
    for folder in ("k=1", "_tmp"):
        (tmp_path / folder).mkdir()
    root = {
        "path": str(tmp_path),
        "file://": f"file://{tmp_path}",
        "memory://": "memory://test_files/data",
    }[kind]
    fill(root)
    files = find_files(root)
    assert [file.rpartition("/")[2] for file in files] == ["a.parquet", "b.parquet", "c.parquet"]
    assert [read_file(file) for file in files] == [b"a.parquet", b"b.parquet", b"k=1/c.parquet"]
    assert get_size(files[0]) == 9
    assert find_files(files[1]) == [files[1]]
    assert find_files((files[2], files[0])) == [files[2], files[0]]
    assert [read_file(file) for file in find_files(f"{root}/[ab].par*")] == [
        b"a.parquet",
        b"b.parquet",
    ]
    assert [read_file(file) for file in find_files(f"{root}/*")] == list(map(read_file, files))
    with pytest.raises(InputError, match="no file or folder matches"):
        find_files(f"{root}/*.csv")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("/no/such/place", "`data`: there is no file or folder '/no/such/place'"),
        ("memory://nowhere/at/all", "`data`: there is no file or folder 'memory://nowhere/at/all'"),
        ("nosuchscheme://bucket/x", "`data`: 'nosuchscheme://bucket/x' cannot be opened"),
    ],
)
def test_what_is_not_there_is_told(uri: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_files(uri)
    assert message in str(caught.value)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(InputError, match="has no files"):
        find_files(str(tmp_path))


def test_whether_a_place_can_be_written_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "new" / "model.h5"), "path")
    assert list(tmp_path.iterdir()) == []
    check_writable("memory://test_files/model.h5", "path")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"^`path`: .*h5' cannot be written: Not a directory$"):
        check_writable(str(tmp_path / "file" / "model.h5"), "path")


@pytest.mark.parametrize("argument", ["recovery", "model_options"])
def test_a_folder_of_this_machine_that_cannot_be_made_is_told_at_once(
    argument: str, tmp_path: Path, rows: Any
) -> None:
    (tmp_path / "file").touch()
    for name, is_good in (("new/model.h5", True), ("file/model.h5", False)):
        given: Any = str(tmp_path / name)
        if argument == "model_options":
            given = pybackend.ModelOptions(given)
        with nullcontext() if is_good else pytest.raises(InputError) as caught:
            pybackend.plan(None, build_dense(), rows, workers=2, **{argument: given})
    assert f"`{argument}`: '{tmp_path}/file/model.h5" in str(caught.value)
    assert f"'{tmp_path}/file' is not a folder" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_that_others_own_is_told() -> None:
    program = (
        "import os; from pybackend.core.data.files import check_folder\n"
        "os.geteuid() or os.setuid(65534)\n"
        "check_folder('/usr/new/model.h5', 'model_uri')"
    )
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert (
        "`model_uri`: '/usr/new/model.h5' cannot be written: you do not have permission to write to"
        in told
    )


@pytest.mark.parametrize("root", ["path", "memory://test_files/whole"])
def test_a_file_is_written_as_a_whole_in_place_of_an_older_one(root: str, tmp_path: Path) -> None:
    uri = (str(tmp_path / "new") if root == "path" else root) + "/model.h5"
    for content in (b"old", b"newer"):
        write_whole(uri, content)
        assert read_file(uri) == content
    assert [file.rpartition("/")[2] for file in find_files(uri.rpartition("/")[0])] == ["model.h5"]


def test_a_remote_file_can_be_removed() -> None:
    with open_file("memory://test_files/gone", "wb") as file:
        file.write(b"x")
    open_folder("memory://test_files").remove("gone")
    with pytest.raises(InputError):
        find_files("memory://test_files/gone")


@pytest.mark.parametrize("root", ["path", "memory://test_files/folder"])
def test_a_folder_of_any_file_system_works_alike(root: str, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "new") if root == "path" else root)
    assert (folder.names(), folder.is_file(), folder.read("a"), folder.size("a")) == (
        *(None, False, None, None),
    )
    assert (folder.make(), folder.make()) == (True, False)
    folder.write("a", b"old")
    folder.write("a", b"newer")
    folder.write("inner/b", b"")
    assert folder.names() == ["a", "inner"]
    folder.move("a", "c")
    assert (folder.read("a"), folder.read("c"), folder.size("c")) == (None, b"newer", 5)
    assert open_folder(folder.path("c")).is_file()
    assert open_folder(folder.path("c")).names() is None
    for name in ("a", "inner"):
        folder.remove(name)
    folder.remove_itself()
    assert folder.names() == ["c"]
    folder.remove("c")
    folder.remove_itself()
    assert not folder.names()


def test_local_files_need_no_fsspec(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from pybackend.core.data.files import check_writable, find_files, open_folder, read_file\n"
        "folder = open_folder(sys.argv[1])\n"
        "check_writable(folder.path('a'), 'path')\n"
        "folder.write('a', b'x')\n"
        "print(folder.names(), list(map(read_file, find_files(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "new")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == "['a'] [b'x']\n"
