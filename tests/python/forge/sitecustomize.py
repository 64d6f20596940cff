"""On the path of the tests' Python processes: those that import TensorFlow are forked.

Among them are workers, as `warm` describes, and, if tests request it, Spark's daemon, with the
Python processes of tasks that it forks.
"""

import os
import sys

if os.environ.get("TFDIST_TEST_FORGE"):
    import subprocess

    import warm

    if os.environ.get(warm.OF_SPARK) and warm.DAEMON in sys.orig_argv:
        warm.run_daemon()

    subprocess.Popen = warm.Popen  # type: ignore[misc]
