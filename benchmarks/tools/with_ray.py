"""The job with Ray Train."""

import sys
import tempfile

import case
import numpy as np
import ray
import torch_loop
from ray import train
from ray.train.torch import TorchTrainer


def work():
    """Train on one worker, and report the weights from the first one."""
    found = torch_loop.train()
    with tempfile.TemporaryDirectory() as folder:
        if train.get_context().get_world_rank() == 0:
            np.savez(f"{folder}/weights.npz", *found)
            train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
        else:
            train.report({})


ray.init(address="local", num_cpus=case.WORKERS + 1, include_dashboard=False)
with tempfile.TemporaryDirectory() as storage:
    scaling = train.ScalingConfig(num_workers=case.WORKERS)
    run = train.RunConfig(storage_path=storage)
    result = TorchTrainer(work, scaling_config=scaling, run_config=run).fit()
    with result.checkpoint.as_directory() as folder, np.load(f"{folder}/weights.npz") as found:
        np.savez(sys.argv[1], *found.values())
