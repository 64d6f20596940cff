"""Programs of common kinds: the audit names what differs, and nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import (
    audio,
    generative,
    graphs,
    language,
    recipes,
    representations,
    scenes,
    structured,
    timeseries,
    vision,
)
from programs.program import Program
from replicas import Trained, check_equal, named

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(1800)

PAGE = Path(__file__).parents[2] / "docs" / "keras_examples.md"
TOPICS: dict[str, dict[str, Program]] = {
    "Images, videos and points": vision.PROGRAMS,
    "What is in images": scenes.PROGRAMS,
    "Representations and teachers": representations.PROGRAMS,
    "Generation": generative.PROGRAMS,
    "Language": language.PROGRAMS,
    "Tables": structured.PROGRAMS,
    "Time series": timeseries.PROGRAMS,
    "Graphs": graphs.PROGRAMS,
    "Audio": audio.PROGRAMS,
    "Recipes": recipes.PROGRAMS,
}
CASES = {name: case for programs in TOPICS.values() for name, case in programs.items()}
# One of each kind, and cheap.
DAILY = [
    "collaborative filtering, summed over rows",
    "tracker of the loss",
]
# Also trained by `make test-full`; `make programs` trains all of them, for some minutes.
FULL = [
    "endpoint layer",
    "distillation",
    "VAE",
    "ESPCN",
    "image similarity",
    "several labels",
    "DLRM",
    "two towers",
    "graph attention",
    "PointNet",
    "learnable resizer",
    "RetinaNet",
    "boxes and classes",
    "denoising autoencoder",
    "Zero-DCE",
    "depth, edges of a batch",
    "depth",
    "NeRF",
    "SimCLR",
    "supervised contrastive, of a worker's rows",
    "supervised contrastive",
    "image similarity, of a worker's rows",
    "triplets",
    "BYOL",
    "masked autoencoder",
    "VQ-VAE",
    "DCGAN",
    "CycleGAN",
    "DDPM",
    "PixelCNN",
    "entities",
    "collaborative filtering",
    "Bayesian network",
    "anomalies",
    "citations",
    "spectra",
    "MelGAN",
    "low rank (LoRA)",
    "mixed precision",
    "trainer of a model",
    "small embeddings",
    "gradient centralization",
    "quantization",
    "Reptile",
]


def those(condition: Any) -> list[Any]:
    """Return cases as parameters of a test."""
    chosen = CASES if os.environ.get("TFDIST_PROGRAMS") == "all" else {*DAILY, *FULL}
    names = [name for name, case in CASES.items() if condition(case) and name in chosen]
    return named(names, [name for name in DAILY if name in names])


@pytest.mark.parametrize("name", those(lambda case: case.error is None))
def test_there_is_no_false_alarm(name: str, trained: dict[str, Any]) -> None:
    found = trained[name]
    assert isinstance(found, Trained), found
    assert len(set(found.digests)) == 1
    assert found.audit is not None
    assert found.audit["steps"] >= 1
    assert found.audit["skipped"] == []


@pytest.mark.parametrize("name", those(lambda case: case.error is None and not case.is_random))
def test_what_is_not_random_reaches_what_one_process_reaches(
    name: str, trained: dict[str, Any]
) -> None:
    check_equal(CASES[name], trained[name])


@pytest.mark.parametrize("name", those(lambda case: case.error is not None))
def test_what_mixes_rows_ends_with_the_remedy(name: str, trained: dict[str, Any]) -> None:
    found = trained[name]
    assert isinstance(found, str), f"trained, with the audit {found.audit}"
    assert str(CASES[name].error) in found


def test_what_is_chosen_is_there() -> None:
    assert {*DAILY, *FULL} <= set(CASES)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_page_has_a_row_for_each_program(topic: str) -> None:
    section = PAGE.read_text().partition(f"## {topic}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (\d+|-) \| ([^|]+) \|", section, re.MULTILINE)
    shown = {name: (lines, audit) for name, lines, audit in rows}
    assert shown == {
        name: ("-" if case.error else str(case.lines), describe(case))
        for name, case in TOPICS[topic].items()
    }


def describe(case: Program) -> str:
    """Return the page's outcome of a training."""
    if case.error is not None:
        return "error"
    return "no difference" if case.is_random else "no difference; equal"
