"""Servers in asynchronous training: workers, which take steps, and parameter servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

# Operations wait for those of other servers, each in a thread.
LEAST_THREADS = 4


def start_server(folder: Path) -> Any:
    """Start TensorFlow's server of the role in TF_CONFIG, in a folder."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    os.chdir(folder)  # the chief names files relative to it
    return tf.distribute.Server(
        resolver.cluster_spec(),
        resolver.task_type,
        resolver.task_id,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=count_threads()),
    )


def count_threads() -> int:
    """Return the number of threads for parallel operations."""
    return max(LEAST_THREADS, os.cpu_count() or 1)
