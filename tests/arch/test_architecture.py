"""docs/architecture.md is true: its layers are those that import-linter enforces, its extensions those that there are.

`python -m tests.arch.test_architecture` writes the table of extensions.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hasten.extension import installed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MAX_WORDS = 1_600
TABLE = re.compile(r"\| extension \| provides \|\n(?:\|.*\|\n)+")


def extension_table() -> str:
    """Return the rows of the bundled extensions, from their declarations."""
    folders = {
        folder.parent.name
        for folder in (ROOT / "src" / "hasten" / "extensions").glob("*/extension.py")
    }
    rows = [
        f"| `{extension.name}` | {extension.summary} |"
        for extension in installed()
        if extension.name in folders
    ]
    return "\n".join(["| extension | provides |", "|---|---|", *rows, ""])


def enforced_layers(contract_id: str) -> list[set[str]]:
    """Return the layers of a contract, from the upper to the lower ones."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "tool"
    ]["importlinter"]
    contract = next(
        contract for contract in linter["contracts"] if contract["id"] == contract_id
    )
    return [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def documented_layers(first_name: str) -> list[set[str]]:
    """Return the layers of the diagram whose first layer begins with a name."""
    diagrams = re.findall(
        r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    diagram = next(diagram for diagram in diagrams if diagram.startswith(first_name))
    names = [re.split(r"\s{3,}", line)[0] for line in diagram.splitlines()]
    return [set(re.findall(r"\w+", name)) for name in names]


def test_the_table_lists_every_extension() -> None:
    assert extension_table() in PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.arch.test_architecture"
    )


def test_the_layers_are_those_that_are_enforced() -> None:
    public_modules = {"__main__", "trainer", "bigmodel", "ray"}
    layers = [layer - public_modules for layer in enforced_layers("layers")]
    assert documented_layers("extensions") == [layer for layer in layers if layer]


def test_the_layers_of_the_drop_in_are_those_that_are_enforced() -> None:
    assert documented_layers("testing | commands") == enforced_layers("dropin")


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MAX_WORDS


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: extension_table(), text), encoding="utf-8")
