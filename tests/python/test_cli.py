"""The command line, in this process and as a real command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

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
def test_a_wrong_tf_config_is_refused(arguments: list[str], named: str, capsys: Any) -> None:
    assert main(["tf-config", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tfdist: ")
    assert named in shown.err


def test_doctor_shows_this_machine(capsys: Any) -> None:
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines if not line.startswith("problem: "))
    assert shown["python"] == sys.executable
    assert shown["version"] == pybackend.__version__
    assert {"tensorflow", "keras", "pyspark", "java", "cores", "memory_gb", "gpus"} <= set(shown)
    assert status == (1 if len(shown) < len(lines) else 0)


def test_the_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tfdist {pybackend.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["mnist", "--workers", "three"],
        ["mnist", "--unknown"],
        ["tf-config", "--index", "first"],
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
def test_a_wrong_training_is_refused_before_it_starts(
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
