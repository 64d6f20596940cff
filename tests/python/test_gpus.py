"""`tfdist bench-scale --gpus`, here on the cores of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pybackend import InputError
from pybackend.cli import main
from pybackend.scaling import gpus
from pybackend.scaling.gpus import GpuRow, GpuScaling, bench_gpus


def make_row(workers: int, speedup: float, model: str = "dense") -> GpuRow:
    own = (0.1, 10.0 * speedup, speedup, speedup / workers)
    return GpuRow(model, workers, 8, *own, audited=3, difference=2e-7)


def test_the_result_says_when_distributing_does_not_pay() -> None:
    rows = [make_row(1, 1.0), make_row(4, 3.6), make_row(1, 1.0, "<b>"), make_row(4, 1.2, "<b>")]
    scaling = GpuScaling(rows, 4, "host")
    assert list(scaling.describe()) == [
        "dense: 4 GPUs are 3.60 times as fast as 1",
        "<b>: 4 GPUs are 1.20 times as fast as 1: distributing this model does not pay here",
    ]
    page = scaling.to_page()
    assert "3.60" in page
    assert "<b>:" not in page
    assert json.loads(scaling.to_json())["rows"][1]["efficiency"] == 0.9


def test_the_numbers_of_workers_follow_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measure(name: str, workers: int, *others: Any) -> GpuRow:
        tried.append(workers)
        return make_row(workers, 1.0, name)

    monkeypatch.setattr(gpus, "_measure", measure)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    bench_gpus(show=str)
    assert tried == [1, 2, 4, 6] * 3
    with pytest.raises(InputError, match="8 workers need a GPU each, but there are 6"):
        bench_gpus([1, 8])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(InputError, match="has no GPU to use"):
        bench_gpus()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "train.py"], "--gpus trains models of its own"),
        (["--page", "x.html", "train.py"], "--page needs --gpus"),
        (["--gpus", "--page", "/nowhere/x.html"], "its folder does not exist"),
    ],
)
def test_wrong_words_are_rejected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-scale", *words]) != 0
    assert message in capsys.readouterr().err


def test_it_measures_and_audits_on_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_CASES", {"dense": gpus._CASES["dense"]})
    page, values = tmp_path / "page.html", tmp_path / "values.json"
    words = ["--workers", "1,2", "--batch-size", "2", "--steps", "2"]
    files = ["--page", str(page), "--json", str(values)]
    assert main(["bench-scale", "--gpus", *words, *files]) == 0
    one, two = json.loads(values.read_text())["rows"]
    assert (one["workers"], two["workers"], one["speedup"]) == (1, 2, 1.0)
    assert two["audited"] > 0
    assert two["difference"] < 1e-5
    assert "dense" in page.read_text()
