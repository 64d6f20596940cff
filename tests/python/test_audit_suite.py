"""The audit is audited: no wrong training passes, and no right one ends.

Each training is judged by what its user sees: an error, or `audit` of the result. A training passes
silently if it has neither a difference nor a reason why a step was not compared.

`table` returns how much of each kind is found, from all cases; in the root of a checkout:

    PYTHONPATH=.:tests/python python -c "import conftest, test_audit_suite as suite
    for row in suite.table(): print(*row, sep=' | ')"
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from auditing.faults import FAULTS, KINDS, REFERENCES, SUBJECTS
from auditing.losses import LOSSES
from auditing.models import MODELS
from auditing.subject import Outcomes, Subject, compare_with_one_process
from auditing.tables import TABLES
from replicas import named

# The first test of a group waits until the workers have trained the group.
pytestmark = pytest.mark.timeout(3000)

DAILY = [
    "dense, Adam",
    "dropout",
    "vector quantization with counts",
    "mixed_bfloat16, Adam",
    "a bias of attention's keys, Adam",
    "ones and one-hot and years and money and flags, 300 rows, Adam, regressor",
    "hardest triplets",
    "mean over labelled rows",
    "Cox",
    "Pearson",
    "labelled rows in a train_step",
    "gradients scaled 0.01, dense, uneven",
    "traced: a kernel unmoved 1, dense, uneven",
    "read: rows twice 0.6, dense, uneven",
    "a part of another worker 1, shards of the optimizer",
    "order: another order 1, dense, Adam",
    "metrics not merged 1, dense, uneven",
    "statistics of one worker 1, convolution",
    "dropout after an embedding",
    "compression of an embedding",
]
RIGHT = {**MODELS, **TABLES}
SUBJECTS_OF_FAULTS = {f"without a fault: {name}": one for name, one in SUBJECTS.items()}
CASES: dict[str, Subject] = {**RIGHT, **LOSSES, **FAULTS}


def daily(cases: Mapping[str, Any]) -> list[Any]:
    """Return the names of cases as parameters of a test."""
    return named(cases, [name for name in DAILY if name in cases])


@pytest.fixture(scope="module")
def outcomes(request: Any, tmp_path_factory: Any) -> Outcomes:
    """Outcomes of the cases of this session's tests."""
    specs = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.module is request.module
    ]
    names = {spec.params["name"] for spec in specs if spec is not None and "name" in spec.params}
    kinds = [(name, kind) for name, kind in KINDS.items() if name in names]
    names |= {f"{n} {max(kind.sizes):g}, {one}" for n, kind in kinds for one in kind.subjects}
    return make_outcomes({name: CASES[name] for name in CASES if name in names}, tmp_path_factory)


def make_outcomes(cases: Mapping[str, Subject], factory: Any = None) -> Outcomes:
    """Return outcomes of some cases, and of the subjects of their faults without a fault."""
    needed = {f"without a fault: {REFERENCES[name]}" for name in cases if name in REFERENCES}
    references = {name: one for name, one in SUBJECTS_OF_FAULTS.items() if name in needed}
    folder = Path(tempfile.mkdtemp()) if factory is None else factory.mktemp("audited")
    return Outcomes({**references, **cases}, folder)


def error_of(name: str, outcomes: Outcomes) -> float:
    """Return how wrong a training with a fault is: of its weights, or its history."""
    kind = next(kind for key, kind in KINDS.items() if name.startswith(f"{key} "))
    measure = outcomes.measure_history if kind.is_of_history else outcomes.measure
    return measure(name, f"without a fault: {REFERENCES[name]}")


@pytest.mark.parametrize("name", daily(RIGHT))
def test_a_right_training_does_not_end(name: str, outcomes: Outcomes) -> None:
    found = outcomes[name]
    assert found.verdict in ("equal", "undecided"), found.text


@pytest.mark.parametrize("name", daily(LOSSES))
def test_a_loss_over_rows_of_a_batch_does_not_pass(name: str, outcomes: Outcomes) -> None:
    found = outcomes[name]
    assert found.verdict in ("different", "undecided"), found.text


@pytest.mark.parametrize("name", daily(LOSSES))
def test_such_a_loss_trains_other_weights(name: str, outcomes: Outcomes) -> None:
    found = outcomes[name].trained
    assert found is not None
    assert compare_with_one_process(LOSSES[name], found) > LOSSES[name].limit


@pytest.mark.parametrize("name", daily({n: one for n, one in RIGHT.items() if one.is_comparable}))
def test_a_right_training_equals_one_process(name: str, outcomes: Outcomes) -> None:
    found = outcomes[name].trained
    assert found is not None
    assert compare_with_one_process(RIGHT[name], found) < 1e-4


@pytest.mark.parametrize("name", daily(FAULTS))
def test_a_fault_does_not_pass(name: str, outcomes: Outcomes) -> None:
    found, error = outcomes[name], error_of(name, outcomes)
    if error > FAULTS[name].limit:
        passes = f"a relative error of {error:.1e} passes: {found.text}"
        assert found.verdict in ("different", "undecided", "stopped"), passes


@pytest.mark.parametrize("name", named(KINDS, []))
def test_each_fault_makes_a_training_wrong(name: str, outcomes: Outcomes) -> None:
    kind = KINDS[name]
    largest = [f"{name} {max(kind.sizes):g}, {subject}" for subject in kind.subjects]
    assert any(error_of(one, outcomes) > FAULTS[one].limit for one in largest)


def test_there_are_many_cases() -> None:
    assert len(MODELS) >= 60
    assert len(LOSSES) >= 60
    assert len(CASES) == len(MODELS) + len(TABLES) + len(LOSSES) + len(FAULTS)
    assert set(DAILY) <= set(CASES)


def table(outcomes: Outcomes | None = None) -> list[tuple[str, ...]]:
    """Return rows of a table: what is trained, how many times, and the share of each outcome.

    Of losses and faults, those whose relative error is larger than what the audit may pass.
    """
    found = outcomes or make_outcomes(CASES)
    rows = [("Training", "Trained", "Error of the weights", "Found", "Undecided", "Passed")]
    for name, cases in (("ordinary models", MODELS), ("tables", TABLES)):
        rows.append(_count(f"right: {name}", [found[one].verdict for one in cases], []))
    rows.append(_count("losses over a batch", [found[name].verdict for name in LOSSES], []))
    for label, names in list_kinds():
        wrong = {name: error_of(name, found) for name in names}
        large = {name: error for name, error in wrong.items() if error > FAULTS[name].limit}
        if large:
            verdicts = [found[name].verdict for name in large]
            rows.append(_count(label, verdicts, list(large.values())))
    return rows


def list_kinds() -> Iterator[tuple[str, list[str]]]:
    """Yield each fault, and the names of its cases of all sizes."""
    for kind in KINDS:
        yield f"fault: {kind}", [name for name in FAULTS if name.startswith(f"{kind} ")]


def _count(label: str, verdicts: list[str], errors: list[float]) -> tuple[str, ...]:
    caught = sum(one in ("different", "stopped") for one in verdicts)
    undecided = sum(one == "undecided" for one in verdicts)
    passed = len(verdicts) - caught - undecided
    finite = [error for error in errors if error < float("inf")]
    shown = f"{min(finite):.1g} to {max(finite):.1g}" if finite else ""
    return label, str(len(verdicts)), shown, str(caught), str(undecided), str(passed)
