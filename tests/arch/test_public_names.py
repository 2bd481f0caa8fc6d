"""Public names: each public module's lazy table, the names type checkers see, the snapshot and the reference agree.

Run this file as a program (`make names`) to accept the present names into the snapshot.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import hasten
import hasten.data
import hasten.errors
import hasten.extending
import hasten.extensions.bigmodel
import hasten.extensions.public
import hasten.extensions.trainer
import hasten.testing
from hasten.extension import offers

REPOSITORY: Final = Path(__file__).parents[2]
SNAPSHOT: Final = Path(__file__).with_name("public_names.txt")
FACES: Final = (
    hasten,
    hasten.extensions.bigmodel,
    hasten.data,
    hasten.extending,
    hasten.testing,
    hasten.extensions.trainer,
)
"""The modules with a table of public names. `hasten.errors` is public as well and defines its classes itself."""
MOST_AT_THE_TOP: Final = 55
FORM: Final = ("Expr", "ImportFrom", "If", "AnnAssign", "Assign")
each_face = pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)


def user_name(face: ModuleType) -> str:
    """Return the name under which users import a public module."""
    return face.__name__.replace(".extensions", "")


def lazy_table(face: ModuleType) -> dict[str, str]:
    """Return public name -> module, as the running program uses it."""
    return dict(vars(face)["_PUBLIC"])


def parsed(face: ModuleType) -> ast.Module:
    """Return the syntax tree of a public module."""
    return ast.parse(Path(face.__file__ or "").read_text("utf-8"))


def typed_table(face: ModuleType) -> dict[str, str]:
    """Return public name -> module, as type checkers read it in the TYPE_CHECKING block."""
    blocks = [
        n
        for n in parsed(face).body
        if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    imports = [
        node
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    ]
    names = {
        alias.asname or alias.name: node.module or ""
        for node in imports
        for alias in node.names
    }
    names.pop("*", None)  # the names of bundled extensions, below
    if face.__name__.startswith("hasten.extensions."):
        return names
    return {
        name: module
        for name, module in names.items()
        if not module.startswith("hasten.extensions.")
    }


def snapshot() -> str:
    """Return the snapshot's text: the names of public modules, and the public members of the Accelerator."""
    names = [
        f"{user_name(face)}.{name}" for face in FACES for name in sorted(face.__all__)
    ]
    names += [
        f"hasten.{name} ({offer.extension})"
        for name, offer in sorted(offers("public_names").items())
    ]
    names += [
        f"hasten.Accelerator.{name}"
        for name in sorted(vars(hasten.Accelerator))
        if not name.startswith("_")
    ]
    return "".join(f"{name}\n" for name in names)


@each_face
def test_types_and_table_are_one_list(face: ModuleType) -> None:
    modules = dict.fromkeys(vars(face).get("_MODULES", ()), face.__name__)
    assert typed_table(face) == lazy_table(face) | modules, (
        "write a name both in the TYPE_CHECKING block and in _PUBLIC"
    )


def test_type_checkers_see_the_public_names_of_bundled_extensions() -> None:
    declared = {
        name: offer.place.partition(":")[0]
        for name, offer in offers("public_names").items()
    }
    imports = [
        node
        for node in parsed(hasten.extensions.public).body
        if isinstance(node, ast.ImportFrom)
    ]
    listed = {
        alias.asname or alias.name: node.module
        for node in imports
        for alias in node.names
    }
    listed.pop("annotations", None)
    assert listed == declared


@each_face
def test_names_are_reexported_to_type_checkers(face: ModuleType) -> None:
    text = Path(face.__file__ or "").read_text("utf-8")
    missing = [name for name in lazy_table(face) if f"{name} as {name}" not in text]
    assert not missing, (
        f"write `from module import X as X` for {missing}: strict mypy hides other imports"
    )


@each_face
def test_a_public_module_holds_its_table_alone(face: ModuleType) -> None:
    extra_nodes = [
        node for node in parsed(face).body if type(node).__name__ not in FORM
    ]
    assert not extra_nodes, (
        f"{face.__name__} holds {ast.unparse(extra_nodes[0])[:60]}; logic belongs in another module"
    )
    assert [
        ast.unparse(node)
        for node in parsed(face).body[-1].body  # type: ignore[attr-defined]
        if isinstance(node, ast.Assign)
    ] == [
        f"__getattr__, __dir__ = exports(__name__, _PUBLIC{', _MODULES, extensible=True' if face is hasten else ', extensible=True' if face in (hasten.extensions.bigmodel, hasten.data) else ''})"
    ]


def test_names_match_the_snapshot() -> None:
    assert snapshot() == SNAPSHOT.read_text("utf-8"), (
        "if meant, run `make names` and commit"
    )


def test_public_members_of_the_accelerator_are_described_and_components_are_private() -> (
    None
):
    members = {
        name: value
        for name, value in vars(hasten.Accelerator).items()
        if not name.startswith("_")
    }
    missing = [
        name
        for name, value in members.items()
        if not (getattr(value, "__doc__", None) or "").strip()
    ]
    assert not missing, f"no docstring: {missing}"
    accelerator = hasten.Accelerator(cpu=True, trust="off")
    assert {name for name in vars(accelerator) if not name.startswith("_")} == {
        "config",
        "ctx",
        "process",
    }


def test_the_top_level_holds_what_most_scripts_import() -> None:
    assert len(hasten.__all__) <= MOST_AT_THE_TOP, (
        "put the name into hasten.bigmodel, .data, .trainer, .extending or .testing"
    )


@pytest.mark.parametrize(
    ("face", "name", "module"),
    [(face, *row) for face in FACES for row in sorted(lazy_table(face).items())],
)
def test_name_loads_from_its_room(face: ModuleType, name: str, module: str) -> None:
    value = getattr(face, name)
    assert value is getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@each_face
def test_dir_lists_every_name_before_it_is_loaded(face: ModuleType) -> None:
    code = (
        f"import {face.__name__} as face, sys; modules = vars(face).get('_MODULES', ()); "
        "assert {*face.__all__, *modules} == set(dir(face)), dir(face); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_modules_are_attributes_without_an_import_of_their_own() -> None:
    code = "import hasten, sys; assert hasten.extending.__all__ and hasten.errors.HastenError and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'Acelerator'; public names are listed in hasten.__all__",
    ):
        _ = hasten.Acelerator  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError,
        match=r"module 'hasten.extensions.trainer' has no attribute 'Treiner'",
    ):
        _ = hasten.extensions.trainer.Treiner  # type: ignore[attr-defined]


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = (REPOSITORY / "docs" / "api").glob("*.md")
    named = [
        name
        for page in pages
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(named) == len(set(named)), "a name twice"
    objects = {id(object_named(name)) for name in named}
    missing = [
        f"{face.__name__}.{name}"
        for face in FACES
        for name in face.__all__
        if name != "__version__"
        and f"{face.__name__}.{name}" not in named
        and id(getattr(face, name)) not in objects
    ]
    assert not [
        name
        for name in missing
        if name.removeprefix("hasten.") not in vars(hasten.errors)
    ], missing
    assert "hasten.errors" in named


def object_named(name: str) -> object:
    """Return the object of a dotted name in the reference."""
    module, _, last = name.rpartition(".")
    return (
        importlib.import_module(name)
        if module == "hasten" and last == "errors"
        else getattr(importlib.import_module(module), last)
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), "utf-8")
