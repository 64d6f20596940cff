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

- **First epoch:** the first step, the last step if it has a different number of rows, and steps
  1,000, 10,000 and 100,000.
- **Second epoch:** the first step.
- **Later epochs:** as many steps as fit into 2 % of the training time, but at least two in the
  third, fifth, ninth epoch and so on. One of them is the first step. The others differ from epoch
  to epoch.

If no weight changes in a step, a later step is audited. If the optimizer accumulates gradients over
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
1984). And each worker's optimizer makes its update again.Not checked are the gradients of this step
if XLA or a global generator draws its random numbers, or if a worker has no rows in it, and the
mean of gradients that are accumulated over several steps. `audit.left_out` names what is left out.

The step that runs again is the model's `train_step`, not the version that TensorFlow or XLA
compiled.

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

Differences within the tolerance are not detected: for example, if one row in 50,000 counts twice.

### If a difference is found

Training stops before the next step. The error names the variables and the size of the difference,
and says what to do. If one process that computes each worker's rows separately gets another mean
than the workers, the error says that the fault is in tfdist. With `Exchange(audit="warn")`, a note
appears instead. With `audit=False`, nothing is compared, and a loss that is not a mean over rows
goes undetected. `LocalSteps` and asynchronous training are not exact and are not audited.

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
