"""Results of TensorFlow's strategies with a small model: the cells of docs/strategies.md."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

EPOCHS, ROWS, BATCH = 2, 64, 16
WAYS = ("fit of Keras 3", "steps by hand, Keras 3", "fit of tf_keras")


def make_data(tf: Any) -> Any:
    """Return batches of rows whose label is their sum."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(BATCH)


def build(keras: Any) -> Any:
    """Build a model with fixed weights, and momentum, so that the optimizer's state matters."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.build((None, 4))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def fit(keras: Any, tf: Any, strategy: Any) -> Any:
    """Train with Keras in the strategy's scope; return the weights."""
    with strategy.scope():
        model = build(keras)
    steps = ROWS // BATCH
    model.fit(make_data(tf).repeat(), epochs=EPOCHS, steps_per_epoch=steps, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


def step_by_hand(keras: Any, tf: Any, strategy: Any) -> Any:
    """Train with steps as in TensorFlow's guide to its strategies; return the weights."""
    with strategy.scope():
        model = build(keras)
        model.optimizer.build(model.trainable_variables)

    def take(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(batches: Any) -> None:
        strategy.run(take, args=next(batches))

    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        batches = coordinator.create_per_worker_dataset(lambda: make_data(tf).repeat())
        batches = iter(batches)
        for _ in range(EPOCHS * ROWS // BATCH):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
    else:
        batches = iter(strategy.experimental_distribute_dataset(make_data(tf).repeat()))
        for _ in range(EPOCHS * ROWS // BATCH):
            step(batches)
    return [np.array(weight) for weight in model.get_weights()]


@functools.cache
def fit_alone() -> Any:
    """Return the reference result of all strategies."""
    tf = importlib.import_module("tensorflow")
    return fit(importlib.import_module("keras"), tf, tf.distribute.get_strategy())


def try_all(make: Callable[[Any], Any]) -> dict[str, str]:
    """Return the result of each way to train: "equal", the difference, or an error."""
    tf = importlib.import_module("tensorflow")
    keras, tf_keras = map(importlib.import_module, ("keras", "tf_keras"))
    expected = fit_alone()
    found = {}
    for way, train, library in zip(
        WAYS, (fit, step_by_hand, fit), (keras, keras, tf_keras), strict=True
    ):
        try:
            weights = train(library, tf, make(tf))
        except Exception as error:
            found[way] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            off = max(float(np.abs(a - b).max()) for a, b in zip(weights, expected, strict=True))
            found[way] = "equal" if off < 1e-6 else f"off by {off}"
    return found


def try_on_one_machine(context: Any) -> dict[str, dict[str, str]]:
    """Run the strategies of one machine, on two virtual CPU devices."""
    tf = importlib.import_module("tensorflow")
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        processor, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    both = ["CPU:0", "CPU:1"]
    made: dict[str, Callable[[Any], Any]] = {
        "OneDeviceStrategy": lambda tf: tf.distribute.OneDeviceStrategy("CPU:1"),
        "MirroredStrategy": lambda tf: tf.distribute.MirroredStrategy(both),
        "CentralStorageStrategy": lambda tf: tf.distribute.experimental.CentralStorageStrategy(
            both, "CPU:0"
        ),
        "TPUStrategy": lambda tf: tf.distribute.TPUStrategy(
            tf.distribute.cluster_resolver.TPUClusterResolver()
        ),
    }
    return {name: try_all(make) for name, make in made.items()}


def try_on_workers(context: Any) -> dict[str, str]:
    """Run the strategy of several workers, all of which call this."""
    tf = importlib.import_module("tensorflow")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # a process can have one
    return try_all(lambda tf: strategy)


def try_on_servers(context: Any) -> dict[str, str] | None:
    """Run the strategy of parameter servers, or serve as one."""
    tf = importlib.import_module("tensorflow")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if context.role != "chief":
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
        place = (resolver.cluster_spec(), context.role, context.index)
        tf.distribute.Server(*place, protocol="grpc", config=config).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return try_all(lambda tf: strategy)
