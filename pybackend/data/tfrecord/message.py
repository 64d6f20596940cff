"""Parse many protocol buffer messages in lockstep: each step reads one field of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pybackend.data.tfrecord.pieces import Bytes, Index
from pybackend.data.tfrecord.varint import Flags, decode_varints

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


class Malformed(Exception):
    """Bytes that are not a message; ``owner`` is the index of the first such message."""

    def __init__(self, owner: int) -> None:
        super().__init__(owner)
        self.owner = owner


@dataclass(frozen=True)
class Fields:
    """Fields of many messages, in the order of their bytes.

    Attributes
    ----------
    owners
        Index of the field's message.
    numbers, wires
        Number and wire type of the field.
    starts, ends
        Place of its content, after the tag and, if it has one, the length.
    """

    owners: Index
    numbers: Index
    wires: Index
    starts: Index
    ends: Index

    def where(self, chosen: Flags | Index) -> Fields:
        """Return some of the fields."""
        return Fields(
            self.owners[chosen],
            self.numbers[chosen],
            self.wires[chosen],
            self.starts[chosen],
            self.ends[chosen],
        )

    def messages(self, number: int) -> Fields:
        """Return the fields with a number that are a message or bytes."""
        chosen = (self.numbers == number) & (self.wires == LENGTH_DELIMITED)
        return self if chosen.all() else self.where(chosen)


def parse_fields(data: Bytes, starts: Index, ends: Index) -> Fields:
    """Return all fields of the messages ``data[start:end]``, which must be in order.

    Raises
    ------
    Malformed
        Some bytes are not a message.
    """
    steps: list[Fields] = []
    owners, places, limits = np.arange(len(starts)), starts, ends
    while True:
        left = places < limits
        if not left.all():
            owners, places, limits = owners[left], places[left], limits[left]
        if not len(owners):
            break
        step = _next_field(data, owners, places, limits)
        steps.append(step)
        places = step.ends
    return _merge(steps)


def _next_field(data: Bytes, owners: Index, places: Index, limits: Index) -> Fields:
    tags, after, whole = decode_varints(data, places)
    numbers, wires = tags >> 3, tags & 7
    # A tag is followed by a number or by a length.
    values, begins, whole_value = decode_varints(data, after)
    if (wires == LENGTH_DELIMITED).all():
        ends = begins + values
        valid = whole & whole_value & (values >= 0) & (values <= len(data)) & (ends <= limits)
    else:
        kinds = [wires == VARINT, wires == FIXED64, wires == LENGTH_DELIMITED, wires == FIXED32]
        has_length = kinds[2] & (values >= 0) & (values <= len(data))
        ends = np.select(
            [kinds[0], kinds[1], has_length, kinds[3]],
            [begins, after + 8, begins + values, after + 4],
            len(data) + 1,
        )
        begins = np.where(kinds[2], begins, after)
        valid = whole & (whole_value | kinds[1] | kinds[3]) & (ends <= limits)
    valid &= numbers > 0
    if not valid.all():
        raise Malformed(int(owners[np.argmin(valid)]))
    return Fields(owners, numbers, wires, begins, ends)


def _merge(steps: list[Fields]) -> Fields:
    """Combine the fields of all steps, sorted by their places."""
    if len(steps) == 1:
        return steps[0]
    columns = [
        np.concatenate([np.empty(0, np.int64), *(getattr(step, name) for step in steps)])
        for name in ("owners", "numbers", "wires", "starts", "ends")
    ]
    fields = Fields(*columns)
    return fields.where(np.argsort(fields.starts, kind="stable"))
