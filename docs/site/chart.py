"""The landing page's chart: what a step costs beside the alternatives, as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results.json"
MEASURED = "step, 2 workers x 1 thread, 64 images each"

WIDTH = 400
_ROW = 46
_BAR = 16
# The rest of the width is for the number after the longest bar.
_LONGEST = 280


def read_steps() -> dict[str, float]:
    """Milliseconds per step by what was measured; the first one is the reference."""
    rows = json.loads(RESULTS.read_text())[MEASURED]
    return {name: row["ms_per_step"] for name, row in rows.items()}


def _kind(place: int, name: str) -> str:
    if place == 0:
        return "reference"
    return "ours" if name.startswith("tfdist") else "other"


def draw(steps: Mapping[str, float]) -> str:
    """Bars of milliseconds, each with its name, and what it is as a multiple of the first."""
    reference = next(iter(steps.values()))
    longest = max(steps.values())
    parts = []
    for place, (name, value) in enumerate(steps.items()):
        top = place * _ROW
        length = value / longest * _LONGEST
        label = f"{name} (the reference)" if place == 0 else name
        parts += [
            f'<text x="0" y="{top + 14}">{escape(label)}</text>',
            f'<rect class="{_kind(place, name)}" y="{top + 20}" width="{length:.1f}" '
            f'height="{_BAR}" rx="2"/>',
            f'<text class="value" x="{length + 6:.1f}" y="{top + 33}">{value:.1f} ms'
            f"{'' if place == 0 else f' ({value / reference:.1f} ×)'}</text>",
        ]
    height = len(steps) * _ROW
    told = "; ".join(f"{name}: {value:.1f} ms" for name, value in steps.items())
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(f"Milliseconds per step. {told}")}">{"".join(parts)}</svg>'
    )


def name_machine() -> str:
    """The machine and the releases with which the steps were measured."""
    machine = json.loads(RESULTS.read_text())["machine"]
    return (
        f"{machine['cores']} cores, {machine['processor']}, "
        f"TensorFlow {machine['tensorflow-cpu']}, Keras {machine['keras']}"
    )
