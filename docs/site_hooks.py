"""What the documentation site adds to mkdocs: files of the repository that pages link to become pages of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = "docs/"
FRONT: Final = "README.md"
"""The file that is the site's first page."""
LINK: Final = re.compile(
    r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?)(?=\))"
)
LANGUAGES: Final = {".py": "python", ".sbatch": "bash", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, a page for every file of the repository that a page links to, and for those they link to."""
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md")]
    waiting, seen = [FRONT, *pages], {FRONT, *pages, DOCS.rstrip("/")}
    files.append(File.generated(config, uri(FRONT), content=shown(FRONT)))
    while waiting:
        source = waiting.pop()
        for target in (join(source, link) for link, _ in LINK.findall(shown(source))):
            if (
                target not in seen
                and not target.startswith(DOCS)
                and (ROOT / target).exists()
            ):
                seen.add(target)
                files.append(File.generated(config, uri(target), content=shown(target)))
                waiting += (
                    [target]
                    if target.endswith(".md") or (ROOT / target).is_dir()
                    else []
                )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Let links that leave the documentation lead to the pages made of those files."""
    here = page.file.src_uri
    source = source_of(here)

    def moved(found: re.Match[str]) -> str:
        return (
            posixpath.relpath(
                uri(join(source, found[1])), posixpath.dirname(here) or "."
            )
            + found[2]
        )

    return (
        LINK.sub(moved, markdown)
        if source.endswith(".md") or (ROOT / source).is_dir()
        else markdown
    )


def on_post_template(
    output_content: str, template_name: str, config: MkDocsConfig
) -> str:
    """Let the links of the page for missing pages begin at its folder, since nobody knows the address of the site."""
    if template_name != "404.html":
        return output_content
    text = re.sub(r'( (?:href|src)=")/\.?(?=")', r"\1index.html", output_content)
    text = re.sub(r'( (?:href|src)=")/(?=[^/"])', r"\1", text)
    return text.replace('"base": "/"', '"base": "."')


def join(source: str, link: str) -> str:
    """The file a link in `source` leads to, from the root of the repository."""
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)
    return posixpath.normpath(posixpath.join(folder, link))


def uri(target: str) -> str:
    """Where the site shows a file or folder of the repository."""
    if target in (FRONT, DOCS.rstrip("/")):
        return "index.md"
    if target.startswith(DOCS):
        return target.removeprefix(DOCS)
    if (ROOT / target).is_dir():
        return f"repository/{target}/index.md"
    return (
        f"repository/{target}" if target.endswith(".md") else f"repository/{target}.md"
    )


def source_of(page: str) -> str:
    """What a page of the site was made of; the inverse of `uri`."""
    if page == "index.md":
        return FRONT
    if not page.startswith("repository/"):
        return DOCS + page
    inner = page.removeprefix("repository/")
    candidates = (inner, inner.removesuffix("/index.md"), inner.removesuffix(".md"))
    return next(one for one in candidates if (ROOT / one).exists())


def shown(target: str) -> str:
    """The Markdown of a file or folder: itself, a list of its Markdown files, or its text as code."""
    path = ROOT / target
    if path.is_dir():
        names = "\n".join(
            f"- [{one.name}]({one.name})" for one in sorted(path.glob("*.md"))
        )
        return f"# {target}\n\n{names}\n"
    text = path.read_text("utf-8")
    if target.endswith(".md"):
        return text
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
