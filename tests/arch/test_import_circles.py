"""No module of the library imports itself through others, imports for type checkers included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import hasten
from tests.support.syntax import trees

ROOT: Final = Path(hasten.__file__).parent


def module_name(file: Path, root: Path) -> str:
    """Return the dotted name of the module in this file."""
    name_parts = file.relative_to(root.parent).with_suffix("").parts
    return ".".join(name_parts[:-1] if name_parts[-1] == "__init__" else name_parts)


def imports_of(tree: ast.Module, package_modules: frozenset[str]) -> Iterator[str]:
    """Yield the known modules that a module imports anywhere: at its top, under TYPE_CHECKING, or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.level == 0
        ):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            owner = name.rpartition(".")[0]
            if imported := next(
                (
                    candidate
                    for candidate in (name, owner)
                    if candidate in package_modules
                ),
                None,
            ):
                yield imported


def graph_of(root: Path) -> dict[str, set[str]]:
    """Return the modules below `root`, each with the modules that it imports."""
    files = {module_name(file, root): tree for file, tree in trees(root).items()}
    package_modules = frozenset(files)
    return {
        name: set(imports_of(tree, package_modules)) - {name, root.name}
        for name, tree in files.items()
    }


def circles_in(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, each sorted."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reachable, waiting = set[str](), [start]
        while waiting:
            for imported in graph[waiting.pop()] - reachable:
                reachable.add(imported)
                waiting.append(imported)
        reached[start] = reachable
    groups = {
        tuple(sorted(b for b in reachable if a in reached[b]))
        for a, reachable in reached.items()
        if a in reachable
    }
    return sorted(map(list, groups))


def test_no_module_imports_itself_through_others() -> None:
    import_circles = circles_in(graph_of(ROOT))
    assert not import_circles, (
        f"these modules import each other; move what they share below them: {import_circles}"
    )


def test_a_circle_is_found_wherever_its_imports_are(tmp_path: Path) -> None:
    root = tmp_path / "toy"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "inner" / "__init__.py").touch()
    (root / "a.py").write_text("from toy.inner import b\n")
    (root / "inner" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.c import C\n"
    )
    (root / "c.py").write_text(
        "class C:\n    def f(self) -> None:\n        import toy.a\n"
    )
    (root / "d.py").write_text("from toy.a import b\n")
    assert circles_in(graph_of(root)) == [["toy.a", "toy.c", "toy.inner.b"]]
