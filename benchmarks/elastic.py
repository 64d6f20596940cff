"""Seconds lost when a worker of an elastic training is killed, compared with a step.

Four workers train one epoch of the small CNN. Three of them are killed, one after another: which
ones, at which steps, and how long after a step is drawn at random. The lost time begins with the
kill and ends with the first step of the remaining workers; one of their other steps is subtracted.
This machine, and the hosts of the tests: network namespaces of this machine, with real ssh servers
or a real Slurm. Needs root. Spark is missing, because its workers are fixed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
from step import network

import pybackend

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from slurm import slurm_cluster
from sshd import ssh_hosts

Plan = dict[int, tuple[int, float]]
WORKERS, BATCH, SEED = 4, 16, 1
# Steps between two kills, and the largest additional number of steps and seconds.
BETWEEN, MORE_STEPS, MORE_SECONDS = 15, 5, 0.1
TITLE = "a worker of an elastic training is killed, 4 workers at first"


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Percentiles over all kills, with ``rounds`` trainings of three kills for each route."""
    table = {}
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as name:
        # One network of hosts at a time.
        for title, open_route in ROUTES.items():
            folder = Path(name, title.partition("(")[0].replace(" ", "-"))
            folder.mkdir()
            with open_route(folder) as target:
                table[title] = _measure_route(target, folder, rounds)
    return {TITLE: table}


@contextmanager
def _this_machine(folder: Path) -> Iterator[Any]:
    yield "local"


@contextmanager
def _over_ssh(folder: Path) -> Iterator[Any]:
    with ssh_hosts(["a", "b"], folder) as there:
        yield pybackend.hosts("a:2,b:2", ssh_options=there.options)


@contextmanager
def _by_slurm(folder: Path) -> Iterator[Any]:
    with slurm_cluster() as cluster:
        # With these variables, Slurm's commands work in this process.
        os.environ.update(cluster.variables)
        yield pybackend.slurm(folder=folder / "jobs")


ROUTES = {
    "this machine": _this_machine,
    "hosts(), two hosts": _over_ssh,
    "slurm(), a job per worker": _by_slurm,
}


def _measure_route(target: Any, folder: Path, rounds: int) -> dict[str, float]:
    lost, steps = [], []
    for number in range(rounds):
        own = folder / f"round-{number}"
        own.mkdir()
        plan = draw(number)
        train(target, own, plan)
        for seconds, step in read(own, plan):
            lost.append(seconds)
            steps.append(step)
    return {
        "kills": len(lost),
        "step_ms": 1e3 * float(np.median(steps)),
        "lost_s_p50": float(np.percentile(lost, 50)),
        "lost_s_p95": float(np.percentile(lost, 95)),
    }


def draw(number: int) -> Plan:
    """Return the step and the delay of each kill, by the number of the worker."""
    random = np.random.default_rng([SEED, number])
    victims = random.permutation(WORKERS)[: WORKERS - 1].tolist()
    return {
        victim: (
            BETWEEN * (1 + place) + int(random.integers(MORE_STEPS)),
            float(random.uniform(0, MORE_SECONDS)),
        )
        for place, victim in enumerate(victims)
    }


def train(target: Any, folder: Path, plan: Plan) -> None:
    """Train, with the times of all steps and kills in files of the folder."""

    class Strikes(keras.callbacks.Callback):  # type: ignore[misc]
        """Writes the time of each step, and kills its own process as planned."""

        def write(self, what: str) -> None:
            with open(f"{folder}/times-{os.environ['TFDIST_WORKER']}", "a") as file:
                file.write(f"{what} {time.time()}\n")

        def on_train_begin(self, logs: Any = None) -> None:
            self.write("begin")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.write("step")
            number = int(os.environ["TFDIST_WORKER"])
            step, delay = plan.get(number, (-1, 0.0))
            if int(self.model.optimizer.iterations.numpy()) == step:
                order = f"sleep {delay}; date +%s.%N >{folder}/killed-{number}"
                command = ["sh", "-c", f"{order}; kill -9 {os.getpid()}"]
                subprocess.Popen(command, start_new_session=True)

    count = BATCH * sum(range(1, WORKERS + 1)) * (BETWEEN + 2 * MORE_STEPS)
    pybackend.barrier_train(
        target,
        network(keras),
        (np.zeros((count, 28, 28, 1), "float32"), np.zeros(count)),
        batch_size=BATCH,
        workers=pybackend.Elastic(WORKERS),
        callbacks=[Strikes()],
        seed=SEED,
        verbose=0,
    )


def read(folder: Path, plan: Plan) -> list[tuple[float, float]]:
    """Return the seconds lost by each kill, and the seconds of a step of the remaining workers."""
    (survivor,) = set(range(WORKERS)) - set(plan)
    lines = (folder / f"times-{survivor}").read_text().splitlines()
    generations: list[list[float]] = []
    for what, text in map(str.split, lines):
        if what == "begin":
            generations.append([float(text)])
        else:
            generations[-1].append(float(text))
    found = []
    for victim in plan:
        killed = float((folder / f"killed-{victim}").read_text())
        _, *steps = next(times for times in generations if times[0] > killed)
        step = float(np.median(np.diff(steps)))
        found.append((steps[0] - killed - step, step))
    return found


if __name__ == "__main__":
    for title, rows in measure(1).items():
        print(title, *rows.items(), sep="\n  ")
