"""What a failure of Spark's own says, with the part worth reading first."""

from __future__ import annotations

import re

from pybackend.errors import ClusterError


def explain_spark_error(error: BaseException) -> BaseException:
    """Spark's own failure as a `ClusterError` that begins with the part worth reading."""
    if not isinstance(error, Exception):
        return error
    text = str(error)
    advice = "see the executors' logs in the Spark web interface"
    if "PYTHON_VERSION_MISMATCH" in text:
        advice = "set PYSPARK_PYTHON to the same minor version of Python on driver and executors"
    elif "No module named" in text:
        advice = "install it for the executors' Python, or set PYSPARK_PYTHON to one that has it"
    elif "Cannot run program" in text:
        advice = "set PYSPARK_PYTHON to a Python that exists on every executor"
    # Java's frames say nothing about the cause; Python's own last line does.
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    named = r"(?:: |Caused by: )?[\w.$]*(Error|Exception|Interrupt)\b"
    causes = [line for line in lines if re.match(named, line)]
    headline = causes[-1] if causes else lines[0]
    return ClusterError(
        f"Spark could not run the job: {headline}\n\nWhat to do: {advice}\n\n"
        "Spark's message:\n" + "\n".join(lines)[:3000]
    )
