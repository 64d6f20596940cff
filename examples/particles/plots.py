"""Plots of the classifiers: ROC curves and confusion matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layout import CLASSES
from matplotlib.figure import Figure
from scores import area, confusion, roc_curve


def draw_roc(labels: Any, scores: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per class, with one curve per model."""
    figure = Figure(figsize=(5 * len(CLASSES), 4.5), layout="constrained")
    for number, name in enumerate(CLASSES):
        axes = figure.add_subplot(1, len(CLASSES), number + 1)
        for model, found in scores.items():
            false, true = roc_curve(labels[:, number] > 0, found[:, number])
            axes.plot(false, true, label=f"{model} (AUC {area(false, true):.4f})")
        axes.plot([0, 1], [0, 1], linestyle="--", color="gray")
        axes.set(title=name, xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(loc="lower right")
    figure.savefig(path)


def draw_confusion(labels: Any, scores: Mapping[str, Any], path: Path) -> None:
    """Draw one matrix per model, with a row for each true class."""
    figure = Figure(figsize=(4.5 * len(scores), 4), layout="constrained")
    for number, (model, found) in enumerate(scores.items()):
        axes = figure.add_subplot(1, len(scores), number + 1)
        matrix = confusion(labels, found)
        axes.imshow(matrix, vmin=0, vmax=1, cmap="Blues")
        for row, shares in enumerate(matrix):
            for column, share in enumerate(shares):
                color = "white" if share > 0.5 else "black"
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(CLASSES)), CLASSES)
        axes.set_yticks(range(len(CLASSES)), CLASSES)
        axes.set(title=model, xlabel="taken for", ylabel="is")
    figure.savefig(path)
