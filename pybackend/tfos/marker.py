"""What may stand between items in a queue."""

from __future__ import annotations


class Marker:
    """Something in a queue that is no item."""


class EndPartition(Marker):
    """The end of a partition's items."""
