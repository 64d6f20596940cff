"""Walk over all objects in an HDF5 file: each once, without following links, at bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# A nested Keras model takes two groups per level.
MOST_DEPTH = 100


def walk(file: Any) -> Iterator[tuple[list[bytes], Any]]:
    """Yield the path of each object, as names, and the object; None in place of a link.

    HDF5 itself visits objects recursively and builds each one's whole path: it crashes, or takes
    minutes, with thousands of nested groups. A separate program may run the text of this file, so
    it does not import anything from this package.

    Parameters
    ----------
    file
        An open ``h5py.File``.

    Raises
    ------
    RecursionError
        Groups are nested more than `MOST_DEPTH` deep.
    """
    import h5py

    kinds = {
        h5py.h5i.GROUP: h5py.Group,
        h5py.h5i.DATASET: h5py.Dataset,
        h5py.h5i.DATATYPE: h5py.Datatype,
    }
    seen = {h5py.h5o.get_info(file.id).addr}
    left: list[tuple[list[bytes], Any]] = [([], file.id)]
    while left:
        place, group = left.pop()
        if len(place) > MOST_DEPTH:
            raise RecursionError(f"has groups nested more than {MOST_DEPTH} deep")
        names: list[bytes] = []
        group.links.iterate(names.append)
        for name in names:
            path = [*place, name]
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                yield path, None
                continue
            opened = h5py.h5o.open(group, name)
            address = h5py.h5o.get_info(opened).addr
            if address in seen:  # one object may have many names, its own groups among them
                continue
            seen.add(address)
            kind = h5py.h5i.get_type(opened)
            if kind == h5py.h5i.GROUP:
                left.append((path, opened))
            yield path, kinds[kind](opened)
