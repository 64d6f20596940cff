"""On the path of the Python processes that tests start: what imports TensorFlow is forked.

Workers are, see `warm`. So are Spark's Python processes, where tests ask for it: Spark's daemon,
from which it forks them, has imported Keras then.
"""

import os
import sys

if os.environ.get("TFDIST_TEST_FORGE"):
    import subprocess

    import warm

    subprocess.Popen = warm.Popen  # type: ignore[misc]

    if os.environ.get("TFDIST_TEST_SPARK_KERAS") and "pyspark.daemon" in sys.orig_argv:
        import keras  # noqa: F401
