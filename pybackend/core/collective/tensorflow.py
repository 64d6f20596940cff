"""TensorFlow's own collectives: sums inside the graph, using NCCL between GPUs.

Not imported with the package: it loads TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pybackend.core.tf_config import make_tf_config

# TensorFlow's key for the group of this job's workers; each process is in only one.
_GROUP = 1


def start_runtime(addresses: Sequence[str], rank: int, timeout: float) -> None:
    """Connect the TensorFlow runtimes of all workers, before anything else uses TensorFlow.

    TensorFlow's own servers will listen at ``addresses``, ``host:port`` per rank. After ``timeout``
    seconds, a silent peer makes a collective fail.
    """
    os.environ["TF_CONFIG"] = make_tf_config(list(addresses), rank)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout)
    # Its constructor starts the servers and waits for all of them; the strategy is not used.
    tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


class GraphReduce:
    """Sum of tensors over all workers, as part of a TensorFlow graph.

    The sums of one step run one after another, in the same order on all workers.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._hint = "nccl" if tf.config.list_logical_devices("GPU") else "ring"
        # TensorFlow distinguishes one sum from the next by this number.
        self._number = tf.Variable(0, dtype=tf.int32, trainable=False)

    def all_reduce(self, tensor: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self._world_size,
            group_key=_GROUP,
            instance_key=self._number.assign_add(1),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._hint,
            timeout_seconds=self._timeout,
        )
