"""On the path of the Python processes that tests start: their workers are forked, see `warm`."""

import os

if os.environ.get("TFDIST_TEST_FORGE"):
    import subprocess

    import warm

    subprocess.Popen = warm.Popen  # type: ignore[misc]
