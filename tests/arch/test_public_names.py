"""The public face: the lazy table, the names type checkers see and the committed snapshot are one list.

Run this file as a program (`make names`) to accept the present names into the snapshot.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import hasten

FACE: Final = Path(hasten.__file__)
SNAPSHOT: Final = Path(__file__).with_name("public_names.txt")


def lazy_table() -> dict[str, str]:
    """Return public name -> module, as the running program uses it."""
    return dict(vars(hasten)["_PUBLIC"])


def typed_table() -> dict[str, str]:
    """Return public name -> module, as type checkers read it in the TYPE_CHECKING block."""
    tree = ast.parse(FACE.read_text("utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def snapshot(names: list[str]) -> str:
    """Return the snapshot's text."""
    return "".join(f"{name}\n" for name in sorted(names))


def test_types_and_table_are_one_list() -> None:
    assert typed_table() == lazy_table(), "write a public name both in the TYPE_CHECKING block and in _PUBLIC"


def test_names_are_reexported_to_type_checkers() -> None:
    text = FACE.read_text("utf-8")
    missing = [name for name in lazy_table() if f"{name} as {name}" not in text]
    assert not missing, f"write `from module import X as X` for {missing}: strict mypy hides other imports"


def test_names_match_the_snapshot() -> None:
    assert snapshot(list(hasten.__all__)) == SNAPSHOT.read_text("utf-8"), "if meant, run `make names` and commit"


@pytest.mark.parametrize(("name", "module"), sorted(lazy_table().items()))
def test_name_loads_from_its_room(name: str, module: str) -> None:
    value = getattr(hasten, name)
    assert value is getattr(importlib.import_module(module), name)


def test_dir_lists_every_name_before_it_is_loaded() -> None:
    code = "import hasten; assert set(hasten.__all__) == set(dir(hasten)), dir(hasten)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Acelerator'"):
        _ = hasten.Acelerator  # type: ignore[attr-defined]


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(list(hasten.__all__)), "utf-8")
