"""Stages for pipelines of Spark ML: a Keras model that is trained, and one that predicts."""

from pybackend.ml.estimator import KerasEstimator
from pybackend.ml.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
