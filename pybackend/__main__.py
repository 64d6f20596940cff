"""``python -m pybackend`` is the command ``tfdist``."""

import sys

from pybackend.cli import main

sys.exit(main())
