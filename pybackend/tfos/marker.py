"""Markers between the items of a queue."""

from __future__ import annotations


class Marker:
    """Entry of a queue that is not an item."""


class EndPartition(Marker):
    """End of a partition's items."""
