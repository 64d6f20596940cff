"""Stages for Spark ML pipelines: an estimator that trains a Keras model, and its model."""

from pybackend.ml.estimator import KerasEstimator
from pybackend.ml.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
