"""The site's sources and checks: relocated links, R's pages, and detected faults."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _scripts() -> Iterator[None]:
    folders = [str(ROOT / "scripts"), str(ROOT / "docs/site")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


def write_page(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><body>{body}</body></html>")


def test_links_lead_to_the_sites_pages() -> None:
    from assemble import move_links, place_of

    text = "see [data](docs/data.md), [here](#there) and [it](docs/migrating/elephas.md#how)"
    moved = move_links(text, "CONTRIBUTING.md", "project/contributing.md")
    data, elephas = "[data](../guides/data.md)", "[it](../coming-from/elephas.md#how)"
    assert moved == f"see {data}, [here](#there) and {elephas}"
    assert place_of("docs/migrating") == "coming-from/index.md"
    assert place_of("README.md") == "index.md"
    assert place_of("vignettes/spark.Rmd") == "r/articles/spark.md"
    shown = move_links("[it](../LICENSE)", "docs/data.md", "guides/data.md")
    assert shown == "[it](../files/LICENSE)"
    with pytest.raises(SystemExit, match=r"docs/data.md links to nowhere.md, which is not"):
        move_links("[it](nowhere.md)", "docs/data.md", "guides/data.md")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as forges and the site generate them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_all_links_of_the_documents_resolve() -> None:
    from assemble import _LINK, move_links, place_of

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages += sorted((ROOT / "docs/migrating").glob("*.md"))
    for page in pages:
        path = str(page.relative_to(ROOT))
        place = place_of(path)
        assert place is not None, path
        move_links(page.read_text(), path, place)
        for link in _LINK.finditer(page.read_text()):
            target = (page.parent / link[1]).resolve()
            if link[2] and target.suffix == ".md":
                assert link[2][1:] in anchors_of(target), f"{path} links to {link[1]}{link[2]}"


def test_each_guide_has_a_purpose_and_is_in_the_readme() -> None:
    from assemble import GUIDES, list_guides

    named = {page for pages in GUIDES.values() for page in pages}
    elsewhere = {"architecture", "coming-from"}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - elsewhere <= named
    listed = list_guides(["data", "faq", "new"])
    assert listed.count("```{toctree}") == 3
    assert ":caption: More" in listed
    readme = (ROOT / "README.md").read_text()
    written = {"benchmarks", "examples", "particles"}  # not in docs/
    missing = [page for page in named - written if f"{page}.md" not in readme]
    assert missing == []


def test_no_page_has_a_placeholder_for_its_owner() -> None:
    patterns = ("*.md", "docs/**/*.md", "rpkg/*.md", "rpkg/R/*.R", "vignettes/*.Rmd")
    pages = [path for one in patterns for path in ROOT.glob(one)]
    assert [path for path in pages if re.search(r"<owner>|<user>|<org>", path.read_text())] == []


def test_headings_of_r_pages_are_headings_of_the_site() -> None:
    from r_pages import to_markdown

    body = BeautifulSoup(
        "<main><div class='page-header'><h1>T</h1></div><p>first</p><div class='section level2'>"
        "<h2>Use a_b</h2><pre>x <- 1</pre></div></main>",
        "html.parser",
    ).main
    assert body is not None
    shown = to_markdown("f()", body, "lead").splitlines()
    assert [line for line in shown if line.startswith("#")] == ["# f()", r"## Use a\_b"]
    assert '<p class="lead">lead</p><p>first</p>' in shown
    assert "page-header" not in "".join(shown)


def test_the_chart_has_each_measurement_and_names_the_reference() -> None:
    from chart import draw, read_steps

    steps = read_steps()
    chart = BeautifulSoup(draw(steps), "html.parser")
    labels = [text.get_text() for text in chart.find_all("text", class_=False)]
    assert labels == [f"{next(iter(steps))} (the reference)", *list(steps)[1:]]
    values = [text.get_text() for text in chart.find_all("text", class_="value")]
    assert all(f"{ms:.1f} ms" in value for ms, value in zip(steps.values(), values, strict=True))


def test_the_readmes_chart_is_the_one_that_is_drawn() -> None:
    from chart import FILE, draw_file, read_steps

    assert FILE.read_text() == draw_file(read_steps()), "run `make chart`"
    assert "(docs/steps.svg)" in (ROOT / "README.md").read_text()


def test_the_python_reference_has_every_export() -> None:
    from python_pages import grouped_pages

    import pybackend

    listed = {
        name for pages in grouped_pages().values() for names in pages.values() for name in names
    }
    results = {f"types.{name}" for name in pybackend.types.__all__}
    assert {*pybackend.__all__, *results} - listed == {"__version__"}


def test_broken_links_and_assets_from_elsewhere_are_found(tmp_path: Path) -> None:
    from check_site import broken_links, read_pages, remote_assets

    write_page(
        tmp_path / "index.html",
        "<a href='there.html#part'>1</a><a href='there.html#no'>2</a><a href='gone.html'>3</a>"
        "<a href='https://example.org'>4</a><script src='https://example.org/x.js'></script>",
    )
    write_page(tmp_path / "there.html", "<h2 id='part'>P</h2><img src='data:image/png;base64,AA'/>")
    (tmp_path / "site.css").write_text("@font-face { src: url(//example.org/f.woff) }")
    pages = read_pages(tmp_path)
    assert list(broken_links(pages)) == [
        "index.html links to there.html#no, and that page has no such anchor",
        "index.html links to gone.html, which does not exist",
    ]
    assert list(remote_assets(tmp_path, pages)) == [
        "index.html loads https://example.org/x.js",
        "site.css loads //example.org/f.woff",
    ]


def test_a_chart_with_other_numbers_is_found(tmp_path: Path) -> None:
    from chart import draw, read_steps
    from check_site import read_pages, wrong_numbers

    steps = read_steps()
    write_page(tmp_path / "index.html", draw(steps))
    assert list(wrong_numbers(tmp_path, read_pages(tmp_path))) == []
    write_page(tmp_path / "index.html", draw({**steps, "tfdist": steps["tfdist"] / 2}))
    found = list(wrong_numbers(tmp_path, read_pages(tmp_path)))
    assert len(found) == 2
    assert found[1] == "the bar of tfdist has the wrong length"
