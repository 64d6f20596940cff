"""What the files of a detached job contain."""

from __future__ import annotations

import pytest

from pybackend.core.api.job_record import Ended, JobError, describe_error, restore_error
from pybackend.core.errors import (
    ClusterError,
    DatabaseError,
    Failure,
    InputError,
    PeerLostError,
    RError,
    SerializationError,
    TfdistError,
    WorkerFailedError,
)
from pybackend.core.job.codec import decode, encode

ERRORS = [
    ClusterError("no slots"),
    DatabaseError("other numbers"),
    InputError("`x` is empty"),
    PeerLostError(2, "n3", "closed the connection"),
    RError("object 'x' not found", "1. f()"),
    SerializationError("a lambda"),
    WorkerFailedError(
        [Failure(1, "n2", "ValueError", "no", log=("a", "b")), Failure(0, "", "", "")]
    ),
]


def test_all_kinds_of_errors_are_here() -> None:
    # Others are raised in workers only.
    kinds = {
        kind for kind in TfdistError.__subclasses__() if kind.__module__ == "pybackend.core.errors"
    }
    assert {type(error) for error in ERRORS} == kinds


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_as_data(error: TfdistError) -> None:
    read = decode(encode(Ended("failed", 0.0, describe_error(error))), Ended)
    assert read.error is not None
    found = restore_error(read.error)
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


@pytest.mark.parametrize(
    "error",
    [
        JobError("NewError", "new", ["new"]),
        JobError("PeerLostError", "new", []),
        JobError("WorkerFailedError", "new", [[]]),
        JobError("WorkerFailedError", "new", ["text"]),
    ],
)
def test_an_error_of_another_version_has_its_message(error: JobError) -> None:
    found = restore_error(error)
    assert (type(found), str(found)) == (ClusterError, "new")
