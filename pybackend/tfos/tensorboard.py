"""TensorBoard beside a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

_SERVES = re.compile(r"http://\S+?:(\d+)/")
_SECONDS = 60.0


def start_tensorboard(host: str, log_dir: str) -> int:
    """Start TensorBoard, which ends with this worker; its port, 0 if it has not come up."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            f"--logdir={log_dir}",
            f"--host={host}",
            f"--port={os.environ.get('TENSORBOARD_PORT', '0')}",
            "--reload_multifile=true",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = threading.Timer(_SECONDS, process.send_signal, (signal.SIGTERM,))
    limit.start()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := _SERVES.search(line):
            limit.cancel()
            threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
            return int(found[1])
    limit.cancel()
    return 0


def _drain(lines: Any) -> None:
    """Read what nobody needs: a full pipe would stop who writes it."""
    for _ in lines:
        pass
