"""On the path of the Python processes that tests start: what imports TensorFlow is forked.

Workers are, see `warm`. So is Spark's daemon, where tests ask for it, and with it the Python
processes of tasks, which it forks.
"""

import os
import sys

if os.environ.get("TFDIST_TEST_FORGE"):
    import subprocess

    import warm

    if os.environ.get(warm.OF_SPARK) and warm.DAEMON in sys.orig_argv:
        warm.run_daemon()

    subprocess.Popen = warm.Popen  # type: ignore[misc]
