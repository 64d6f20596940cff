"""Scaling efficiencies that others have published, of synchronous training with growing batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One figure.

    Attributes
    ----------
    source, what
        Who has published it, and of which training.
    workers, base
        GPUs, and those to which the efficiency is relative.
    efficiency
        Of 1.
    """

    source: str
    what: str
    workers: int
    base: int
    efficiency: float


_HOROVOD = "Horovod's documentation, Benchmarks: 4 GPUs a server, 25 Gbit/s"
_MXNET = "MXNet's image classification example: 16 GPUs a server, AWS p2.16xlarge"
PUBLISHED = (
    Published(
        "Goyal et al. 2017, Accurate, Large Minibatch SGD",
        "ResNet-50",
        256,
        8,
        0.90,
    ),
    Published(_HOROVOD, "Inception V3", 512, 1, 0.90),
    Published(_HOROVOD, "ResNet-101", 512, 1, 0.90),
    Published(_HOROVOD, "VGG-16", 512, 1, 0.68),
    Published(_MXNET, "ResNet-152", 256, 1, 0.87),  # 4,630 images per second, of 20.8 on one
    Published(_MXNET, "AlexNet", 256, 1, 0.53),  # 61,938, of 457
)
