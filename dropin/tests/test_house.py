"""The drop-in's own house: no cycle of imports, nothing of hasten written in private, short functions in the faces."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
FACES = json.loads((Path(__file__).parent / "golden" / "names.json").read_text())
LONGEST = 10


def modules() -> dict[str, Path]:
    """Every module of the drop-in by its name."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the drop-in that a file imports anywhere, for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    left = {name: {one for one in imports(file, known) if one != name} for name, file in known.items()}
    while free := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_only_own_attributes_are_written_in_private() -> None:
    own = ("self", "cls")
    marks = ("_is_accelerate_prepared", "_step_count", "_hf_hook", "_orig_mod")  # where other libraries look for them
    found = [
        f"{name}:{target.lineno} {ast.unparse(target)}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign)
        for top in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (top.elts if isinstance(top, ast.Tuple) else [top])
        if isinstance(target, ast.Attribute) and target.attr.startswith("_") and not target.attr.startswith("__")
        if not (isinstance(target.value, ast.Name) and target.value.id in own) and target.attr not in marks
    ]
    assert found == []


def statements(node: ast.AST) -> int:
    """The statements of a function, those inside of blocks too; a function inside of it counts as one."""
    count = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            count += 1
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            count += isinstance(child, ast.stmt) + statements(child)
    return count


def test_functions_of_faces_are_short() -> None:
    """A line is a statement: how a formatter breaks a call over lines does not count."""
    found = [
        f"{name}.{node.name}"
        for name, file in modules().items()
        if name in FACES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        if statements(node) - (ast.get_docstring(node) is not None) > LONGEST
    ]
    assert found == []
