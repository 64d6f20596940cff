"""The job with PySpark's TorchDistributor."""

import sys

import case
import numpy as np
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def work():
    """Train on one worker; the first one's weights are returned."""
    import torch_loop
    from torch import distributed

    distributed.init_process_group("gloo")
    found = torch_loop.train()
    distributed.destroy_process_group()
    return found


SparkSession.builder.master(f"local[{case.WORKERS}]").getOrCreate()
found = TorchDistributor(num_processes=case.WORKERS, local_mode=True, use_gpu=False).run(work)
np.savez(sys.argv[1], *found)
