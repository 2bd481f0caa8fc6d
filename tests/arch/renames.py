"""Proof that a commit only renames: `python -m tests.arch.renames [BEFORE] [AFTER]` (commits; by default HEAD~1 and HEAD).

Both versions of each changed file are parsed, docstrings and comments left out, and walked side by side. They must have the same shape, and
inside each function every identifier must stand for one identifier of the other version. Strings may differ only where one is an identifier
that was renamed somewhere in the commit.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from dataclasses import dataclass, field

IDENTIFIER_FIELDS = frozenset({"id", "attr", "arg", "name", "asname", "module", "rest"})


@dataclass
class Renames:
    """Identifiers of one scope: each old one with its new one, and back."""

    new_names: dict[str, str] = field(default_factory=dict)
    old_names: dict[str, str] = field(default_factory=dict)

    def add(self, old: str, new: str) -> bool:
        """Note a pair; return False if either identifier already stands for another one."""
        return (
            self.new_names.setdefault(old, new) == new
            and self.old_names.setdefault(new, old) == old
        )


class Comparison:
    """Comparison of two versions of a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.differences: list[str] = []
        self.strings: list[tuple[str, str]] = []
        self.renamed: set[tuple[str, str]] = set()

    def compare(self, old_tree: ast.AST, new_tree: ast.AST, scope: Renames) -> None:
        """Compare two trees whose identifiers belong to a scope."""
        if type(old_tree) is not type(new_tree):
            self._differ(
                old_tree, f"{type(old_tree).__name__} became {type(new_tree).__name__}"
            )
            return
        if isinstance(old_tree, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = Renames()
        for name, old in ast.iter_fields(old_tree):
            self._compare_field(old_tree, name, old, getattr(new_tree, name), scope)

    def _compare_field(
        self, node: ast.AST, name: str, old: object, new: object, scope: Renames
    ) -> None:
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            self.compare(old, new, scope)
        elif isinstance(old, list) and isinstance(new, list):
            self._compare_lists(node, name, old, new, scope)
        elif (
            isinstance(old, str)
            and isinstance(new, str)
            and (name in IDENTIFIER_FIELDS or name == "names")
        ):
            self._compare_identifiers(node, old, new, scope)
        elif isinstance(old, str) and isinstance(new, str) and old != new:
            self.strings.append((old, new))
        elif old != new:
            self._differ(node, f"{old!r} became {new!r}")

    def _compare_lists(
        self,
        node: ast.AST,
        name: str,
        old: list[object],
        new: list[object],
        scope: Renames,
    ) -> None:
        if name == "body":
            old, new = without_docstring(old), without_docstring(new)
        # sorted by name
        if isinstance(node, ast.ImportFrom | ast.Import) or name == "keywords":
            old_names = sorted(
                ast.dump(item) for item in old if isinstance(item, ast.AST)
            )
            new_names = sorted(
                ast.dump(item) for item in new if isinstance(item, ast.AST)
            )
            if old_names == new_names:
                return
        if len(old) != len(new):
            self._differ(node, f"{len(old)} {name} became {len(new)}")
            return
        for old_item, new_item in zip(old, new, strict=True):
            self._compare_field(node, name, old_item, new_item, scope)

    def _compare_identifiers(
        self, node: ast.AST, old: str, new: str, scope: Renames
    ) -> None:
        if old != new:
            self.renamed.add((old, new))
            if hasattr(builtins, old) or hasattr(builtins, new):
                self._differ(node, f"{old} became {new}, and one of them is a builtin")
        if isinstance(node, ast.Name | ast.arg) and not scope.add(old, new):
            self._differ(node, f"{old} and {new} do not stand for each other")

    def _differ(self, node: ast.AST, difference: str) -> None:
        self.differences.append(
            f"{self.path}:{getattr(node, 'lineno', 1)}: {difference}"
        )


def without_docstring(body: list[object]) -> list[object]:
    """Return the statements of a body without its docstring."""
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


def sorted_imports(tree: ast.Module) -> ast.Module:
    """Sort the imports at the top of a module, whose order follows their names."""
    imports = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
    ]
    statements = [
        statement
        for statement in tree.body
        if not isinstance(statement, ast.Import | ast.ImportFrom)
    ]
    imports.sort(
        key=lambda statement: (
            getattr(statement, "module", "") or "",
            len(statement.names),
        )
    )
    return ast.Module(body=[*imports, *statements], type_ignores=[])


def differences_of(old_files: dict[str, str], new_files: dict[str, str]) -> list[str]:
    """Return what else than names differs between two versions of the same files."""
    comparisons = []
    for path, source in old_files.items():
        comparison = Comparison(path)
        comparison.compare(
            sorted_imports(ast.parse(source)),
            sorted_imports(ast.parse(new_files[path])),
            Renames(),
        )
        comparisons.append(comparison)
    renamed = {pair for comparison in comparisons for pair in comparison.renamed}
    differences = []
    for comparison in comparisons:
        differences += comparison.differences
        differences += [
            f"{comparison.path}: the text {old!r} became {new!r}"
            for old, new in comparison.strings
            if not any(
                old.replace(old_name, new_name) == new for old_name, new_name in renamed
            )
        ]
    return differences


def file_at(commit: str, path: str) -> str:
    """Return a file's text at a commit."""
    return subprocess.run(
        ["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True
    ).stdout


def main(old_commit: str = "HEAD~1", new_commit: str = "HEAD") -> int:
    """Print what else than names changed between two commits; return 1 if anything did."""
    command = [
        "git",
        "diff",
        "--no-renames",
        "--name-status",
        old_commit,
        new_commit,
        "--",
        "*.py",
    ]
    rows = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    changes = [row.split("\t") for row in rows]
    differences = [
        f"{path}: added or deleted" for status, path in changes if status != "M"
    ]
    paths = [path for status, path in changes if status == "M"]
    old_files = {path: file_at(old_commit, path) for path in paths}
    new_files = {path: file_at(new_commit, path) for path in paths}
    differences += differences_of(old_files, new_files)
    sys.stdout.write(
        "\n".join(
            [
                *differences,
                f"{len(paths)} files, {len(differences)} differences that are not names",
            ]
        )
        + "\n"
    )
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
