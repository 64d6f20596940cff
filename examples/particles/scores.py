"""Scores of classifiers: ROC curves, the areas under them, confusion matrices."""

from __future__ import annotations

from typing import Any

import numpy as np


def roc_curve(is_of_class: Any, scores: Any) -> tuple[Any, Any]:
    """Return false and true positive rates over all thresholds, from (0, 0) to (1, 1)."""
    is_of_class, scores = np.asarray(is_of_class, bool), np.asarray(scores)
    order = np.argsort(-scores, kind="stable")
    hits, ranked = is_of_class[order], scores[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # group equal scores
    true = np.cumsum(hits)[ends] / max(1, hits.sum())
    false = np.cumsum(~hits)[ends] / max(1, (~hits).sum())
    return np.append(0.0, false), np.append(0.0, true)


def area(false: Any, true: Any) -> float:
    """Return the area under a ROC curve, by the trapezoidal rule."""
    return float((np.diff(false) * (true[1:] + true[:-1]) / 2).sum())


def areas(labels: Any, scores: Any) -> list[float]:
    """Return each class's AUC against the others; ``labels`` are one-hot, shape (rows, classes)."""
    return [area(*roc_curve(labels[:, n] > 0, scores[:, n])) for n in range(labels.shape[1])]


def mean_area(labels: Any, scores: Any) -> float:
    """Return the mean of `areas`."""
    return float(np.mean(areas(labels, scores)))


def confusion(labels: Any, scores: Any) -> Any:
    """Return the shares of each true class (rows) that are predicted as each class (columns)."""
    classes = labels.shape[1]
    pairs = labels.argmax(1) * classes + scores.argmax(1)
    counts = np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
