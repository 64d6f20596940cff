"""What a user is told where sparklyr's own workers do not start."""

from __future__ import annotations

import pytest

from pybackend.launchers.spark.sparklyr import _explain

PROTOBUF = "java.lang.ClassNotFoundException: com.google.protobuf.MessageOrBuilder"


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        (f"Job aborted: RScript (62) terminated unexpectedly: {PROTOBUF}", []),
        ("java.lang.NoClassDefFoundError: com/google/protobuf/MessageOrBuilder", []),
        ("rscript failure with status 255", [f"the executors lack {PROTOBUF.split()[-1]}"]),
    ],
)
def test_a_spark_without_protobuf_is_told_the_settings(text: str, missed: list[str]) -> None:
    told = str(_explain(text, "10.0.0.1:4000", missed))
    assert 'config[["sparklyr.shell.driver-class-path"]]' in told
    assert 'config[["spark.executor.extraClassPath"]]' in told
    assert "libprotobuf-java" in told


def test_what_the_examination_found_comes_first() -> None:
    told = str(_explain("status 255", "10.0.0.1:4000", ["on a: there is no Python at /p"]))
    assert told.startswith("sparklyr could not run the workers: on a: there is no Python at /p\n")
    assert "10.0.0.1:4000" in told
    assert "status 255" in told


def test_without_a_finding_sparks_own_words_come_first() -> None:
    told = str(_explain("it broke Driver stacktrace: much more", "10.0.0.1:4000", []))
    assert told.startswith("sparklyr could not run the workers: it broke\n")
    assert "executors' logs" in told
