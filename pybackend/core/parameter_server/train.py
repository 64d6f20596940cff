"""One process in asynchronous training, for all roles."""

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

from pybackend.core.data.layout import check_layouts, read_layouts
from pybackend.core.data.reading import read_sources
from pybackend.core.data.row_store import unify_layout
from pybackend.core.engine.train import Training
from pybackend.core.errors import ClusterError
from pybackend.core.function.call import take_part
from pybackend.core.job.context import Gather
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, Order, Phase
from pybackend.core.net.rendezvous import find_unreachable
from pybackend.core.parameter_server.chief import start_server, train_as_chief
from pybackend.core.parameter_server.shares import write_shares
from pybackend.core.tf_config import config_of


def train_asynchronously(
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

    Parameters
    ----------
    server
        The socket on which this process listens; this function closes it.
    end
        Called in a thread of a server when the chief has trained: with None and the values to
        report, by name, or with the error if the chief was lost.
    answers
        Messages from observers of the training run to the chief.
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
        if rank:
            shutil.rmtree(folder / "train")
            done.update(rows=counts["train"][rank])
            _server = start_server(folder)  # lives as long as this process
        gather("start of the servers", "")
        if rank:
            threading.Event().wait()  # for as long as the chief needs it
        return train_as_chief(job, folder, counts, order.peers, emit, answers)

    def on_end(error: Exception | None) -> None:
        end(error, seconds=time.monotonic() - began, **done)

    return take_part(job, rank, server, order, call, on_end)


def _settle(folder: Path, gather: Gather) -> dict[str, list[int]]:
    """Make the layouts of all ranks' rows equal; return the ranks' row counts by data set."""
    everyone = [json.loads(text) for text in gather("rows", json.dumps(read_layouts(folder)))]
    check_layouts(everyone)
    counts = {}
    for name in everyone[0]:
        layouts = [layouts[name] for layouts in everyone]
        unify_layout(folder / name, layouts)
        counts[name] = [layout["rows"] for layout in layouts]
    return counts
