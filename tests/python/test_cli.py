"""The command line, in this process and as a real command."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from pythons import python_with

import pybackend
from pybackend.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pybackend", *arguments], capture_output=True, text=True, check=False
    )


def test_tf_config_prints_what_the_function_returns(capsys: Any) -> None:
    assert main(["tf-config", "--workers", "a:2222,b:2222", "--index", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out == pybackend.make_tf_config(["a:2222", "b:2222"], 1) + "\n"
    assert json.loads(shown.out)["task"] == {"type": "worker", "index": 1}
    assert shown.err == ""


def test_tf_config_of_every_role(capsys: Any) -> None:
    cluster = ["--workers", "w:1,v:2", "--chief", "c:3", "--ps", "p:4,q:5", "--evaluator", "e:6"]
    for role, index in (("worker", 0), ("chief", 0), ("ps", 1), ("evaluator", 0)):
        assert main(["tf-config", *cluster, "--role", role, "--index", str(index)]) == 0
        spec = pybackend.read_tf_config(capsys.readouterr().out)
        assert (spec.role, spec.index) == (role, index)
        assert {name: list(tasks.values()) for name, tasks in spec.cluster.items()} == {
            "worker": ["w:1", "v:2"],
            "chief": ["c:3"],
            "ps": ["p:4", "q:5"],
            "evaluator": ["e:6"],
        }


@pytest.mark.full
def test_pack_writes_an_environment_and_says_what_is_in_it(tmp_path: Any, capsys: Any) -> None:
    environment = python_with(tmp_path, "cloudpickle").parents[1]
    file = tmp_path / "env.tar.gz"
    assert main(["pack", str(file), "--environment", str(environment)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{file}: ")
    assert f"Python {platform.python_version()} and 1 package" in shown
    assert main(["pack", "env.zip"]) == 1
    assert "`path` must end with .tar.gz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workers", "a:1"], "index"),
        (["--workers", "a:0", "--index", "0"], "worker[0] = 'a:0'"),
        (["--workers", "a:1,a:1", "--index", "0"], "worker[1] = 'a:1'"),
        (["--workers", "a:1,b", "--index", "0"], "worker[1] = 'b'"),
        (["--workers", "a:1", "--index", "1"], "`index` is 1"),
        (["--workers", "a:1", "--index", "0", "--role", "master"], "'master'"),
        (["--workers", "a:1", "--index", "0", "--role", "ps"], "'ps'"),
        (["--workers", "", "--index", "0"], "worker"),
        ([], "worker"),
    ],
)
def test_a_wrong_tf_config_is_rejected(arguments: list[str], named: str, capsys: Any) -> None:
    assert main(["tf-config", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tfdist: ")
    assert named in shown.err


def test_doctor_shows_this_machine(capsys: Any) -> None:
    status = main(["doctor"])
    *lines, verdict = capsys.readouterr().out.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines if not line.startswith("problem: "))
    assert shown["python"] == sys.executable
    assert shown["version"] == pybackend.__version__
    assert {"tensorflow", "keras", "pyspark", "java", "cores", "memory_gb", "gpus"} <= set(shown)
    assert not any("problem" in name for name in shown)
    assert status == (1 if len(shown) < len(lines) else 0)
    assert verdict.startswith("ready" if status == 0 else ("ready on this machine;", "not ready:"))


@pytest.mark.full
def test_doctor_probes_a_cluster_of_its_own() -> None:
    shown = run("doctor", "--master", "local[2]", "--conf", "spark.driver.memory=512m")
    assert shown.returncode == 0, shown.stderr
    first, *lines, verdict = shown.stdout.splitlines()
    assert first == socket.gethostname()
    assert lines[0] == f"  Python {platform.python_version()}, {sys.executable}"
    assert lines[-1] == "  2 slots here, which can reach all other workers"
    assert verdict == "ready: 2 workers on 1 host, and each can reach all others"


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_a_master_that_does_not_answer(scheme: str, capsys: Any) -> None:
    with socket.socket() as held:  # bound, so that no other process listens there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert main(["doctor", "--master", f"{scheme}://{address}"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{address}: Connection refused" in shown.err


def test_an_answer_that_is_not_spark(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        hang_up = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        hang_up.daemon = True
        hang_up.start()
        shown = run("doctor", "--master", f"sc://127.0.0.1:{port}")
    assert shown.returncode == 1
    assert f"Spark did not start at sc://127.0.0.1:{port}" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_what_spark_needs_is_named(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    assert main(["doctor", "--master", "local"]) == 1
    assert "no Java was found" in capsys.readouterr().err
    monkeypatch.setattr("pybackend.doctor.spark_master.find_spec", lambda name: None)
    assert main(["doctor", "--master", "local"]) == 1
    assert "pyspark is not installed" in capsys.readouterr().err


def test_the_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tfdist {pybackend.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "-w", "2", "--speed", "9", "train.py"], "unknown option --speed"),
        (
            ["run", "-np", "2", "train.py"],
            "unknown option -np: the number of processes is --workers N",
        ),
        (["mnist", "--speed=9"], "unknown option --speed=9"),
        (["doctor", "here"], "unknown argument here"),
    ],
)
def test_what_a_command_does_not_know_is_named_with_its_own_usage(
    arguments: list[str], named: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.split(f"tfdist {arguments[0]}: error: ")
    assert usage.startswith(f"usage: tfdist {arguments[0]} [")
    assert error == f"{named}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["mnist", "--workers", "three"],
        ["mnist", "--unknown"],
        ["tf-config", "--index", "first"],
        ["doctor", "--master", "spark//host:7077"],
        ["doctor", "--master", "spark://host"],
        ["doctor", "--master", "local[two]"],
        ["doctor", "--master", "local[2]", "--workers", "0"],
        ["doctor", "--master", "local[2]", "--conf", "spark.executor.memory"],
        ["doctor", "--workers", "2"],
        ["doctor", "--conf", "a=b"],
    ],
)
def test_what_is_no_command_ends_with_status_2(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tfdist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workers", "0"], "`workers`"),
        (["--epochs", "-1"], "`epochs`"),
        (["--batch-size", "0"], "`batch_size`"),
        (["--limit", "0"], "`limit`"),
        (["--seed", "-1"], "`seed`"),
        (["--data", "missing.npz"], "'missing.npz'"),
        (["--out", "model.keras"], "--out"),
        (["--out", "model"], "--out"),
    ],
)
def test_a_wrong_training_is_rejected_before_it_starts(
    arguments: list[str], named: str, capsys: Any
) -> None:
    assert main(["mnist", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("tfdist: ")
    assert named in shown.err
    assert shown.out == ""


def test_the_module_is_the_command() -> None:
    shown = run("--version")
    assert (shown.returncode, shown.stdout) == (0, f"tfdist {pybackend.__version__}\n")
    refused = run("tf-config", "--workers", "a:99999", "--index", "0")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "99999" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert run("no-such-command").returncode == 2
