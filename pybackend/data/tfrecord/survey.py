"""What files without a manifest contain: how many records, and which features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pybackend.data.tfrecord.chunks import read_chunks
from pybackend.data.tfrecord.compression import Compression
from pybackend.data.tfrecord.framing import HEAD
from pybackend.data.tfrecord.part import Mark, Marks, place_marks
from pybackend.data.tfrecord.schema import infer_spec
from pybackend.errors import InputError

_SAMPLE_ROWS = 1000
_SAMPLE_BYTES = 1 << 20
_SAMPLE_FILES = 8


def count_records(file: str, compression: Compression) -> tuple[int, Marks]:
    """How many records a file has, and places from which it can be read.

    Raises
    ------
    InputError
        Names the record and byte at which the file ends too early or is damaged.
    """
    count = 0
    marks: list[Mark] = []
    for chunk in read_chunks(file, compression):
        count += len(chunk.starts)
        marks += place_marks(chunk.starts - HEAD, chunk.first, chunk.place)
    return count, () if compression else tuple(marks)


def sample_spec(
    files: Sequence[str], compressions: Sequence[Compression], name: str
) -> dict[str, str]:
    """The `tfrecord_spec` for the first records of eight files at most.

    Raises
    ------
    InputError
        They have no features, or are damaged.
    """
    pairs = list(zip(files, compressions, strict=True))
    samples = [
        chunk.between(0, _SAMPLE_ROWS)
        for file, compression in pairs[:: -(-len(pairs) // _SAMPLE_FILES)]
        for chunk in islice(read_chunks(file, compression, size=_SAMPLE_BYTES), 1)
    ]
    for chunk in samples:
        chunk.check()
    spec = infer_spec(samples)
    if not spec:
        raise InputError(
            f"`{name}`: the first records of {files[0]} have no feature: say in "
            "`tfrecord_spec` what the records hold"
        )
    return spec
