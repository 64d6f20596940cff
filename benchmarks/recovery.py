"""Trainings with a process killed at a random moment, each compared with an undisturbed one: the
seconds that the kill costs, and whether the results are equal.

A schedule draws the victim, the worker whose clock counts, the step, the delay after the step, and
the interval of checkpoints. The training then resumes, by `restarts` or by a second call with
`resume`. Runs are equal if weights, optimizer state and history are equal bit for bit. Spark is a
standalone cluster of three hosts on this machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "python")]
os.environ["TFDIST_TEST_FORGE"] = ""  # workers start as users' do, and are not forked
# Workers import modules of this folder by name.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

import numpy as np  # noqa: E402
import recovery_case as case  # noqa: E402
from standalone import CONNECT_IN_R, Cluster, standalone_cluster  # noqa: E402

Table = dict[str, dict[str, float]]
TITLE = "killed at random moments: runs equal to one left alone"
_AGAIN = "restarting from"
_LATEST_DELAY = 0.03
_LIMIT = 600
IN_R = """
case <- reticulate::import("recovery_case")
rows <- case$rows()
train <- function(folder, every) {
  kept <- if (!is.null(every)) tfdist::checkpoint(file.path(folder, "kept"), every = every)
  fit <- tfdist::barrier_train(
    sc,
    model_fn = function() reticulate::import("recovery_case")$build(folder),
    data = rows,
    workers = case$WORKERS,
    epochs = case$EPOCHS,
    batch_size = case$BATCH,
    seed = 5,
    callbacks = case$make_callbacks(folder),
    checkpoint = kept,
    restarts = if (is.null(every)) 0 else 1
  )
  case$describe(fit$model, fit$history)
}
input <- file("stdin", "r")
while (length(line <- readLines(input, 1L))) {
  asked <- jsonlite::fromJSON(line)
  found <- tryCatch(train(asked$folder, asked$every), error = conditionMessage)
  case$write(asked$folder, found)
  cat("done\\n")
}
sparklyr::spark_disconnect(sc)
"""


@dataclass(frozen=True)
class Kind:
    """Kind of kill: the row of the table, and the place of the training.

    A schedule draws one of ``victims``, as in `recovery_case.Schedule`. The driver is killed alone
    or with its whole process group, including Spark's Java.
    """

    title: str
    place: str
    victims: tuple[str, ...]


KINDS = {
    "local-worker": Kind("this machine: a worker", "local", ("worker",)),
    "local-driver": Kind("this machine: the driver, resumed", "local", ("driver",)),
    "spark-worker": Kind("Spark: a worker, or its task", "spark", ("worker", "task")),
    "spark-executor": Kind("Spark: an executor", "spark", ("executor",)),
    "spark-host": Kind("Spark: a host's Spark worker", "spark", ("spark worker",)),
    "spark-driver": Kind("Spark: the driver, resumed", "spark", ("driver", "group")),
    "sparklyr-worker": Kind("spark_apply: a worker, or its task", "sparklyr", ("worker", "task")),
    "sparklyr-executor": Kind("spark_apply: an executor", "sparklyr", ("executor",)),
    "sparklyr-host": Kind("spark_apply: a host's Spark worker", "sparklyr", ("spark worker",)),
}


@dataclass(frozen=True)
class Run:
    """Outcome of one schedule."""

    found: Any
    was_interrupted: bool
    seconds: float


class Places:
    """Places of trainings, started at first use and stopped together."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._cluster: Cluster | None = None
        self._session: Any = None
        self._r: _InR | None = None
        self._undisturbed: dict[str, Run] = {}

    def undisturbed(self, place: str) -> Run:
        """Return the second of two runs without a kill and without checkpoints."""
        if place not in self._undisturbed:
            folder = self._folder / place
            folder.mkdir()
            for _ in range(2):
                began = time.monotonic()
                found = self._train(place, folder, None)
                self._undisturbed[place] = Run(found, False, time.monotonic() - began)
        return self._undisturbed[place]

    def run(self, place: str, folder: Path, every: Any, is_of_driver: bool) -> Run:
        """Run a training with the schedule in its folder."""
        began, printed = time.monotonic(), io.StringIO()
        try:
            with redirect_stdout(printed):
                if is_of_driver:
                    was_interrupted = self._lose_driver(place, folder, every)
                    found = self._train(place, folder, every, resume=True)
                else:
                    found = self._train(place, folder, every, restarts=1)
                    was_interrupted = _AGAIN in printed.getvalue()
        finally:
            if self._cluster is not None:
                self._cluster.revive()
        return Run(found, was_interrupted, time.monotonic() - began)

    def _train(self, place: str, folder: Path, every: Any, **settings: Any) -> Any:
        if place == "sparklyr":
            return self._in_r().train(folder, every)
        target = "local" if place == "local" else self._spark()
        data = case.rows() if place == "local" else target.read.parquet(str(self._rows()))
        return case.train(target, data, str(folder), every, **settings)

    def _lose_driver(self, place: str, folder: Path, every: Any) -> bool:
        """Return whether the driver was killed before it ended."""
        addresses = ["", ""]
        if place == "spark":
            self._spark()
            assert self._cluster is not None
            addresses = [self._cluster.master, self._cluster.driver]
        given = json.dumps([str(folder), str(self._rows()), *addresses, every])
        command = [sys.executable, str(HERE / "recovery_case.py"), given]
        with (folder / "driver.log").open("wb") as log:
            ended = subprocess.run(
                command, stdout=log, stderr=log, start_new_session=True, timeout=_LIMIT
            )
        if ended.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError((folder / "driver.log").read_text()[-3000:])
        return ended.returncode != 0

    def _spark(self) -> Any:
        if self._session is None:
            self._session = self._stack.enter_context(
                self._running_cluster().session(
                    spark__cores__max=str(case.WORKERS),
                    spark__executorEnv__TF_CPP_MIN_LOG_LEVEL="3",
                )
            )
        return self._session

    def _in_r(self) -> _InR:
        if self._r is None:
            log = self._folder / "r.log"
            self._r = self._stack.enter_context(_r_session(self._running_cluster(), log))
        return self._r

    def _running_cluster(self) -> Cluster:
        if self._cluster is None:
            made = standalone_cluster(self._folder / "cluster")
            self._cluster = self._stack.enter_context(made)
        return self._cluster

    def _rows(self) -> Path:
        """Folder of the rows, which Spark reads from files.

        A frame created in the session would have one part per executor at that time, so the
        assignment of its rows to workers would differ.
        """
        path = self._folder / "rows"
        if not path.exists():
            import pyarrow as pa
            import pyarrow.parquet as pq

            path.mkdir()
            x, y = case.rows()
            pq.write_table(pa.table({"x": list(x), "label": y}), path / "rows.parquet")
        return path


class _InR:
    """R session that trains by `spark_apply()`, with a line of JSON for each training."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def train(self, folder: Path, every: Any) -> Any:
        """Train in R like `recovery_case.train`, and print R's output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "every": every}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line == "done\n":
                return json.loads((folder / "found.json").read_text())
            print(line, end="")
        raise RuntimeError("R exited")


@contextmanager
def _r_session(cluster: Cluster, log: Path) -> Iterator[_InR]:
    environment = {**os.environ, **cluster.variables_for_r()}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["Rscript", "-e", CONNECT_IN_R + IN_R],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            yield _InR(process)
        finally:
            process.stdin and process.stdin.close()
            process.wait(timeout=60)


def draw(kind: str, seed: int, number: int) -> case.Schedule:
    """Return a schedule, always the same for the same arguments."""
    random = np.random.default_rng([seed, list(KINDS).index(kind), number])
    return case.Schedule(
        victim=str(random.choice(KINDS[kind].victims)),
        rank=int(random.integers(case.WORKERS)),
        step=int(random.integers(-1, case.EPOCHS * case.STEPS)),
        delay=round(float(random.uniform(0, _LATEST_DELAY)), 4),
        every=[1, 3, "epoch", "0.01s"][random.integers(4)],
    )


def measure(rounds: int, seed: int | None = None, kinds: Sequence[str] = ()) -> dict[str, Table]:
    """Run schedules of each kind, and count the interrupted and the equal runs."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    print(f"schedules of seed {seed}", flush=True)
    table: Table = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-")))
        places = Places(stack, folder)
        for name in kinds or KINDS:
            table[KINDS[name].title] = _measure_kind(places, folder, name, seed, rounds)
    return {TITLE: table}


def _measure_kind(places: Places, folder: Path, name: str, seed: int, rounds: int) -> Any:
    undisturbed = places.undisturbed(KINDS[name].place)
    runs = []
    for number in range(rounds):
        own = folder / f"{name}-{number}"
        own.mkdir()
        schedule = draw(name, seed, number)
        (own / "schedule.json").write_text(json.dumps(asdict(schedule)))
        is_of_driver = schedule.victim in ("driver", "group")
        try:
            run = places.run(KINDS[name].place, own, schedule.every, is_of_driver)
        except Exception as error:
            run = Run(f"{type(error).__name__}: {error}", True, 0.0)
        runs.append(run)
        how = "interrupted" if run.was_interrupted else "not interrupted"
        verdict = "equal" if run.found == undisturbed.found else f"NOT EQUAL: {run.found}"
        print(f"{name} {number}: {schedule}: {how}, {run.seconds:.0f} s, {verdict}", flush=True)
    lost = [run.seconds - undisturbed.seconds for run in runs if run.was_interrupted] or [0.0]
    return {
        "schedules": rounds,
        "interrupted": sum(run.was_interrupted for run in runs),
        "equal": sum(run.found == undisturbed.found for run in runs),
        "lost_s_p50": float(np.percentile(lost, 50)),
        "lost_s_p95": float(np.percentile(lost, 95)),
    }


def main() -> None:
    """Measure, print, and write the table to the results of all benchmarks."""
    import run

    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--schedules", type=int, default=20, help="schedules per kind (default: 20)"
    )
    parser.add_argument("--seed", type=int, help="seed of the schedules (default: random)")
    parser.add_argument(
        "--only", choices=KINDS, nargs="+", default=[], help="run these kinds, keep the other rows"
    )
    asked = parser.parse_args()
    results = run.kept()
    found = measure(asked.schedules, asked.seed, asked.only)[TITLE]
    results[TITLE] = {**results.get(TITLE, {}), **found} if asked.only else found
    run.print_table(TITLE, results[TITLE])
    run.RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    if any(row["equal"] != row["schedules"] for row in found.values()):
        sys.exit("some runs are not equal: see above")


if __name__ == "__main__":
    main()
