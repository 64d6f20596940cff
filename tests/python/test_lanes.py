"""The lanes in which `make test` runs: each test in one, and none may hang or fail unseen."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    import lane

    monkeypatch.setattr(lane, "BUILD", tmp_path)
    return tmp_path


def test_each_module_is_in_one_lane() -> None:
    import lanes

    found = [name for lane in [*lanes.MODULES, "unit"] for name in lanes.modules_of(lane)]
    there = {f"tests/python/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert len(found) == len(set(found))
    assert set(found) == there
    run = {word for lane in lanes.LANES for word in lane.command if word.endswith(".py")}
    assert run == there
    listed = {name for names in lanes.MODULES.values() for name in names}
    assert listed <= {Path(name).stem for name in there}


# Suites of what no single module does; all others are named after a module or a room.
CROSS_CUTTING = {
    "api_input": "the checks of all public functions",
    "collective_peers": "peers of the collective that misbehave",
    "connect": "Spark Connect",
    "datasets": "a tf.data.Dataset or PyDataset given directly",
    "epochs": "which epochs run, and which validate",
    "exact": "two workers end where one process ends",
    "exact_cases": "the same, for whatever Keras users do",
    "exact_keras": "the same, for all that Keras has",
    "exact_random": "the same, for models and data drawn at random",
    "exact_shards": "the same, however rows are spread",
    "exact_together": "the same, for what workers compute together",
    "exactness": "scripts/exactness.py and its page",
    "frames": "pandas data frames",
    "examples": "the programs of examples/, run",
    "fuzz": "input that is damaged or hostile",
    "imports": "layers, and what imports cost",
    "lanes": "scripts/lanes.py",
    "migrating": "the pages of docs/migrating, run",
    "notebook": "examples/notebooks, run by Jupyter's kernel",
    "particles": "examples/particles",
    "object_store": "checkpoints and models in S3",
    "quiet": "what TensorFlow prints at its start",
    "recovery": "checkpoints and restarts",
    "readme": "the README and docs/data.md, run",
    "routes": "one job by each route",
    "rpkg_sources": "rpkg installed from a checkout",
    "run_hosts": "tfdist run on other hosts",
    "signatures": "the same names and defaults everywhere",
    "standalone": "a Spark cluster of several hosts",
    "warm": "forked workers, tests/python/forge",
}


def test_test_files_are_named_after_modules() -> None:
    root = SCRIPTS.parent / "pybackend"
    modules = set()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        # A room's name, a module's, or one after the other: tfrecord_crc.
        modules |= {"_".join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts) + 1)}
    names = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert names - modules - set(CROSS_CUTTING) == set()


def end(*lanes: tuple[str, float, str | None], program: str, folder: Path) -> list[Any]:
    """Run lanes of these names, budgets and needs, each the same program."""
    import lane
    import lanes as runner

    command = (sys.executable, "-c", program)
    all_lanes = [lane.Lane(name, command, budget, after) for name, budget, after in lanes]
    return runner.run_lanes(all_lanes, 1.0, folder)


def test_a_lane_runs_after_what_it_needs(build: Path, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    program = "import os; print('in', os.environ['TMPDIR'])"
    ended = end(("b", 30, "a"), ("a", 30, None), program=program, folder=folder)
    assert [one.lane.name for one in ended] == ["a", "b"]
    assert [one.problem for one in ended] == ["", ""]
    assert f"===== a: {ended[0].seconds:.0f} s =====\nin {folder}/a" in capfd.readouterr().out


def test_a_lane_does_not_run_if_what_it_needs_failed(build: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ended = end(("a", 30, None), ("b", 30, "a"), program="raise SystemExit(3)", folder=folder)
    assert [one.problem for one in ended] == ["exit status 3", "not run: a failed"]


def test_one_that_waits_runs_beside_two(build: Path, tmp_path: Path) -> None:
    import lane
    import lanes as runner

    others = "import os, time\nwhile not os.path.exists('there'): time.sleep(0.01)"
    programs = {"a": others, "b": others, "c": "open('there', 'w')"}
    run = f"import os; os.chdir({str(tmp_path)!r})\n"
    made = [
        lane.Lane(name, (sys.executable, "-c", run + program), 60, waits=name == "c")
        for name, program in programs.items()
    ]
    ended = runner.run_lanes(made, 1.0, tmp_path)
    assert {one.lane.name: one.problem for one in ended} == dict.fromkeys("abc", "")


def test_a_lane_that_hangs_prints_its_stacks_and_ends(
    build: Path, tmp_path: Path, capfd: Any
) -> None:
    import lane
    from lane_results import conclude

    program = (
        "import faulthandler, subprocess, sys; faulthandler.enable()\n"
        "def wait_for_a_child():\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    child.wait()\n"
        "wait_for_a_child()"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    began = time.monotonic()
    (ended,) = end(("slow", 4, None), program=program, folder=folder)
    assert time.monotonic() - began < 90
    assert ended.problem == "ended after 8 s"
    assert lane.processes_of(folder) == []
    assert conclude([ended], 2) == 1
    shown = capfd.readouterr().out
    assert shown.count("in wait_for_a_child") == 2  # at once, and again at the end
    assert shown.endswith("1 lanes in 2 s\n0 passed, 1 failed, 0 skipped\n")


def test_a_lane_beyond_its_budget_is_said_to_be_late(
    build: Path, tmp_path: Path, capfd: Any
) -> None:
    import lane
    from lane_results import conclude

    (tmp_path / "own").mkdir()
    command = (sys.executable, "-c", "import threading; threading.Event().wait(5)")
    ended = lane.run_lane(lane.Lane("slow", command, 4.0), 1.0, tmp_path / "own")
    assert conclude([ended], 2) == 0
    assert ", late: its budget is 4 s\n" in capfd.readouterr().out


TESTS = """
import pytest
def test_one(): pass
def test_two(): assert False
def test_three(): pytest.skip("because")
"""


def test_outcomes_are_counted(build: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    import lane
    from lane_results import conclude, record, time_tests

    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = f"--junitxml={tmp_path}/it.xml"
    python = lane.Lane(
        "it", (sys.executable, "-m", "pytest", "-q", report, f"{tmp_path}/test_it.py"), 60
    )
    printed = "test-a.R: one (6.0 s)\\nR tests: 7 passed, 0 failed, 2 skipped"
    r = lane.Lane("r", (sys.executable, "-c", f"print('{printed}')"), 60)
    ended = [lane.run_lane(python, 1.0, tmp_path), lane.run_lane(r, 1.0, tmp_path)]
    assert [one.problem for one in ended] == ["exit status 1", ""]
    assert conclude(ended, 3) == 1
    assert capfd.readouterr().out.endswith("8 passed, 1 failed, 3 skipped\n")
    assert set(time_tests(python)) == {f"test_it::test_{name}" for name in ("one", "two", "three")}
    record(ended, 3, tmp_path / "durations.json")
    assert '"test-a.R: one": 6.0' in (tmp_path / "durations.json").read_text()
    monkeypatch.setenv("TFDIST_TEST_REQUIRE", "1")
    assert conclude(ended[1:], 3) == 1  # nothing failed, but tests were skipped


ONCE = """
from pathlib import Path
def test_good(): pass
def test_first_time():
    seen = Path(__file__).with_name("seen")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""


@pytest.mark.parametrize("always", [False, True])
def test_few_that_failed_are_run_again(
    build: Path, tmp_path: Path, capfd: Any, always: bool
) -> None:
    import lane
    from lane_again import run_again
    from lane_results import conclude

    own = tmp_path / "own"
    own.mkdir()
    (own / "test_it.py").write_text(ONCE + "def test_bad(): assert False\n" * always)
    (own / "pytest.ini").write_text("[pytest]\n")
    report = f"--junitxml={build}/it.xml"
    command = (sys.executable, "-m", "pytest", "-q", report, str(own / "test_it.py"))
    one = lane.run_lane(lane.Lane("it", command, 60), 1.0, tmp_path)
    assert one.problem == "exit status 1"
    (ended,) = run_again([one], 1.0, tmp_path)
    assert conclude([ended], 3) == always
    shown = capfd.readouterr().out
    assert ended.unstable == (() if always else ("test_it::test_first_time",))
    assert ("UNSTABLE test_it::test_first_time" in shown) is not always
    passed, failed = (1, 2) if always else (2, 0)
    assert shown.endswith(f"{passed} passed, {failed} failed, 0 skipped\n")


R_ONCE = """
r-test:
	@test -n "$(R_FILES)" || { printf 'FAILED test-a.R: one: two\\nno\\n'; echo $(TOTAL); exit 1; }
	@echo "files $(R_FILES)" && test "$(R_FILES)" = $(GOOD)
"""


@pytest.mark.parametrize("good", ["test-a.R", "none"])
def test_files_of_r_that_failed_are_run_again(
    build: Path, tmp_path: Path, capfd: Any, good: str
) -> None:
    import lane
    from lane_again import run_again
    from lane_results import conclude

    (tmp_path / "Makefile").write_text(R_ONCE)
    total = "R tests: 4 passed, 2 failed, 0 skipped"
    command = ("make", "-C", str(tmp_path), "r-test", f"GOOD={good}", f"TOTAL={total}")
    one = lane.run_lane(lane.Lane("r", command, 60), 1.0, tmp_path)
    (ended,) = run_again([one], 1.0, tmp_path)
    is_good = good == "test-a.R"
    assert conclude([ended], 3) == (not is_good)
    shown = capfd.readouterr().out
    assert "files test-a.R" in shown
    assert ("UNSTABLE test-a.R: one: two" in shown) is is_good
    passed, failed = (6, 0) if is_good else (4, 2)
    assert shown.endswith(f"{passed} passed, {failed} failed, 0 skipped\n")
