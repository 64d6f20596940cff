"""Executors and hosts that have nothing installed: the call sends a Python environment."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from conftest import build_dense, largest_difference, wait_for
from pyspark import SparkFiles
from pythons import python_with
from standalone import Cluster, standalone_cluster
from threads import Threads

import pybackend
from pybackend import (
    ClusterError,
    InputError,
    Resources,
    barrier_predict,
    barrier_run,
    barrier_train,
)
from pybackend.core.job.job import EvaluationJob, FunctionJob, Job
from pybackend.core.job.messages import Note
from pybackend.core.launchers.environment import installing
from pybackend.core.launchers.environment.archive import (
    PackedEnvironment,
    make_manifest,
    pack_environment_of,
    pack_for,
    read_packed,
)
from pybackend.core.launchers.environment.contents import (
    describe_environment,
    find_python,
    list_entries,
)
from pybackend.core.launchers.environment.installing import (
    ArchiveServer,
    Installation,
    Interpreter,
    UnreachedError,
    check_host,
    install_command,
    install_here,
)
from pybackend.core.launchers.remote.bundle import read_blocks
from pybackend.core.launchers.slurm.launcher import _install
from pybackend.core.launchers.spark import stage
from pybackend.core.launchers.spark.stage import _link

SMALL = ("cloudpickle", "numpy")
TENSORFLOW = ("tensorflow-cpu", "keras", "h5py", "cloudpickle")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment with few packages, and a script."""
    python = python_with(tmp_path_factory.mktemp("small"), *SMALL)
    add_script(python)
    return python.parents[1]


def add_script(python: Path) -> None:
    script = python.parent / "hello"
    script.write_text(f"#!{python}\nimport sys\nprint(sys.prefix, *sys.argv[1:])\n")
    script.chmod(0o755)


@pytest.fixture(scope="module")
def packed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedEnvironment:
    return pack_environment_of(str(small), tmp_path_factory.mktemp("packed") / "env.tar.gz")


@pytest.fixture(scope="module")
def unpacked(packed: PackedEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return install_here(packed, read_blocks(packed.path), str(tmp_path_factory.mktemp("host")))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PackedEnvironment:
    """Return an environment with one module, whose Python is this one."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "python").symlink_to(sys.executable)
    (folder / "module.py").write_bytes(os.urandom(2_000_000))
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(folder / "python", "bin/python")
        archive.add(folder / "module.py", "lib/a module.py")
    return read_packed(str(folder / "env.tar.gz"))


def run(interpreter: Interpreter, program: str) -> str:
    """Run a program as a worker is run, with nothing of this Python."""
    return subprocess.run(
        [interpreter.python, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=interpreter.variables({"PATH": "/usr/bin:/bin"}),
    ).stdout.strip()


def test_an_unpacked_environment_has_its_own_interpreter_library_and_packages(
    unpacked: Interpreter, packed: PackedEnvironment
) -> None:
    show = "import sys, ssl, json, cloudpickle as c; print(json.__file__, c.__file__, sys.prefix)"
    library, package, prefix = run(unpacked, show).split()
    folder = str(unpacked.folder)
    assert prefix == folder
    assert library.startswith(folder)
    assert package.startswith(folder)
    assert run(unpacked, "import cloudpickle as c; print(c.__version__)") == cloudpickle.__version__
    loaded = run(unpacked, "print(open('/proc/self/maps').read())")
    base = sys.base_prefix
    assert base == "/usr" or f" {base}/" not in loaded
    assert packed.manifest is not None
    assert packed.manifest.packages["cloudpickle"] == cloudpickle.__version__


def test_modules_are_loaded_without_being_compiled(unpacked: Interpreter) -> None:
    compiled = run(unpacked, "import json; print(json.__cached__)")
    before = os.stat(compiled).st_mtime_ns
    assert before < 10**9  # as packed
    run(unpacked, "import json")
    assert os.stat(compiled).st_mtime_ns == before


def test_an_unpacked_environment_is_private_and_found_again(
    packed: PackedEnvironment, unpacked: Interpreter
) -> None:
    root = unpacked.folder.parent
    assert os.stat(unpacked.folder).st_mode & 0o777 == 0o700
    inode = os.stat(unpacked.folder).st_ino
    assert install_here(packed, read_blocks("/nonexistent"), str(root)) == unpacked
    assert os.stat(unpacked.folder).st_ino == inode
    assert len(list(root.iterdir())) == 2  # the environment, and the link that names it


def test_equal_environments_have_equal_digests_and_others_do_not(
    packed: PackedEnvironment, small: Path, tmp_path: Path
) -> None:
    python = python_with(tmp_path, *SMALL)
    add_script(python)
    assert digest_of(python) == packed.digest
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "extra.py").write_text("VALUE = 1\n")
    assert digest_of(python) != packed.digest


def digest_of(python: Path) -> str:
    facts = describe_environment(str(python))
    return make_manifest(facts, list_entries(facts)).digest


def test_scripts_start_the_python_in_their_folder(unpacked: Interpreter) -> None:
    shown = subprocess.run(
        [unpacked.folder / "bin/hello", "a b"],
        capture_output=True,
        text=True,
        check=True,
        env=unpacked.variables({"PATH": "/usr/bin:/bin"}),
    )
    assert shown.stdout.split(maxsplit=1) == [str(unpacked.folder), "a b\n"]


def test_a_broken_archive_leaves_nothing(packed: PackedEnvironment, tmp_path: Path) -> None:
    half = tmp_path / "half.tar.gz"
    half.write_bytes(Path(packed.path).read_bytes()[: packed.size // 2])
    root = tmp_path / "host"
    with pytest.raises(ClusterError, match=r"cannot be unpacked on .*host.*: Unexpected EOF in"):
        install_here(packed, read_blocks(str(half)), str(root))
    assert list(root.iterdir()) == []


def test_a_full_disk_of_a_host_is_named(packed: PackedEnvironment, small_disk: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot be unpacked on .*: No space left on device$"):
        install_here(packed, read_blocks(packed.path), str(small_disk))
    assert list(small_disk.iterdir()) == []


PACK = """
import sys
from pathlib import Path
from pybackend.core.launchers.environment.archive import pack_environment_of
pack_environment_of(sys.argv[1], Path(sys.argv[2], "env.tar.gz"))
"""


def test_a_process_that_is_killed_as_it_packs_leaves_nothing(small: Path, tmp_path: Path) -> None:
    paths = {**os.environ, "PYTHONPATH": str(Path(pybackend.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", PACK, small, tmp_path], env=paths) as packing:
        wait_for(lambda: list(tmp_path.iterdir()))
        packing.kill()
    wait_for(lambda: not list(tmp_path.iterdir()))
    assert packing.returncode == -signal.SIGKILL


def test_an_archive_that_ends_between_two_files_leaves_nothing(
    packed: PackedEnvironment, tmp_path: Path
) -> None:
    content = gzip.decompress(Path(packed.path).read_bytes())
    with tarfile.open(packed.path) as archive:
        middle = next(entry for entry in archive if entry.name.startswith("lib/python"))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(gzip.compress(content[: middle.offset], 1))
    root = tmp_path / "host"
    with pytest.raises(ClusterError, match=r"cannot be unpacked on .*bin/python"):
        install_here(packed, read_blocks(str(cut)), str(root))
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("damage", ["deleted", "shortened", "copied"])
def test_an_environment_that_lost_files_is_unpacked_again(
    tiny: PackedEnvironment, tmp_path: Path, damage: str
) -> None:
    root, name = tmp_path / "host", tmp_path / "host" / tiny.name
    install_here(tiny, read_blocks(tiny.path), str(root))
    if damage == "copied":  # with the content of links, as some programs do
        shutil.copytree(name.resolve(), tmp_path / "copy", symlinks=True)
        name.unlink()
        (tmp_path / "copy").rename(name)
    lost = name / "lib" / "a module.py"
    content = lost.read_bytes()
    if damage == "shortened":
        os.truncate(lost, 100)
    else:
        lost.unlink()
    for _ in range(2):
        assert install_here(tiny, read_blocks(tiny.path), str(root)).folder == name
        assert lost.read_bytes() == content
        assert name.is_symlink()
        # One was made, and the damaged one may still be in use.
        assert len(list(root.iterdir())) == 3


def test_only_an_environment_of_the_same_user_is_used(
    tiny: PackedEnvironment, tmp_path: Path
) -> None:
    if os.getuid():
        pytest.skip("only root can make files of another user")
    root = tmp_path / "host"
    first = install_here(tiny, read_blocks(tiny.path), str(root)).folder
    os.chown(first.resolve(), 1234, -1)
    own = f"{tiny.name}-{os.getuid()}"
    assert install_here(tiny, read_blocks(tiny.path), str(root)).folder == root / own
    os.chown(root / own, 1234, -1, follow_symlinks=False)
    with pytest.raises(ClusterError, match=f"/{own} belongs to another user$"):
        install_here(tiny, read_blocks(tiny.path), str(root))


def test_a_copy_of_a_process_that_was_killed_is_removed_and_one_that_grows_is_not(
    tiny: PackedEnvironment, tmp_path: Path
) -> None:
    root, archive = tmp_path / "host", Path(tiny.path).read_bytes()
    elsewhere = [root / f"tfdist-environment-{name}" / ".unpacking" for name in ("new", "old")]
    for mark in elsewhere:
        mark.parent.mkdir(parents=True)
        mark.write_text("1 of another boot\n")
    os.utime(elsewhere[1], (0, 0))
    with start_shell(tiny, root) as killed, start_shell(tiny, root) as growing:
        for number, shell in enumerate((killed, growing), 1):
            assert shell.stdin is not None
            shell.stdin.write(archive[: tiny.size // 2])
            shell.stdin.flush()
            wait_for(lambda count=number: len(list(root.glob("*/bin"))) == count)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        install_here(tiny, read_blocks(tiny.path), str(root))
        assert [mark.exists() for mark in elsewhere] == [True, False]
        elsewhere[0].unlink()
        elsewhere[0].parent.rmdir()
        # The environment, its name, and the copy that grows.
        assert len(list(root.iterdir())) == 3
        assert growing.stdin is not None
        growing.stdin.write(archive[tiny.size // 2 :])
        growing.stdin.close()
        assert growing.wait() == 0
    assert len(list(root.iterdir())) == 2


def start_shell(packed: PackedEnvironment, root: Path) -> subprocess.Popen[bytes]:
    """Start a shell that unpacks an environment from its input."""
    command = install_command(packed.name, str(root))
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


@pytest.mark.timeout(60)
def test_a_shell_that_reads_nothing_is_ended(packed: PackedEnvironment) -> None:
    answer = f"printf '\\ntfdist need|{os.uname().machine}|glibc 2.99|/x\\n'; exec sleep 600"
    with Installation(packed, ["/bin/sh", "-c", answer], "host7") as installation:
        assert not installation.ask()
        sending = threading.Thread(target=try_to_finish, args=[installation, packed])
        sending.start()
        sending.join(1.0)
        assert sending.is_alive()
    sending.join()


def try_to_finish(installation: Installation, packed: PackedEnvironment) -> None:
    with suppress(ClusterError, ValueError):
        installation.finish(read_blocks(packed.path))


def test_an_environment_of_one_user_is_not_removed_with_another_users_files(
    packed: PackedEnvironment, tmp_path: Path
) -> None:
    root = tmp_path / "host"
    for name in ("tfdist-environment-0123.abc", "other"):
        (root / name).mkdir(parents=True)
        (root / name / ".used").touch()
        os.utime(root / name / ".used", (0, 0))
    install_here(packed, read_blocks(packed.path), str(root))
    assert (root / "other").exists()
    assert not (root / "tfdist-environment-0123.abc").exists()


# A process of an executor; the driver's connection is replaced by a file.
EXECUTOR = """
import sys
from unittest.mock import Mock, patch
from pybackend.core.launchers.environment.archive import read_packed
from pybackend.core.launchers.remote.bundle import read_blocks
from pybackend.core.launchers.spark import barrier_task
served = Mock(read=lambda: read_blocks(sys.argv[2]))
environment = barrier_task.SparkEnvironment(read_packed(sys.argv[1]), served)
with patch.object(barrier_task, "_list_paths", tuple):
    print("begins", flush=True)
    print(environment.install().python)
"""


def start_executor(packed: PackedEnvironment, archive: Path, root: Path) -> subprocess.Popen[str]:
    """Start a process that unpacks an environment, and wait until it begins."""
    paths = {"PYTHONPATH": str(Path(pybackend.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", EXECUTOR, packed.path, archive],
        env={**os.environ, **paths, "SPARK_EXECUTOR_DIRS": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["executor", "shell"])
def test_another_executor_takes_over_from_one_that_is_killed(
    packed: PackedEnvironment, tmp_path: Path, victim: str
) -> None:
    root, pipe = tmp_path / "host", tmp_path / "pipe"
    root.mkdir()
    os.mkfifo(pipe)
    with start_executor(packed, pipe, root) as first, pipe.open("wb") as writing:
        writing.write(Path(packed.path).read_bytes()[: packed.size // 2])
        wait_for(lambda: list(root.glob("tfdist-*/bin")))
        with start_executor(packed, Path(packed.path), root) as second:
            if victim == "executor":
                first.kill()
            else:
                children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()
                os.killpg(int(children), signal.SIGKILL)
            writing.close()
            assert second.stdout is not None
            (python,) = second.stdout.read().split()
        assert first.wait(30) != 0
    assert second.returncode == 0
    assert subprocess.run([python, "-c", "import numpy"], check=False).returncode == 0
    wait_for(lambda: len(list(root.glob("tfdist-*"))) == 2)  # the environment, and its name


def test_hosts_read_an_environment_from_the_driver(packed: PackedEnvironment) -> None:
    with ArchiveServer(packed, "127.0.0.1", None) as server:
        archive = server.archive
        assert archive.token not in repr(archive)
        assert b"".join(archive.read()) == Path(packed.path).read_bytes()
        with pytest.raises(UnreachedError, match="cannot connect to the driver at 127"):
            list(replace(archive, token="0" * 64).read())
        blocks = archive.read()
        next(blocks)
    with pytest.raises(ClusterError, match=r"lost the driver at 127.* If the driver is still"):
        list(blocks)
    with pytest.raises(UnreachedError, match="refused"):
        list(archive.read())


def test_many_hosts_read_an_environment_at_once(packed: PackedEnvironment, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"content")
    small = replace(packed, path=str(tmp_path / "small"), size=7)
    with (
        ArchiveServer(small, "127.0.0.1", None) as server,
        Threads() as pool,  # more than the driver greets at a time
    ):
        found = pool.map(lambda _: b"".join(server.archive.read()), range(150))
        assert set(found) == {b"content"}


def test_a_file_is_placed_again_after_a_call_that_was_interrupted(
    packed: PackedEnvironment, tmp_path: Path
) -> None:
    for _ in range(2):
        assert os.path.samefile(_link(packed, tmp_path), packed.path)


def test_links_to_folders_above_are_left_out_and_unreadable_files_are_named(tmp_path: Path) -> None:
    python = python_with(tmp_path, *SMALL)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "above").symlink_to(site.parent.absolute())
    facts = describe_environment(str(python))
    entries = list_entries(facts)
    assert not any("/above/" in entry.name for entry in entries)
    (site / "gone.py").touch()
    entries = list_entries(facts)
    (site / "gone.py").unlink()
    with pytest.raises(InputError, match=r"`environment` cannot be packed: .*gone\.py"):
        make_manifest(facts, entries)


def test_files_of_a_cluster_started_from_its_pyspark_are_left_out(tmp_path: Path) -> None:
    python = python_with(tmp_path, *SMALL)
    facts = describe_environment(str(python))
    before = list_entries(facts)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    for name in ("work/app-1/0/stderr", "work/app-1/0/app.jar", "logs/master.out", "conf.py"):
        path = site / "pyspark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    added = {entry.name for entry in list_entries(facts)} - {entry.name for entry in before}
    assert {Path(name).name for name in added} == {"conf.py"}


def test_the_folder_of_an_environment_can_be_relative(
    small: Path, packed: PackedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    facts = describe_environment(find_python(small.name))
    assert make_manifest(facts, list_entries(facts)).digest == packed.digest


def test_a_path_that_cannot_be_written_is_named_at_once(small: Path, tmp_path: Path) -> None:
    (tmp_path / "env.tar.gz").mkdir()
    with pytest.raises(InputError, match=r"env\.tar\.gz', which is a folder"):
        pybackend.pack_environment(tmp_path / "env.tar.gz", small)


def test_a_python_of_another_release_is_named(packed: PackedEnvironment, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho it is Python 3.6.1 >&2; exit 1\n")
    program.chmod(0o755)
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(program.parent, "bin")
    other = read_packed(str(tmp_path / "env.tar.gz"))
    assert other.manifest is None
    with pytest.raises(ClusterError, match=r"it is Python 3\.6\.1"):
        install_here(other, read_blocks(other.path), str(tmp_path / "host"))
    assert list((tmp_path / "host").iterdir()) == []


def test_an_archive_of_conda_pack_is_completed_before_it_is_found(tmp_path: Path) -> None:
    made = tmp_path / "made" / "bin"
    made.mkdir(parents=True)
    (made / "python").symlink_to(sys.executable)
    (made / "conda-unpack").write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[0]).parents[1]\n"
        "(folder / 'prefix').write_text(str(folder))\n"
    )
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(made, "bin")
    conda = read_packed(str(tmp_path / "env.tar.gz"))
    there = install_here(conda, read_blocks(conda.path), str(tmp_path / "host")).folder
    assert (there / "prefix").read_text() == str(there.resolve())


@pytest.mark.parametrize(
    ("machine", "libc", "problem"),
    [
        ("aarch64", "glibc 2.99", r"is for \w+, but host7 is aarch64"),
        (
            os.uname().machine,
            "glibc 2.9",
            r"is for glibc 2\.\d+ or later, but host7 has",
        ),
        (os.uname().machine, "unknown", "but host7 has unknown"),
    ],
)
def test_a_host_that_cannot_run_it_is_named(
    packed: PackedEnvironment, machine: str, libc: str, problem: str
) -> None:
    check_host(packed, os.uname().machine, "glibc 2.99", "host7")
    with pytest.raises(ClusterError, match=problem):
        check_host(packed, machine, libc, "host7")


def test_slurm_names_an_environment_that_it_unpacks_and_not_one_that_it_finds(
    packed: PackedEnvironment, tmp_path: Path
) -> None:
    said: list[Any] = []
    first = _install(packed, tmp_path, said.append)
    assert said == [Note(f"unpacking the Python environment in {tmp_path}")]
    assert _install(packed, tmp_path, said.append) == first
    assert len(said) == 1


def job_in(environment: Any, kind: type[Job] = FunctionJob) -> Job:
    return kind(1, resources=Resources(environment=environment))


def test_an_environment_is_packed_once_per_session(small: Path, packed: PackedEnvironment) -> None:
    said: list[str] = []
    one = pack_for(job_in(small), said.append)
    assert one is not None
    assert one.digest == packed.digest
    assert len(said) == 2
    assert pack_for(job_in(small), said.append) == one
    assert len(said) == 2
    assert pack_for(job_in(packed.path), said.append) == replace(one, path=packed.path)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_an_environment_without_tensorflow_is_named(
    small: Path, packed: PackedEnvironment, form: str
) -> None:
    environment = small if form == "folder" else packed.path
    with pytest.raises(InputError, match="has no TensorFlow: install it there with `pip install"):
        pack_for(job_in(environment, EvaluationJob), print)


def test_a_python_of_another_release_than_the_session_is_named(
    packed: PackedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(InputError, match=r"has Python 3\.\d+\.\d+, but this is Python 3\.99"):
        pack_for(job_in(packed.path), print)


def test_a_program_that_is_not_a_python_is_named(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    with pytest.raises(InputError, match=r"^`environment`: .*/bin/python is not a Python$"):
        pybackend.pack_environment(tmp_path / "env.tar.gz", tmp_path)


def test_a_conda_environment_names_conda_pack(tmp_path: Path) -> None:
    python = python_with(tmp_path, "cloudpickle")
    (python.parents[1] / "conda-meta").mkdir()
    with pytest.raises(InputError, match="conda-pack -o"):
        pack_environment_of(str(python.parents[1]), tmp_path / "env.tar.gz")


@pytest.mark.parametrize("environment", ["nowhere", 3, ""])
def test_a_wrong_environment_is_named(environment: Any) -> None:
    with pytest.raises(InputError, match="`environment` must be 'this'"):
        barrier_run("local", print, workers=1, resources=Resources(environment=environment))


def test_launchers_without_environments_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"hosts\(\), slurm\(\) and kubernetes\(\): on this mach"):
        barrier_run("local", print, workers=1, resources=Resources(environment=tmp_path))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path_factory.mktemp("environment") / "work") as running:
        yield running


def environments(cluster: Cluster) -> set[str]:
    """Return the unpacked environments of all hosts, without the links that name them."""
    walked = os.walk(cluster.work / "local")  # Spark may be removing them
    return {
        os.path.join(folder, name)
        for folder, names, _ in walked
        for name in names
        if re.fullmatch(r"tfdist-environment-\w{16}\.\w+", name)
    }


@pytest.mark.full
@pytest.mark.launcher
@pytest.mark.timeout(480)
def test_executors_without_tensorflow_train_the_model_of_one_process(
    cluster: Cluster, rows: Any, tmp_path: Path, capsys: Any
) -> None:
    bare = python_with(tmp_path / "bare", "pyspark", "pyarrow", "pandas")
    environment = python_with(tmp_path, *TENSORFLOW).parents[1]
    data = rows[0][:90], rows[1][:90]
    arguments: dict[str, Any] = {"workers": 2, "epochs": 2, "batch_size": 20, "seed": 5}
    resources = Resources(environment=environment)

    with cluster.session(python=str(bare)) as spark:
        there = barrier_train(spark, build_dense, data, **arguments, resources=resources)
        assert "sending the Python environment" in capsys.readouterr().out
        unpacked = environments(cluster)
        assert 2 <= len(unpacked) <= 3  # one for each host that had a task
        files = list(spark.sparkContext.listFiles)
        again = barrier_train(spark, build_dense, data, **arguments, resources=resources)
        assert "the Python environment" not in capsys.readouterr().out
        assert files == list(spark.sparkContext.listFiles)
        assert environments(cluster) >= unpacked
        assert list(cluster.work.glob("executors-*/**/tfdist-environment-*")) == []
        predicted = barrier_predict(
            spark, there.model, data[0], workers=2, verbose=0, resources=resources
        )
    np.testing.assert_allclose(predicted, there.model.predict(data[0], verbose=0), atol=1e-6)
    assert again.workers[0].weights_sha256 == there.workers[0].weights_sha256
    here = barrier_train(None, build_dense, data, **arguments)
    assert largest_difference(there.model, here.model) <= 1e-6
    wait_for(lambda: not environments(cluster))


def find_packages(context: Any) -> str:
    import numpy

    return numpy.__file__


@pytest.mark.full
@pytest.mark.launcher
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_reached", [True, False], ids=["reached", "unreached"])
def test_executors_of_a_host_share_an_environment(
    cluster: Cluster,
    packed: PackedEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    is_reached: bool,
) -> None:
    wait_for(lambda: not environments(cluster))  # of the session before
    sent: list[str] = []

    def count(path: str) -> Iterator[bytes]:
        sent.append(path)
        return read_blocks(path)

    monkeypatch.setattr(installing, "read_blocks", count)
    if not is_reached:
        nowhere = cluster.driver, "127.0.0.9"
        monkeypatch.setattr(stage, "driver_addresses", lambda _: nowhere)
    two_per_host = {"spark__cores__max": "6"}
    arguments: dict[str, Any] = {"workers": 6, "resources": Resources(environment=packed.path)}
    with cluster.session(**two_per_host) as spark:
        found = barrier_run(spark, find_packages, **arguments)
        shown = capsys.readouterr().out
        assert len(environments(cluster)) == 3
        assert all("/tfdist-environment-" in path for path in found)
        assert set(barrier_run(spark, find_packages, **arguments)) == set(found)
        assert "the Python environment" not in capsys.readouterr().out
        root = Path(SparkFiles.getRootDirectory())
        # Spark unpacks the files that it sends, if their names end like that of a tar file.
        assert list(cluster.work.glob("executors-*/**/site-packages")) == []
        assert list(root.glob("lib*")) == []
    assert "sending the Python environment" in shown
    assert ("cannot connect to the driver at 127.0.0.9" in shown) != is_reached
    assert sent == [packed.path] * (3 if is_reached else 0)


@pytest.mark.full
@pytest.mark.launcher
def test_a_packed_file_is_an_archive_of_spark_for_executors_without_python(
    cluster: Cluster, tmp_path: Path
) -> None:
    made = python_with(tmp_path, "pyarrow", "pandas").parents[1]
    packed = pack_environment_of(str(made), tmp_path / "env.tar.gz")

    def find(batches: Any) -> Any:
        import sys

        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable]})

    archives = {"spark__archives": f"{packed.path}#environment"}
    with cluster.session(python="./environment/bin/python", **archives) as spark:
        rows = spark.range(3).mapInArrow(find, "python string").collect()
    assert {row["python"].rpartition("/executors-")[1] for row in rows} == {"/executors-"}


DRIVER = """
import sys
from pathlib import Path
from pybackend import Resources, barrier_run
from standalone import Cluster
cluster = Cluster(sys.argv[1], sys.argv[2], (), Path(sys.argv[3]))
def wait(context, started):
    import pathlib, threading
    pathlib.Path(started, str(context.rank)).touch()
    threading.Event().wait(300)
with cluster.session() as session:
    resources = Resources(environment=sys.argv[5])
    barrier_run(session, wait, sys.argv[4], workers=2, resources=resources)
"""


@pytest.mark.full
@pytest.mark.launcher
def test_a_driver_that_dies_leaves_no_environment(
    cluster: Cluster, packed: PackedEnvironment, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    started.mkdir()
    paths = [str(Path(__file__).parent), str(Path(pybackend.__file__).parents[1])]
    arguments = [cluster.master, cluster.driver, cluster.work, started, packed.path]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    ) as driver:
        try:
            wait_for(lambda: len(list(started.iterdir())) == 2 or driver.poll() is not None, 120)
            assert environments(cluster)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # its JVM too, as when a host fails
    wait_for(lambda: not environments(cluster), 120)
