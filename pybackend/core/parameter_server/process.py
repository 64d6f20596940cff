"""One process in training with parameter servers, for all roles."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from pybackend.core.data.reading import read_sources
from pybackend.core.data.row_store import check_layouts, read_layouts, unify_layout
from pybackend.core.engine.train import Training
from pybackend.core.errors import ClusterError
from pybackend.core.function.call import take_part
from pybackend.core.job.context import Gather
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, Order, Phase
from pybackend.core.machine.capacity import count_cores
from pybackend.core.net.rendezvous import find_unreachable
from pybackend.core.parameter_server.blocks import write_shares
from pybackend.core.parameter_server.chief import naming_lost, train_as_chief
from pybackend.core.tf_config import config_of

# Operations wait for those of other servers, each in a thread.
_LEAST_THREADS = 4


def train_with_parameter_servers(
    job: TrainingJob,
    rank: int,
    folder: Path,
    server: socket.socket,
    order: Order,
    emit: Emit,
    end: Callable[..., object],
    answers: Answers,
) -> Training:
    """Take part in training; workers and parameter servers run until the chief has finished.

    This function closes ``server``, the socket on which this process listens. ``end`` is called in
    a thread of a server when the chief has trained: with None and the values to report, by name, or
    with the error if the chief was lost. ``answers`` has messages from observers of the training to
    the chief.
    """
    emit(Phase("reading the data"))
    os.environ["TF_CONFIG"] = config_of(job.roles, order.reserved, rank)
    read_sources(job, rank, folder, order)
    began = time.monotonic()
    done: dict[str, Any] = {}

    def call(gather: Gather) -> Training:
        emit(Phase("connecting to the other workers"))
        # TensorFlow's servers would wait for each other forever.
        others = [other for other in range(job.workers) if other != rank]
        if unreachable := find_unreachable(order.reserved, rank, others):
            raise ClusterError(unreachable)
        counts = _settle(folder, gather)
        write_shares(job, rank, folder)
        os.chdir(folder)  # the chief names files of all processes relative to their folders
        if rank:
            shutil.rmtree(folder / "train")
            done.update(rows=counts["train"][rank])
            _server = _start_server()  # lives as long as this process
        gather("start of the servers", "")
        if rank:
            threading.Event().wait()  # for as long as the chief needs it
        tf.config.threading.set_inter_op_parallelism_threads(_count_threads())
        with naming_lost(job, order.peers):
            return train_as_chief(job, folder, counts, emit, answers)

    def on_end(error: Exception | None) -> None:
        end(error, seconds=time.monotonic() - began, **done)

    return take_part(job, rank, server, order, call, on_end)


def _settle(folder: Path, gather: Gather) -> dict[str, list[int]]:
    """Make the layouts of all ranks' rows equal; return the ranks' row counts by data set."""
    everyone = [json.loads(text) for text in gather("rows", json.dumps(read_layouts(folder)))]
    check_layouts(everyone)
    for name in everyone[0]:
        unify_layout(folder / name, [layouts[name] for layouts in everyone])
    return {name: [layouts[name]["rows"] for layouts in everyone] for name in everyone[0]}


def _start_server() -> Any:
    """Start TensorFlow's server of the role in TF_CONFIG: a worker, or a parameter server."""
    own = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=_count_threads())
    task = own.cluster_spec(), own.task_type, own.task_id
    return tf.distribute.Server(*task, protocol="grpc", config=config)


def _count_threads() -> int:
    return max(_LEAST_THREADS, count_cores())
