"""One of several processes that train together, started as by a user; prints its result."""

import json
import os
import signal
import sys

import numpy as np

import pybackend


def build():
    import keras

    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def build_seeded():
    import keras

    keras.utils.set_random_seed(1)
    return build()


def fail_to_read(context):
    """Return data, or fail on rank 0 while the others wait for it."""
    import tensorflow as tf

    if context.rank == 0:
        raise ValueError("no such file")
    return tf.data.Dataset.from_tensor_slices(make_rows(8)).batch(4)


def make_rows(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 8)).astype("float32"), rng.integers(0, 3, rows)


def break_when(rank, how):
    """Return a model, or fail on this rank in the requested way."""

    def build_broken():
        if os.environ["TFDIST_RANK"] != str(rank):
            return build()
        if how == "raise":
            raise ValueError("no such luck")
        if how == "stop":
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
        if how == "differ":
            import keras

            model = build()
            model.compile(keras.optimizers.SGD(0.5), model.loss)
            return model
        return build()

    return build_broken


def main(
    index,
    addresses=None,
    calls=1,
    rows=60,
    breaks=None,
    resources=None,
    recovery=None,
    model_options=None,
    value_bytes=None,
    fails_to_read=False,
    kill_at=None,
    **options,
):
    if addresses:
        pybackend.join(addresses, index)
    if value_bytes:
        values = pybackend.barrier_run(None, lambda context: bytes(value_bytes))
        return print(json.dumps([len(value) for value in values]))
    if kill_at:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        from killing import KillAt

        options["callbacks"] = [KillAt(*kill_at)]
    if resources:
        options["resources"] = pybackend.Resources(**resources)
    if recovery:
        options["recovery"] = pybackend.Recovery(**recovery)
    if model_options:
        options["model_options"] = pybackend.ModelOptions(**model_options)
    data = fail_to_read if fails_to_read else make_rows(rows)
    model = break_when(*breaks) if breaks else build
    for _ in range(calls):
        result = pybackend.barrier_train(None, model, data, batch_size=8, **options)
    figures = pybackend.barrier_evaluate(None, build_seeded, data, verbose=0) if calls > 1 else {}
    found = {
        "digest": result.workers[0].weights_sha256,
        "model": result.model_sha256,
        "seed": result.seed,
        "history": result.history,
        "rows": [worker.rows for worker in result.workers],
        "hosts": [worker.host for worker in result.workers],
        "figures": sorted(figures),
        "model_uri": result.model_uri,
    }
    # In one piece: an unbuffered print() writes the end of a line separately, and mpiexec may
    # insert the output of another process between the two.
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
