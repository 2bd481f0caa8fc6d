"""The drop-in's own house: no cycle of imports, nothing of hasten written in private, faces without logic."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from accelerate._impl.surface.homes import HOMES
from tests.support.syntax import lines_of_tokens

SOURCE = Path(__file__).parent.parent / "src"
FACES = json.loads((Path(__file__).parent / "golden" / "names.json").read_text())
MAX_BODY_TOKENS = 176
FROM_HASTEN = {  # functions that hasten once showed: name -> tokens
    "accelerate._impl.models.align __init__": 127,
    "accelerate._impl.models.align init_hook": 235,
    "accelerate._impl.models.align attach_align_device_hook": 144,
    "accelerate._impl.models.hooked dispatch_model": 288,
}
MAX_TOKENS = 99_600


def modules() -> dict[str, Path]:
    """Every module of the drop-in by its name."""
    files_by_module = {}
    for file in SOURCE.rglob("*.py"):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        files_by_module[name.removesuffix(".__init__")] = file
    return files_by_module


def imports(file: Path, files_by_module: dict[str, Path]) -> Iterator[str]:
    """Modules of the drop-in that a file imports anywhere, for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name in files_by_module
            )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in files_by_module or node.module in files_by_module:
                    yield inner if inner in files_by_module else node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    files_by_module = modules()
    left = {
        name: {
            imported for imported in imports(file, files_by_module) if imported != name
        }
        for name, file in files_by_module.items()
    }
    while free := [
        name for name, dependencies in left.items() if not dependencies & left.keys()
    ]:
        for name in free:
            del left[name]
    assert left == {}


def test_only_own_attributes_are_written_in_private() -> None:
    own_names = ("self", "cls")
    marks = (
        "_is_accelerate_prepared",
        "_step_count",
        "_hf_hook",
        "_orig_mod",
    )  # where other libraries look for them
    foreign_writes = [
        f"{name}:{target.lineno} {ast.unparse(target)}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign)
        for top in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (top.elts if isinstance(top, ast.Tuple) else [top])
        if isinstance(target, ast.Attribute)
        and target.attr.startswith("_")
        and not target.attr.startswith("__")
        if not (isinstance(target.value, ast.Name) and target.value.id in own_names)
        and target.attr not in marks
    ]
    assert foreign_writes == []


def faces() -> dict[str, ast.Module]:
    """The modules above the rooms, parsed."""
    return {
        name: ast.parse(file.read_text())
        for name, file in modules().items()
        if "._impl" not in name
    }


def num_tokens(node: ast.FunctionDef, token_lines: tuple[int, ...]) -> int:
    """The tokens of a function's body, without its docstring; its signature is the original's."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    return sum(
        body[0].lineno <= line <= (body[-1].end_lineno or 0) for line in token_lines
    )


def shown() -> Iterator[tuple[str, int]]:
    """What faces show, wherever it is defined, with its size: functions, and methods of classes that are not private."""
    face_names = {name for names in FACES.values() for name in names}
    for module, file in modules().items():
        token_lines = lines_of_tokens(file.read_text())
        for node in ast.parse(file.read_text()).body:
            if "._impl" in module and getattr(node, "name", None) not in face_names:
                continue
            if (
                "._impl.testing.scripts." in module
            ):  # checks that run by themselves, no face of anything
                continue
            for member in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(member, ast.FunctionDef) and (
                    member.name.startswith("__") or not member.name.startswith("_")
                ):
                    yield (
                        f"{module}:{member.lineno} {member.name}",
                        num_tokens(member, token_lines),
                    )


def test_functions_that_faces_show_are_short() -> None:
    functions = dict(shown())
    assert len(functions) > 350  # the search finds them
    limits = {
        name: FROM_HASTEN.get(re.sub(r":\d+", "", name), MAX_BODY_TOKENS)
        for name in functions
    }
    long_functions = [
        f"{name}: {size}" for name, size in functions.items() if size > limits[name]
    ]
    assert not long_functions, "\n".join(long_functions)


def test_faces_hold_no_logic() -> None:
    """Re-exports and tables: no class, and no function but the two of a module that loads names on first use."""
    definitions = [
        f"{name}.{node.name}"
        for name, tree in faces().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name not in ("__getattr__", "__dir__")
    ]
    assert definitions == []


@pytest.mark.filterwarnings("ignore")  # an old place says so
def test_what_faces_show_names_them_as_its_home() -> None:
    """Messages, pickles and other libraries' checks see the established modules, not the rooms."""
    wrong = []
    for face, names in FACES.items():
        if face not in modules():
            continue
        shown = vars(importlib.import_module(face))
        for name, kind in names.items():
            home = getattr(shown.get(name), "__module__", "")
            if kind == "class" and home.startswith("accelerate._impl"):
                wrong.append(f"{face}.{name} says {home}")
    assert wrong == []


def test_rooms_have_their_homes_before_any_face_is_loaded() -> None:
    """Pickles and messages name the established module also where nobody has imported it."""
    assert (
        sorted(set(HOMES) - set(modules())) == []
    )  # the table names rooms that are there
    code = (
        "import sys; from accelerate._impl.views.state import PartialState; from accelerate._impl.enums import RNGType; "
        "print(PartialState.__module__, RNGType.__module__, 'accelerate.state' in sys.modules)"
    )
    printed_words = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed_words == [
        "accelerate.state",
        "accelerate.utils.dataclasses",
        "False",
    ]


@pytest.mark.filterwarnings("ignore")  # of packages that are looked for
def test_annotations_of_classes_that_have_another_home_are_no_strings() -> None:
    """`get_type_hints()` would look for their names in the face, which shows public names only."""
    delayed = [
        f"{home}.{name}: {field}"
        for room, home in HOMES.items()
        for name, candidate in vars(importlib.import_module(room)).items()
        if isinstance(candidate, type) and candidate.__module__ == home
        for field, kind in vars(candidate).get("__annotations__", {}).items()
        if isinstance(kind, str)
    ]
    assert delayed == []


def test_messages_are_called_by_name_with_their_values() -> None:
    """Each message of the table has a caller, and each caller gives as many values as the message has places for."""
    table = json.loads(
        (SOURCE / "accelerate" / "_impl" / "surface" / "messages.json").read_text()
    )
    fields_by_name = {
        name: [field for _, field, _, _ in Formatter().parse(text)]
        for name, text in table.items()
    }
    calls = {
        node.args[0].value: len(node.args) - 1
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "message"
        if isinstance(node.args[0], ast.Constant)
    }
    assert calls == {
        name: fields.count("") + len({*fields} - {"", None})
        for name, fields in fields_by_name.items()
    }


def test_the_dropin_does_not_grow_unseen() -> None:
    """Names were added; the tokens that carry them are counted."""
    assert (
        sum(len(lines_of_tokens(file.read_text())) for file in modules().values())
        < MAX_TOKENS
    )


def test_every_table_is_part_of_the_distribution() -> None:
    settings = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["package-data"]
    root = SOURCE / "accelerate"
    shipped = {
        file for pattern in settings["accelerate"] for file in root.glob(pattern)
    }
    tables = {
        file for file in root.rglob("*") if file.suffix in (".json", ".txt", ".yaml")
    }
    assert tables and tables <= shipped, (
        f"not in package-data: {sorted(map(str, tables - shipped))}"
    )
