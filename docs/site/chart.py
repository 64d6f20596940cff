"""Chart of milliseconds per step compared with the alternatives, as SVG.

usage: chart.py [FILE]. Writes the README's chart, docs/steps.svg unless FILE is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results.json"
FILE = ROOT / "docs" / "steps.svg"
MEASURED = "step, 2 workers x 1 thread, 64 images each"

WIDTH = 400
_ROW = 46
_BAR = 16
# The rest of the width is for the number after the longest bar.
_LONGEST = 280
_MARGIN = 16
# The file has its own background: a page may be dark where the browser is light.
_STYLE = """
.card { fill: #ffffff; stroke: #d0d7de; }
text { fill: #1f2328; font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.value { font-weight: 600; }
.ours { fill: #1b6ca8; } .reference { fill: #8a939c; } .other { fill: #b5651d; }
@media (prefers-color-scheme: dark) {
  .card { fill: #161b22; stroke: #3d444d; }
  text { fill: #e6edf3; }
  .ours { fill: #5aa9e6; } .other { fill: #e0995a; }
}
"""


def read_steps() -> dict[str, float]:
    """Milliseconds per step by what was measured; the first one is the reference."""
    rows = json.loads(RESULTS.read_text())[MEASURED]
    return {name: row["ms_per_step"] for name, row in rows.items()}


def _kind(place: int, name: str) -> str:
    if place == 0:
        return "reference"
    return "ours" if name.startswith("tfdist") else "other"


def _draw_bars(steps: Mapping[str, float]) -> str:
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
    return "".join(parts)


def _describe(steps: Mapping[str, float]) -> str:
    values = "; ".join(f"{name}: {value:.1f} ms" for name, value in steps.items())
    return escape(f"Milliseconds per step. {values}")


def draw(steps: Mapping[str, float]) -> str:
    """Bars of milliseconds, each with its name, and what it is as a multiple of the first.

    For a page that has the colours.
    """
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {len(steps) * _ROW}" role="img" '
        f'aria-label="{_describe(steps)}">{_draw_bars(steps)}</svg>'
    )


def draw_file(steps: Mapping[str, float]) -> str:
    """The same as a file that has its own colours, for light and for dark pages."""
    width, height = WIDTH + 2 * _MARGIN, len(steps) * _ROW + 2 * _MARGIN - 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{_describe(steps)}">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f'<g transform="translate({_MARGIN} {_MARGIN - 4})">{_draw_bars(steps)}</g>\n</svg>\n'
    )


def name_machine() -> str:
    """The machine and the releases with which the steps were measured."""
    machine = json.loads(RESULTS.read_text())["machine"]
    return (
        f"{machine['cores']} cores, {machine['processor']}, "
        f"TensorFlow {machine['tensorflow-cpu']}, Keras {machine['keras']}"
    )


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(draw_file(read_steps()))
