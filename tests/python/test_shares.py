"""Shares of a machine's cores and GPUs for its processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pybackend.core.launchers.shares import share_of_machine


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("4,7", ["4", "7", "4"]), ("", [None] * 3), ("-1", ["-1"] * 3)],
)
def test_gpus_are_dealt_out_in_turn(chosen: str, expected: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in share_of_machine(3)] == expected


def test_cores_are_divided_unless_the_user_has_done_so(monkeypatch: Any) -> None:
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (one,) = share_of_machine(1)
    assert one["TF_NUM_INTRAOP_THREADS"] == str(os.cpu_count())
    assert one["OMP_NUM_THREADS"] == "5"
    assert share_of_machine(10_000)[0]["TF_NUM_INTRAOP_THREADS"] == "1"
