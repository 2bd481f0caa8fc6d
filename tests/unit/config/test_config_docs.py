"""The page about settings is right: its snippets run and its files are understood."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from hasten.config import files
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.config.schema import subsection

PAGE: Final = (Path(__file__).parents[3] / "docs" / "config.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # so that it is restored: a block sets it
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    exec(compile(code, "docs/config.md", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_files_are_right(text: str) -> None:
    file = files.read_text(text, Path("docs.yaml"))
    assert resolve(file=file.entries, notes=file.notes).config.strategy == "fsdp"


def test_every_section_is_named() -> None:
    for name, spec in Config.__dataclass_fields__.items():
        if subsection(spec.type):
            assert f"`{name}`" in PAGE, name


def test_every_screen_is_there() -> None:
    for name in re.findall(r"\]\((screens/[^)]+)\)", PAGE):
        assert (Path(__file__).parents[3] / "docs" / name).is_file()
