"""The documentation site: it builds without a warning, its links and anchors lead somewhere, every public name is in the reference."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

ROOT: Final = Path(__file__).parents[2]


class Links(HTMLParser):
    """What a page links to and which anchors it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's links and its name."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def read(page: Path) -> Links:
    """The links and anchors of a page."""
    links = Links()
    links.feed(page.read_text("utf-8"))
    return links


def broken(site: Path) -> Iterator[str]:
    """Yield every link inside the site that leads nowhere."""
    pages = {path.resolve(): read(path) for path in site.rglob("*.html")}
    for page, links in pages.items():
        for link in links.targets:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                target in pages
                and url.fragment
                and unquote(url.fragment) not in pages[target].anchors
            ):
                yield f"{page.relative_to(site.resolve())}: {link}"


def in_a_browser(address: str, folder: Path) -> str:
    """What a page holds once its scripts have run, in Chromium."""
    if shutil.which("chromium") is None:
        pytest.skip(
            "Debian's chromium is not installed: the built site was not looked at in a browser"
        )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
        "--dump-dom",
    ]
    command = [
        "chromium",
        *options,
        "--virtual-time-budget=20000",
        address.replace(" ", "%20"),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    ).stdout


LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a Markdown page get in the site."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (
        re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "]", heading)).strip().lower()
        for heading in headings
    )
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def broken_in_text(docs: Path) -> Iterator[str]:
    """Yield every link of a Markdown page to a file or heading that does not exist."""
    for page in sorted(docs.rglob("*.md")):
        text = re.sub(
            r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for link in LINK.findall(text):
            url = urlsplit(link)
            if url.scheme:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            # its anchors are names of the library
            generated = target.parent == docs / "api"
            has_anchors = target.suffix == ".md" and not generated
            if not target.exists() or (
                url.fragment and has_anchors and url.fragment not in anchors(target)
            ):
                yield f"{page.relative_to(docs)}: {link}"


def test_links_between_pages_lead_somewhere(tmp_path: Path) -> None:
    """By the text of the pages; the exhaustive tests look at the built site."""
    assert not list(broken_in_text(ROOT / "docs"))
    (tmp_path / "a.md").write_text(
        "[b](b.md#the-second-part) [c](c.md) [b](b.md#third) [e](https://elsewhere.example/x)\n"
    )
    (tmp_path / "b.md").write_text(
        "# One\n## The `second` part!\n```bash\n# third\n```\n[a](a.md)\n"
    )
    assert list(broken_in_text(tmp_path)) == ["a.md: c.md", "a.md: b.md#third"]


def build_site(folder: Path) -> Path:
    """Build the site as `make docs` does, and return its folder."""
    pytest.importorskip(
        "mkdocstrings", reason="mkdocs is not installed (pip install '.[docs]')"
    )
    pytest.importorskip(
        "material", reason="mkdocs-material is not installed (pip install '.[docs]')"
    )
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder / "site"),
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    return folder / "site"


@pytest.mark.timeout(240)  # ten seconds on a quiet machine
def test_it_builds_without_a_warning_and_its_links_lead_somewhere(
    tmp_path: Path,
) -> None:
    site = build_site(tmp_path)
    assert not list(broken(site))
    front = (site / "index.html").read_text("utf-8")
    assert "quickstart.html" in front
    assert 'class="doc doc-heading"' in (site / "api" / "accelerator.html").read_text(
        "utf-8"
    )
    for page in site.rglob("*.html"):
        assert not re.search(
            r'<(script|link rel="stylesheet")[^>]* (src|href)="http',
            page.read_text("utf-8"),
        ), page


@pytest.mark.exhaustive
@pytest.mark.timeout(240)  # it starts a browser
def test_the_search_works_from_a_folder(tmp_path: Path) -> None:
    site = build_site(tmp_path)
    page_text = in_a_browser(
        (site / "index.html").as_uri() + "?q=early stopping", tmp_path
    )
    assert re.search(r"\d+ matching documents", page_text)
    assert "trainer.html" in page_text


def test_a_broken_link_or_anchor_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">b</a><a href="c.html">c</a><a href="b.html#there">b</a>'
    )
    (tmp_path / "b.html").write_text(
        '<p id="here"><a href="https://elsewhere.example">e</a></p>'
    )
    assert list(broken(tmp_path)) == ["a.html: c.html", "a.html: b.html#there"]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_code_of_the_first_pages_fits_into_a_small_window(page: str) -> None:
    """80 characters are what the site shows at a width of 1280 pixels; comments behind them would be cut off."""
    blocks = re.findall(
        r"^```.*?^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert [
        line for block in blocks for line in block.splitlines() if len(line) > 80
    ] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in text, page.name
