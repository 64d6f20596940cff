"""Writes docs/exactness.md: what equals one process, and what is refused, as the tests show it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exactness.md"
# Modules of cases, and what their tables are headed with.
EQUAL = {
    "test_exact_cases": "Optimizers, losses, metrics, layers and ways to train",
    "test_exact_keras": "Every other optimizer, schedule, loss, metric and callback of Keras",
    "test_exact_together": "Losses, metrics and statistics of global batches; several optimizers",
    "test_transfer": "Models whose file of Keras's forgets what they are",
}
REFUSED = {
    "test_engine": "Refused for what the model consists of",
    "test_audit": "Ended by the audit",
}
_HEAD = """# Exactness, case by case

[Exact training](exact-training.md) explains how workers reach the weights of one process. This page
has the evidence.

Written by `make exactness`, which runs the cases below; the tests hold the page to them. A case
is trained by two workers and by one process on the same batches (`pybackend.replay_batches`).
Equal means: every weight is within the tolerance of its test (1e-6 for most; 1e-5 if an optimizer
divides by the root of small numbers), and so are loss and metrics of each epoch. The figure is
the largest difference of a weight, rounded up to a power of ten: float32 sums in another order
differ so much. What is noted is said when the training begins, in words that begin as those
beside it. What is refused, or ended by the audit after a step, is an error whose words begin as
those beside it.

Equal, and not in the tables, since they have tests of their own: every way of giving rows
(arrays, data frames, Spark, files, `tf.data`, functions), every way to start workers, and steps
at the rates of `scale_lr`. Not equal, and documented: dropout and other random layers, whose
numbers each worker draws for its own rows (repeated by the seed); batch normalization without
`synchronized=True`, which normalizes by a worker's own rows; `LocalSteps`, and
`Exchange(compression=)`.

## The audit

The tables are of our models; an audit is of yours. In each training with `Exchange` some steps
are taken twice: by the workers, and then by one process, on the same rows. All rows of the step
go to rank 0. It puts back every variable as it was before the step, takes the model's own,
unchanged `train_step` on the global batch, notes what becomes of the variables, and puts back
what the workers have made of them, bit for bit. Nothing is assumed about losses, layers, metrics
or a `train_step`.

**When**: the first step of the first epoch, its last one if it has another number of rows, and
the 1,000th, 10,000th and 100,000th; the first step of the second epoch; of later epochs as many
steps, the first among them and the others at other places each time, as take 2 % of the time, and
in any case two of the third, fifth, ninth epoch and so on. A step in which no weight changes says
nothing: a later one is taken. Steps whose gradients the optimizer accumulates, or which one call
executes together, are compared together. Of the batches of a function `data` the first of an
epoch is kept.

**What is compared** is the change of each variable: weights, the optimizers' state (moments are
gradients, so these are compared, too), counters, moving averages, and, added up over the
workers, metrics. Left out are the generators of random numbers and the moving statistics of
batch normalization without `synchronized=True`; such a layer normalizes in the one process by
the rows of each worker, too. On GPUs, which round to three digits (TF32) and add up in no fixed
order, all workers take the step once more, outside of XLA, with all digits, and recurrent
layers without cuDNN, and that is compared. If a step draws random numbers, all workers take it
once more, outside of the function that was traced, with constants in their place: each draw of
Keras (dropout, sampling, augmentation, `keras.random`) and of `tf.random` becomes one number,
the same for all rows, and that step is compared; at first with a number high in its range and
with one low in it (what happens to one row in a hundred happens to all or to none), later with
either in turn. With `compression` the step is taken once more without it.

**State that steps keep** in variables which no optimizer trains (moving averages, codebooks,
centres, counters, of layers, losses and `train_step`s, also as a `tf.Variable`) is that of one
process after each step: what moves by a mean over rows by the mean of the workers' moves,
weighted by their rows; what moves alike on all workers that have rows, so on those that have
none. What moves in other ways (by a largest value, say) differs, and is an error. On GPUs the
weights of two workers may drift apart by rounding: after each epoch all go on with worker 0's,
and a note says so.

**What is not**: steps that draw in other ways (by numpy, `tf.random.gamma`); more than 128 steps
that are executed together; custom layers, losses and train_steps that run eagerly, since they may
change Python attributes; steps after a callback has changed attributes of layers, which the
traced step does not look at, or anything else that it reads in Python; validation; batches of a
function whose arrays differ in their rows. `audit.skipped` and a note say what was not, and why.
Where a step is taken once more, it is the model's `train_step`, not what TensorFlow or XLA has
compiled of it.

**Tolerance**: a difference may be 2e-5 of the change (2^-8 for float16, 2^-5 for bfloat16), and
the rounding of the variable. A larger one is set against what one process shows itself: its
weights, its rows, and the outputs of its layers with their gradients are moved by 2^-22 of
their size (2^-11 for float16, 2^-8 for bfloat16) at random, up to ten times, and a difference
is an error if it is more than eight times as large as the largest of these. Where an optimizer
keeps something for a weight that shows its gradient, and that is equal but for elements which
are nothing but rounding errors, these elements of the weight are not compared. So an Adam that
divides rounding errors by their own size does not raise a false alarm. What differs by less is
not found: a row in 50,000 that counts twice, say.

**A difference** ends the training before the next step, with an error that names variables, by
how much, and what to do; with `Exchange(audit="warn")` it is a note. `audit=False` compares
nothing, and then nothing else finds a loss that is no mean over rows. `LocalSteps` and
asynchronous training, which are not exact, have no audit.

`result.audit` has the numbers of steps and rows and the largest relative difference; `print()`,
`summary()` and the report show them: `audited on 9 of 3,000 steps against one process: largest
relative difference 3e-07`.
"""


def write_page(found: list[dict[str, object]]) -> str:
    """The page, from the outcomes that tests have noted."""
    parts = [_HEAD]
    for module, title in EQUAL.items():
        parts.append(f"## {title}\n\n| case | equal, within | noted |\n|---|---|---|")
        parts += [
            f"| {o['name']} | {_bound(o['shown'])} | {_join(o['notes'])} |"
            for o in found
            if o["module"] == module
        ]
        parts.append("")
    for module, title in REFUSED.items():
        parts.append(f"## {title}\n\n| case | refused |\n|---|---|")
        parts += [f"| {o['name']} | {_words(o['shown'])} |" for o in found if o["module"] == module]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _bound(difference: object) -> str:
    number = float(str(difference))
    return "0" if number == 0 else f"1e{math.ceil(math.log10(number))}"


def _join(notes: object) -> str:
    assert isinstance(notes, list)
    return "; ".join(dict.fromkeys(map(_words, notes)))


def _words(message: object) -> str:
    first = str(message).partition(": ")[0]
    return first.replace("|", "\\|")


def main() -> int:
    """Run the cases and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "noted")
        files = [f"tests/python/{module}.py" for module in (*EQUAL, *REFUSED)]
        chosen = "reaches or was_passed or refused or ends_the_training"
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-k", chosen, *files],
            cwd=ROOT,
            env={**os.environ, "TFDIST_EXACTNESS": str(noted)},
            check=False,
        )
        if ended.returncode:
            return ended.returncode
        found = [json.loads(line) for line in noted.read_text().splitlines()]
    PAGE.write_text(write_page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
