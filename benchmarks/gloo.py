"""One of two processes that all-reduce by torch's Gloo; a Python with torch runs this file.

Arguments: rank, port, and the sizes of `collective.SIZES` as JSON. Prints milliseconds as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import distributed


def main(rank: int, port: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Measure as `collective.timed` does: the median of runs after one that warms up."""
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found = {}
    for column, (size, times) in sizes.items():
        buffer = torch.full((size // 4,), 1e-6)
        seconds = []
        for _ in range(times + 1):
            began = time.perf_counter()
            distributed.all_reduce(buffer)
            seconds.append(time.perf_counter() - began)
        found[column] = 1e3 * statistics.median(seconds[1:])
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
