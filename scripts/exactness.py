"""Write docs/exactness.md: what equals one process and what raises an error, from the tests."""

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
# Modules of cases, and the headings of their tables.
EQUAL = {
    "test_exact_cases": "Optimizers, losses, metrics, layers and ways to train",
    "test_exact_keras": "Every other optimizer, schedule, loss, metric and callback of Keras",
    "test_exact_together": "Losses, metrics and statistics of global batches; several optimizers",
    "test_transfer": "Models that a Keras file does not describe completely",
}
REFUSED = {
    "test_engine": "Models that raise an error before training",
    "test_audit": "Training runs that the audit stops",
}
_HEAD = """# Exactness, case by case

[Exact training](exact-training.md) explains how several workers reach the same weights as one
process. This page contains the evidence.

`make exactness` runs the cases below and writes this page; the tests check that it is current. Two
workers and one process train each case on the same batches (`pybackend.replay_batches`).

- **Equal, within** shows the largest difference in any weight, rounded up to a power of ten. The
  difference arises because float32 sums are computed in a different order. A case counts as equal
  if all weights, and the loss and metrics of each epoch, are within the tolerance of its test: 1e-6
  for most, 1e-5 if an optimizer divides by the root of small numbers.
- **Note** shows the beginning of a note that appears when training starts.
- **Error** shows the beginning of an error that is raised before training or after an audited step.

Some cases are equal but not in the tables, because they are tested separately: every kind of data
(arrays, data frames, Spark, files, `tf.data`, functions), every launcher, and the learning rates of
`scale_lr`.

These cases are not equal:

- Dropout and other random layers: each worker draws numbers for its own rows. They are repeatable
  with a `seed`.
- Batch normalization without `synchronized=True`: it uses a worker's own rows.
- `LocalSteps` and `Exchange(compression=)`.

## The audit

The tables cover our models. The audit checks yours. In each training run with `Exchange`, some
steps are taken twice on the same rows: by the workers, and by one process. Rank 0 receives all rows
of the step and does this:

1. It restores every variable from before the step.
2. It runs the model's own, unchanged `train_step` on the global batch, and records the variables.
3. It restores the workers' result, bit for bit.

The audit makes no assumptions about losses, layers, metrics or a `train_step`.

### Audited steps

- **First epoch:** the first step, and the last step if it has a different number of rows.
- **Second epoch:** the first step, as long as audits take less than a tenth of the time so far.
- **Any epoch:** as many steps as fit into 2 % of the time, and a quarter of a second in any case.
  They are spread over the epoch, and begin at another step in each epoch.
- **After a callback has changed a small variable** between two epochs, such as the weight of a
  loss: the next step.

The rows of all steps are checked: see [the ledger](#the-start-and-the-ledger-of-rows). If no
weight changes in a step, a later step is audited. If the optimizer accumulates gradients over
several steps, or one call executes several steps, these steps are compared together. With a `data`
function, the first batch of an epoch is audited.

### What is compared

The single process computes its own gradients, but its optimizer applies those of the workers. So
three things are compared:

1. **The gradients that the optimizer gets**, variable by variable: the workers' mean and that of
   one process. What an optimizer makes of them does not matter: Adam divides a gradient by its
   typical size, so a gradient of rounding errors moves a weight as far as a real one.
2. **Weights and the optimizers' state after the update.** They come from the same gradients, so
   they are nearly equal bit for bit.
3. **Everything else that changes:** counters, moving averages, codebooks, and metrics summed over
   the workers.

After the first step of an epoch, two more things are compared: the logs that the workers merge, and
the moving statistics of batch normalization, with the mean of all workers weighted by rows. Both
are merged by the same code at the end of each epoch.

Random generators are left out, and the moving statistics of batch normalization without
`synchronized=True`. In the single process, such a layer also normalizes over each worker's rows
separately.

In some cases, all workers repeat the step, and the repeated step is compared with one process:

- **GPUs** round to three digits (TF32) and sum in no fixed order. The step runs again in full
  precision, without XLA, and without cuDNN in recurrent layers.
- **Half precision:** layers that compute in float16 or bfloat16 compute in float32.
- **Random numbers** are replaced with constants, outside the traced function. Each random draw by
  Keras (dropout, sampling, augmentation, `keras.random`) or by `tf.random` becomes one number for
  all rows. The first audit takes one step with a high number and one with a low number, so that an
  event that affects one row in a hundred happens in all rows or in none. Later audits alternate
  between the two.
- **`compression`** is switched off when the step runs again.

Then the step that trained is checked, too. Each worker repeats it with its own rows, random numbers
and types, and compares its gradients with those that it sent. Random projections of all gradients,
a few numbers per variable, show whether the mean is that of all workers (Johnson and Lindenstrauss,
1984). And each worker's optimizer makes its update again. Not checked are the gradients of this
step if XLA or a global generator draws its random numbers, or if a worker has no rows in it, and
the mean of gradients that are accumulated over several steps. `audit.left_out` names what is left
out.

The step that runs again is the model's `train_step`, not the version that TensorFlow or XLA
compiled.

### The start, and the ledger of rows

Each worker compares the weights, and the optimizer's state, with a digest of what the session sent.
A class that changes weights when it is loaded, or another release of Keras, ends the call.

While it reads rows to train on, each worker adds up hashes of their numbers, step by step. At the
end of each epoch, the sums of all workers must be those of the batches that `replay_batches` lists.
So a row that is read twice, never, or in another step ends the training. This covers all steps, and
takes less than 1 % of the time. The ledger knows numbers of rows, not their contents. It has no
rows of a `data` function, and not those of steps that a worker group took before one of its workers
was lost.

### State without an optimizer

Some variables change without an optimizer: moving averages, codebooks, centers and counters of
layers, losses and `train_step`s, even if they are plain `tf.Variable`s. After each step, they have
the same values as in one process:

- If the change of a variable is a mean over rows, all workers apply the mean of the workers'
  changes, weighted by the number of rows on each.
- If a variable changes by the same amount on all workers with rows, workers without rows apply the
  same change.
- If a variable changes in any other way, such as by a maximum, training raises an error.

On GPUs, the weights of two workers may drift apart because of rounding. In that case, all workers
continue with the weights of worker 0 after each epoch, and a note reports this.

### What is not audited

- steps that draw random numbers in other ways (numpy, `tf.random.gamma`)
- groups of more than 128 steps that are executed together
- custom layers, losses and train_steps that run eagerly, because they may change Python attributes
- steps after a callback has changed attributes of layers, or anything else that the traced step
  reads in Python, and steps that change such values themselves
- validation
- in half precision, steps whose traced code rounds differently from the same code outside of a
  graph
- batches from a `data` function, if their arrays have different numbers of rows

`audit.skipped` and a note report what was not audited, and why.

### Three verdicts

- **Equal:** gradients differ by at most 2e-5 of their size, variables by at most 2e-5 of their
  change (updates of optimizers: 2e-4), plus the rounding error of their type. Pure float16 and
  bfloat16 variables have larger tolerances (2^-8 and 2^-5).
- **Different:** an error.
- **Undecided:** the step could not be compared, or is so ill-conditioned that float32 itself says
  nothing. A note and `audit.skipped` give the reason.

Rounding has no fixed size. A float32 sum over 8,000 rows differs by 3e-5 between one sum and two
halves in the same process. So a larger difference is measured against one process itself: the same
step runs once more with all layers in float64. A value is equal if its distance from the
float64 value is at most eight times that of the float32 value, and if the latter is below 1e-3
of its size. It is undecided if float32 is further away than that. If a layer cannot compute in
float64, the same rows in another order are the measure, on the norm of the whole gradient. Rows are
never changed: they have no rounding errors, and a comparison such as `y == 1.0` would give another
loss.

Some gradients are zero except for rounding errors, such as that of a bias before a normalization or
of an attention key. They may differ by 1e-6 of the norm of the whole gradient. `audit.zeros` has
the largest such difference.

If rounding errors grow through a deep network, so that float32 and float64 differ by more than 1e-3
of the whole gradient, no gradient distinguishes an error from rounding: they are undecided.

Differences within the tolerance are not detected: for example, if one row in 50,000 counts twice in
a loss.

### What the audit finds

The audit is audited. The tests train ordinary models and tables, losses that combine rows, and
models with a fault in the workers' own code: in the exchange, the traced step, the reading and the
order of rows, the merge of logs and statistics, the start, and the parts of an optimizer. An error
counts if it moves the weights by more than 1e-3 of their change (half precision: 2e-2), or the
history.

| Training | Trained | Relative error | Different | Undecided | Equal |
|---|---:|---|---:|---:|---:|
| ordinary models | 124 |  | 0 | 2 | 122 |
| tables of 2 to 50,000 rows per worker | 30 |  | 0 | 0 | 30 |
| losses that combine rows | 87 |  | 86 | 1 | 0 |
| fault: gradients scaled | 16 | 0.003 to 1 | 16 | 0 | 0 |
| fault: gradients with errors | 15 | 0.002 to 0.3 | 15 | 0 | 0 |
| fault: a worker dropped | 19 | 0.004 to 0.9 | 19 | 0 | 0 |
| fault: a worker delayed | 8 | 0.007 to 0.3 | 8 | 0 | 0 |
| fault: workers not weighted | 2 | 0.03 to 0.3 | 2 | 0 | 0 |
| fault: rows miscounted | 8 | 0.02 to 0.4 | 8 | 0 | 0 |
| fault: a bucket of zeros | 9 | 0.002 to 0.6 | 9 | 0 | 0 |
| fault: a stale bucket | 9 | 0.006 to 0.3 | 9 | 0 | 0 |
| fault: gradients swapped | 9 | 0.006 to 0.9 | 9 | 0 | 0 |
| fault: sparse rows dropped | 3 | 0.2 to 1 | 3 | 0 | 0 |
| fault: sparse rows misplaced | 3 | 0.4 to 0.4 | 3 | 0 | 0 |
| fault: accumulated gradients scaled | 2 |  | 2 | 0 | 0 |
| fault: a compressed sum | 2 |  | 2 | 0 | 0 |
| fault: traced: gradients scaled | 14 |  | 14 | 0 | 0 |
| fault: traced: a kernel unmoved | 13 | 0.08 to 0.8 | 13 | 0 | 0 |
| fault: traced: stale gradients | 10 | 0.03 to 0.6 | 10 | 0 | 0 |
| fault: read: rows twice | 8 | 0.1 to 0.6 | 8 | 0 | 0 |
| fault: read: rows of another step | 8 | 0.1 to 0.7 | 8 | 0 | 0 |
| fault: read: another order | 8 | 0.06 to 0.5 | 8 | 0 | 0 |
| fault: order: rows twice | 8 | 0.1 to 0.6 | 8 | 0 | 0 |
| fault: order: rows of another step | 4 | 0.3 to 0.7 | 4 | 0 | 0 |
| fault: order: another order | 4 | 0.1 to 0.5 | 4 | 0 | 0 |
| fault: metrics not merged | 4 | 0.006 to 0.4 | 4 | 0 | 0 |
| fault: loss misweighted | 2 | 0.05 to 0.5 | 2 | 0 | 0 |
| fault: another start | 12 |  | 12 | 0 | 0 |
| fault: another optimizer's state | 6 |  | 6 | 0 | 0 |
| fault: statistics of one worker | 2 | 0.005 to 0.05 | 2 | 0 | 0 |
| fault: counts with wrong weights | 2 | 0.005 to 0.05 | 2 | 0 | 0 |
| fault: a part of another worker | 3 | 0.007 to 0.6 | 3 | 0 | 0 |

`python -m pytest tests/python/test_audit_suite.py` repeats this.

### If a difference is found

Training stops before the next step. The error names the variables and the size of the difference,
and explains what to do. If one process that computes each worker's rows separately gets another
mean than the workers, the error reports that the fault is in tfdist. With `Exchange(audit="warn")`,
a note appears instead. With `audit=False`, nothing is compared, and a loss that is not a mean over
rows goes undetected. `LocalSteps` and asynchronous training are not exact and are not audited.

`result.audit` contains the number of steps and of rows, and the largest relative difference.
`print()`, `summary()` and the report show them: `audited on 9 of 3,000 steps against one process:
largest relative difference 3e-07`.
"""


def write_page(found: list[dict[str, object]]) -> str:
    """Return the page, from the outcomes that the tests recorded."""
    parts = [_HEAD]
    for module, title in EQUAL.items():
        parts.append(f"## {title}\n\n| Case | Equal, within | Note |\n|---|---|---|")
        parts += [
            f"| {o['name']} | {_bound(o['shown'])} | {_join(o['notes'])} |"
            for o in found
            if o["module"] == module
        ]
        parts.append("")
    for module, title in REFUSED.items():
        parts.append(f"## {title}\n\n| Case | Error |\n|---|---|")
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
