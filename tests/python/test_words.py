"""Messages for users of R: values, settings and names are code of R, and all else is unchanged."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pybackend
from pybackend.core import words
from pybackend.core.errors import Failure, InputError, WorkerFailedError
from pybackend.core.job.arguments import check_choice, check_flag
from pybackend.core.job.job import Job, TrainingJob, make_job
from pybackend.core.job.worker_options import check_exchange, check_scale_lr
from pybackend.core.tf_config import check_roles
from pybackend.core.words import (
    REST,
    Code,
    call_of,
    element,
    install,
    kind_of,
    one_of,
    row_number,
    setting,
    show,
)


@pytest.fixture(autouse=True)
def in_r() -> Iterator[None]:
    words.speak("R")
    yield
    words.speak("Python")


@pytest.mark.parametrize(
    ("value", "python", "r"),
    [
        (None, "None", "NULL"),
        (True, "True", "TRUE"),
        (2, "2", "2"),
        (2.0, "2.0", "2"),
        (1e-7, "1e-07", "1e-07"),
        (math.nan, "nan", "NaN"),
        (-math.inf, "-inf", "-Inf"),
        ("local", "'local'", '"local"'),
        ("it's", '"it\'s"', '"it\'s"'),
        ('"\\\n', "'\"\\\\\\n'", '"\\"\\\\\\n"'),
        ((None, 28, 28), "(None, 28, 28)", "(NA, 28, 28)"),
        ((784,), "(784,)", "(784)"),
        (["a", "b"], "['a', 'b']", 'c("a", "b")'),
        ([1, "a"], "[1, 'a']", 'list(1, "a")'),
        ([None], "[None]", "list(NULL)"),
        ([], "[]", "list()"),
        (["a"], "['a']", '"a"'),
        (("uint8", (28, None)), "('uint8', (28, None))", 'list("uint8", c(28, NA))'),
        ([(), (None,), ("a",)], "[(), (None,), ('a',)]", 'list(list(), NA, "a")'),
        (
            {"a": [1, 2], "b c": None},
            "{'a': [1, 2], 'b c': None}",
            "list(a = c(1, 2), `b c` = NULL)",
        ),
        ({0: 1.0, 1: 5.5}, "{0: 1.0, 1: 5.5}", 'list("0" = 1, "1" = 5.5)'),
        ({"x": REST, "y": [REST]}, "{'x': ..., 'y': [...]}", "list(x = ..., y = c(...))"),
        (..., "...", "..."),
        (Code("dtype"), "dtype", "dtype"),
        (b"\0", "b'\\x00'", "b'\\x00'"),
    ],
)
def test_a_value_is_code_of_the_users_language(value: Any, python: str, r: str) -> None:
    assert show(value) == r
    words.speak("Python")
    assert show(value) == python


def test_options_are_calls_of_their_functions() -> None:
    shown = show(pybackend.Resources(gpus=1, memory="4GB"))
    wanted = "cpus = NULL, memory = 4000000000, gpus = 1, environment = NULL, fork_server = NULL"
    assert shown == f"resources({wanted})"
    assert show([{"a": pybackend.Elastic(2)}]).startswith("list(list(a = elastic(")


def test_the_pieces_of_a_message() -> None:
    assert setting(workers=2, every="epoch") == 'workers = 2, every = "epoch"'
    assert setting(exchange=call_of("LocalSteps", ...)) == "exchange = local_steps(...)"
    assert call_of("pybackend.Elastic", 4, min=2) == "elastic(4, min = 2)"
    assert one_of("Exchange", "Elastic") == "made by `exchange()` or `elastic()`"
    assert row_number(3) == "row 4"
    assert element("worker", 0) == "worker[1]"
    assert element("worker", "0") == 'worker["0"]'
    assert [kind_of(one) for one in (3.5, [1], {}, print, None, "a")] == [
        "a number",
        "a list",
        "a list",
        "builtin_function_or_method",
        "NULL",
        '"a"',
    ]
    assert install("cpu") == 'run `install_tfdist(extras = c("cpu", "cpu"))`'
    words.speak("Python")
    assert setting(workers=2, every="epoch") == "workers=2, every='epoch'"
    assert call_of("pybackend.Elastic", 4, min=2) == "pybackend.Elastic(4, min=2)"
    assert one_of("Exchange", "Elastic") == "an Exchange or an Elastic"
    assert row_number(3) == "row 3 (counting from 0)"
    assert element("worker", 0) == "worker[0]"
    assert [kind_of(one) for one in (3.5, None)] == ["float", "None"]
    assert install("plots") == "pip install 'tfdist[plots]'"


def make(**arguments: Any) -> Job:
    return make_job(TrainingJob, {"workers": 2, **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_flag("overwrite", None), "`overwrite` must be TRUE or FALSE, not NULL"),
        (
            lambda: check_choice("rule", 3.0, choices=["a", None]),
            '`rule` must be "a" or NULL, not 3',
        ),
        (
            lambda: check_exchange([{"a": None}]),
            "`exchange` must be made by `exchange()`, `local_steps()` or `parameter_server()`, "
            'e.g. exchange(loss_over = "global batch"), not list(list(a = NULL))',
        ),
        (
            lambda: check_scale_lr("None=True"),
            '`scale_lr` must be NULL, "linear", "sqrt" or a list, e.g. '
            'list("linear", warmup_epochs = 5), not "None=True"',
        ),
        (
            lambda: make(class_weight=["Checkpoint(...)"]),
            '`class_weight` must map classes to weights, e.g. list("0" = 1, "1" = 5), not '
            '"Checkpoint(...)"',
        ),
        (
            lambda: pybackend.LocalSteps(4, scale_lr="linear"),  # type: ignore[call-arg]
            "LocalSteps() has no argument `scale_lr`: a step has the rows of one worker, "
            "regardless of the number of workers. Omit it",
        ),
        (
            lambda: make(elastic=pybackend.Elastic(2), exchange=pybackend.LocalSteps(4)),
            "exchange = local_steps(...) cannot be combined with workers = elastic(...): the "
            "weights of a lost worker would be lost",
        ),
        (
            lambda: check_roles({"master": 1}),
            '`roles` has "master"; expected chief, worker, ps, evaluator: call it "chief", as '
            "TensorFlow 2 does",
        ),
        (
            lambda: pybackend.Resources(memory="much"),
            '`memory` must be a number of bytes, or text such as "4GB", "512MiB" or "4g", not '
            '"much"',
        ),
        (
            lambda: pybackend.kubernetes(None),
            '`image` must name a container image, e.g. "registry/tf:1", not NULL',
        ),
        (
            lambda: pybackend.hosts({"a": 1.0}),
            '`hosts` must be a string like "a:2,b:2", or a list of them, not list(a = 1)',
        ),
        (
            lambda: pybackend.hosts("a", ssh_options="-p 1"),
            '`ssh_options` must be a list of words, e.g. c("-p", "2222"), not "-p 1"',
        ),
        (
            lambda: pybackend.barrier_train(3.5, None, None),
            '`sc` must be NULL, "local", a SparkSession, or made by hosts(), slurm() or '
            "kubernetes(), not 3.5",
        ),
        (
            lambda: pybackend.barrier_train("local", lambda units: units, ([1], [1])),
            "the `model` function needs arguments (units): workers call it without any, so wrap "
            "it, e.g. function() build(units = 64)",
        ),
        (
            lambda: pybackend.barrier_run("local", print, data=3),
            "`data` must be a Spark table, an RDD, a data frame or a named list of arrays, not int",
        ),
    ],
)
def test_an_error_is_in_rs_words(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


def test_only_the_classes_of_tfdist_are_left_out_of_a_failure() -> None:
    names = ("InputError", "RError", "ValueError")
    failures = [
        Failure(rank, f"h{rank}", name, "None of workers=2") for rank, name in enumerate(names)
    ]
    assert str(WorkerFailedError(failures)) == (
        "worker 0 on h0 failed: None of workers=2\n\nOther workers:\n"
        "  worker 1 on h1: None of workers=2\n  worker 2 on h2: ValueError: None of workers=2"
    )


def test_a_job_carries_the_language() -> None:
    job = make(epochs=2)
    words.speak("Python")
    assert Job.from_json(job.to_json()).language == "R"
    assert make(epochs=2).language == "Python"


def test_constants_of_modules_have_no_language() -> None:
    """They are computed when a module is imported, possibly before the language is set."""
    root = Path(pybackend.__file__).parent
    functions = {"call_of", "either", "element", "install", "kind_of", "one_of", "row_number"}
    functions |= {"setting", "show", "term"}
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        bodies = [
            tree.body,
            *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        ]
        for statement in (one for body in bodies for one in body):
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                assert not names & functions, f"{path}:{statement.lineno}"
