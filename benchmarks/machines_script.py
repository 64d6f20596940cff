"""Script for `tfdist run`: trains together with the other ranks."""

import sys
from pathlib import Path

from machines import train

if __name__ == "__main__":
    train(None, Path(sys.argv[1]))
