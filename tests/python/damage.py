"""Hypothesis strategies for bytes and JSON texts that are damaged, or altered on purpose."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st

edits = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a:1", "array", "<i8", "O", "(2,)f4", "V8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, *contents: bytes) -> bytes:
    """Draw one of the contents, with changed bytes, cut off, or extended."""
    content = bytearray(draw(st.sampled_from(contents)))
    for place, value in draw(edits):
        if content:
            content[place % len(content)] = value
    end = draw(st.none() | st.integers(0, len(content)))
    return bytes(content[:end]) + draw(st.just(b"") | st.binary(max_size=40))


@st.composite
def altered(draw: st.DrawFn, *texts: str) -> str:
    """Draw one of the JSON texts, with some values or the whole text replaced."""
    if draw(st.integers(0, 9)) == 0:
        return draw(damaged(*[text.encode() for text in texts])).decode(errors="replace")
    holder = {"whole": json.loads(draw(st.sampled_from(texts)))}
    for _ in range(draw(st.integers(1, 3))):
        _alter(draw, holder)
    # Deeper than `json` itself would write it.
    return re.sub(r'"@(\d+)@"', lambda depth: _nest(int(depth[1])), json.dumps(holder["whole"]))


def _alter(draw: st.DrawFn, place: Any) -> None:
    key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    is_deeper = isinstance(place[key], (dict, list)) and place[key]
    if is_deeper and draw(st.integers(0, 5)):
        _alter(draw, place[key])
        return
    change = draw(st.sampled_from(["replace", "nest", "remove", "copy"]))
    if change == "replace":
        place[key] = draw(json_values)
    elif change == "nest":
        place[key] = f"@{draw(st.sampled_from([1, 50, 300, 900, 100_000]))}@"
    elif change == "copy" and isinstance(place, list):
        place.append(copy.deepcopy(place[key]))
    elif len(place) > 1 or isinstance(place, list):
        del place[key]


def _nest(depth: int) -> str:
    return "[" * depth + "]" * depth
