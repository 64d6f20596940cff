"""The arguments of R's calls, their defaults and their help are those in Python."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import r_options


def test_the_file_for_r_is_current() -> None:
    assert r_options.PAGE.read_text() == r_options.write_page(), "run `make r-document`"


def test_texts_are_in_the_words_of_r() -> None:
    page = r_options.PAGE.read_text()
    assert "#' @param bucket_mb Megabytes of gradients" in page
    assert "`Inf`: all gradients at once" in page
    assert '`transport = "tcp"`' in page
    assert "`recovery(..., resume = TRUE)`" in page
    assert "``" not in page
    assert "None (default)" not in page
