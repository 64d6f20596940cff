"""usage: scripts/draw-logo.py

Draw the logo and the badges of the R package into rpkg/man/figures: a hexagon with three small
networks whose arrows meet.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "rpkg/man/figures"

WIDTH, HEIGHT = 518, 600
CENTRE = (259.0, 262.0)
DISTANCE = 148.0
DARK, LIGHT, LINE, NODE, MEAN = "#0d2c4f", "#1f5c8f", "#8fc1e8", "#f2f7fc", "#ffb238"

# Layers of a network, along its axis, which points to the centre.
LAYERS = [(-48.0, (-26.0, 26.0)), (0.0, (-38.0, 0.0, 38.0)), (48.0, (-20.0, 20.0))]

# Strokes of the letters: baseline 0, x-height 44, ascender 70; each with its width.
LETTERS = {
    "t": ("M12,-62 V-14 Q12,0 26,0 H30 M0,-44 H28", 38),
    "f": ("M12,0 V-52 Q12,-68 28,-68 H32 M0,-44 H28", 38),
    "d": ("M44,-70 V0 M44,-22 A22,22 0 1 0 0,-22 A22,22 0 1 0 44,-22", 58),
    "i": ("M0,-44 V0 M0,-66 V-65", 14),
    "s": (
        "M34,-38 Q28,-44 18,-44 Q2,-44 2,-33 Q2,-24 18,-22 Q35,-20 35,-11 Q35,0 18,0 Q6,0 0,-7",
        49,
    ),
}


def point_at(angle: float, radius: float) -> tuple[float, float]:
    """Return a point around the centre."""
    return CENTRE[0] + radius * math.cos(angle), CENTRE[1] + radius * math.sin(angle)


def draw_network(angle: float) -> list[str]:
    """Draw a network whose last layer faces the centre, and the arrow from it."""
    x, y = point_at(angle, DISTANCE)
    turn = math.degrees(angle) + 180
    parts = [f'<g transform="translate({x:.1f},{y:.1f}) rotate({turn:.1f})">']
    for (x0, before), (x1, after) in itertools.pairwise(LAYERS):
        parts += [
            f'<path d="M{x0},{a} L{x1},{b}" stroke="{LINE}" stroke-width="2.5"/>'
            for a in before
            for b in after
        ]
    parts += [
        f'<circle cx="{place}" cy="{height}" r="10" fill="{NODE}"/>'
        for place, heights in LAYERS
        for height in heights
    ]
    tip = DISTANCE - 42
    parts += [
        f'<path d="M64,0 H{tip - 14}" stroke="{MEAN}" stroke-width="8" stroke-linecap="round"/>',
        f'<path d="M{tip},0 l-22,-14 v28 z" fill="{MEAN}"/>',
        "</g>",
    ]
    return parts


def draw_word(word: str, middle: float, baseline: float) -> list[str]:
    """Draw the name, in letters of one stroke."""
    gap = 10.0
    x = middle - (sum(LETTERS[letter][1] for letter in word) + gap * (len(word) - 1) - 14) / 2
    parts = []
    for letter in word:
        path, width = LETTERS[letter]
        parts.append(
            f'<path transform="translate({x:.1f},{baseline})" d="{path}" fill="none" '
            f'stroke="{NODE}" stroke-width="10" stroke-linecap="round" stroke-linejoin="round"/>'
        )
        x += width + gap
    return parts


def draw_logo() -> str:
    """Draw the hexagon and its content."""
    hexagon = "259,12 508,156 508,444 259,588 10,444 10,156"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="tfdist">',
        '<linearGradient id="sky" x1="0" y1="0" x2="0" y2="1">'
        f'<stop offset="0" stop-color="{LIGHT}"/><stop offset="1" stop-color="{DARK}"/>'
        "</linearGradient>",
        f'<polygon points="{hexagon}" fill="url(#sky)" stroke="{MEAN}" stroke-width="14" '
        'stroke-linejoin="round"/>',
    ]
    for angle in (-90, 30, 150):
        parts += draw_network(math.radians(angle))
    parts.append(
        f'<circle cx="{CENTRE[0]}" cy="{CENTRE[1]}" r="28" fill="{MEAN}" stroke="{NODE}" '
        'stroke-width="6"/>'
    )
    parts += draw_word("tfdist", 259, 492)
    return "\n".join([*parts, "</svg>", ""])


def draw_badge(left: str, right: str, colour: str) -> str:
    """Draw a badge of two words."""
    first, second = 7 * len(left) + 10, 7 * len(right) + 10
    texts = [(first / 2, left, first - 10), (first + second / 2, right, second - 10)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{first + second}" height="20" '
        f'role="img" aria-label="{left}: {right}">',
        f'<rect width="{first + second}" height="20" rx="3" fill="#4a4a4a"/>',
        f'<path d="M{first},0 h{second - 3} q3,0 3,3 v14 q0,3 -3,3 h-{second - 3} z" '
        f'fill="{colour}"/>',
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" '
        'font-size="11">',
        *(f'<text x="{x}" y="14" textLength="{length}">{text}</text>' for x, text, length in texts),
        "</g>",
        "</svg>",
    ]
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / "logo.svg").write_text(draw_logo())
    (FIGURES / "lifecycle-experimental.svg").write_text(
        draw_badge("lifecycle", "experimental", "#c4621d")
    )
