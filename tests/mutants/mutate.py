"""One-token mutants of a module: a comparison, an operator, a constant, a condition or a return value changed in one place."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Final

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
TEXT: Final = (ast.JoinedStr, ast.FormattedValue)
MAX_CHANGE_WIDTH: Final = 60
"""Characters of source shown of a change; the changed node itself may be longer."""

SHOWN_AROUND: Final = (
    ast.expr,
    ast.keyword,
    ast.comprehension,
    ast.Return,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
)
Branch = ast.If | ast.While | ast.IfExp
Compound = (
    ast.If,
    ast.While,
    ast.For,
    ast.With,
    ast.Try,
    ast.Match,
    ast.FunctionDef,
    ast.ClassDef,
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one token changed."""

    path: Path
    function: str
    """Qualified name of the function; "" at the level of the module."""
    line: int
    lines: frozenset[int]
    """Lines of which a test must execute one to notice the change; empty if every test of the module may."""
    change: str
    index: int

    def code(self) -> CodeType:
        """Compile the changed module, with the line numbers of the original."""
        tree = ast.parse(self.path.read_text("utf-8"))
        _sites_of(tree)[self.index].mutate()
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec")


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines."""
    sites = _sites_of(ast.parse(path.read_text("utf-8")))
    return [
        Mutant(
            path,
            site.function,
            site.line,
            site.covering_lines(),
            site.describe(),
            index,
        )
        for index, site in enumerate(sites)
    ]


@dataclass(frozen=True, slots=True)
class _Site:
    """A node that can be changed, with the nodes around it, the outermost first."""

    node: ast.AST
    line: int
    ancestors: tuple[ast.AST, ...]
    operand: int = 0
    """Index of a comparison's operator."""

    @property
    def function(self) -> str:
        return ".".join(
            node.name
            for node in self.ancestors
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        )

    @property
    def statement(self) -> ast.stmt:
        """The innermost statement around the node."""
        return [
            node for node in (*self.ancestors, self.node) if isinstance(node, ast.stmt)
        ][-1]

    def covering_lines(self) -> frozenset[int]:
        """Return the lines that run with the change: those of its statement, or of the function whose default it is."""
        statement = self.statement
        functions = [
            node for node in self.ancestors if isinstance(node, ast.FunctionDef)
        ]
        if not functions:
            return frozenset()
        if isinstance(statement, ast.FunctionDef):
            first_line, last_line = statement.body[0].lineno, statement.end_lineno
        elif isinstance(statement, Compound):
            first_line, last_line = statement.lineno, _header_end(statement)
        else:
            first_line, last_line = statement.lineno, statement.end_lineno
        return frozenset(range(first_line, (last_line or first_line) + 1))

    def describe(self) -> str:
        """Return the source before and after, as much of it around the node as fits; leaves the tree as it was."""
        shown_node = self.node
        for ancestor in reversed(self.ancestors):
            if not isinstance(ancestor, SHOWN_AROUND):
                break
            if len(ast.unparse(ancestor)) > MAX_CHANGE_WIDTH:
                break
            shown_node = ancestor
        before = _header_text(shown_node)
        undo = self.mutate()
        after = _header_text(shown_node)
        undo()
        return f"{before} -> {after}"

    def mutate(self) -> Callable[[], None]:
        """Change the node in place; return a function that undoes it."""
        match self.node:
            case ast.Compare(ops=operators):
                changed = COMPARISONS[type(operators[self.operand])]()
                return _set(
                    self.node,
                    "ops",
                    [
                        changed if index == self.operand else operator
                        for index, operator in enumerate(operators)
                    ],
                )
            case ast.BinOp(op=operator) | ast.AugAssign(op=operator):
                return _set(self.node, "op", ARITHMETIC[type(operator)]())
            case ast.BoolOp(op=ast.And()):
                return _set(self.node, "op", ast.Or())
            case ast.BoolOp():
                return _set(self.node, "op", ast.And())
            case ast.UnaryOp(op=ast.Not()):
                # a second `not` keeps the type, which dropping the first would change
                return _set(self.node, "operand", _negated(self.node.operand))
            case ast.UnaryOp():
                return _set(self.node, "op", ast.UAdd())
            case ast.Constant(value=bool(flag)):
                return _set(self.node, "value", not flag)
            case ast.Constant(value=int(number) | float(number)):
                return _set(self.node, "value", number + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                return _set(self.node, "test", _negated(test))
            case ast.comprehension(ifs=conditions):
                return _set(
                    self.node,
                    "ifs",
                    [
                        _negated(condition) if index == self.operand else condition
                        for index, condition in enumerate(conditions)
                    ],
                )
            case ast.Return():
                return _set(self.node, "value", ast.Constant(None))
            case node:
                raise AssertionError(f"no mutation of {type(node).__name__}")


def _set(node: ast.AST, field: str, changed: object) -> Callable[[], None]:
    original = getattr(node, field)
    setattr(node, field, changed)
    return lambda: setattr(node, field, original)


def _negated(condition: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), condition), condition)


def _header_end(statement: ast.stmt) -> int:
    """Return the last line before the body of a compound statement."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    return max(statement.lineno, body[0].lineno - 1) if body else statement.lineno


def _header_text(node: ast.AST) -> str:
    """Return a node as source code on one line: of a branch, its condition."""
    match node:
        case ast.If(test=test):
            return f"if {ast.unparse(test)}"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}"
        case ast.comprehension():
            return ast.unparse(node).strip()
        case _:
            return ast.unparse(node)


def _sites_of(tree: ast.Module) -> list[_Site]:
    visitor = _SiteVisitor()
    for statement in tree.body:
        visitor.visit(statement)
    return sorted(visitor.sites, key=lambda site: site.line)


class _SiteVisitor(ast.NodeVisitor):
    """Collects the nodes that can be changed; messages, annotations, assertions and decorators are left out."""

    def __init__(self) -> None:
        self.sites: list[_Site] = []
        self._ancestors: list[ast.AST] = []

    def _add(self, node: ast.AST, line: int, operand: int = 0) -> None:
        self.sites.append(_Site(node, line, tuple(self._ancestors), operand))

    def visit_inside(self, node: ast.AST, *children: ast.AST | None) -> None:
        """Visit some children of a node, or all of them."""
        self._ancestors.append(node)
        for child in children or ast.iter_child_nodes(node):
            if child is not None:
                self.visit(child)
        self._ancestors.pop()

    def generic_visit(self, node: ast.AST) -> None:
        self.visit_inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_inside(node, *node.args.defaults, *node.args.kw_defaults, *node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_inside(node, *node.body)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are left to the tests of messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion never acts in a correct program."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # an assertion of `zip`
            self.visit_inside(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text is left to the tests of messages."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_inside(node, node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operand in range(len(node.ops)):
            self._add(node, node.lineno, operand)
        self.visit_inside(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(side, TEXT) or _is_string(side)
            for side in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not is_text:
            self._add(node, node.lineno)
        self.visit_inside(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC and not isinstance(node.value, TEXT):
            self._add(node, node.lineno)
        self.visit_inside(node, node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add(node, node.lineno)
        self.visit_inside(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        parent = self._ancestors[-1] if self._ancestors else None
        # the condition of a branch is negated already
        is_condition = isinstance(parent, Branch) and parent.test is node
        if isinstance(node.op, ast.USub):
            self._add(node, node.lineno)
        if isinstance(node.op, ast.Not) and not is_condition:
            self._add(node, node.lineno)
        self.visit_inside(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool | int | float):
            self._add(node, node.lineno)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._add(node, node.lineno)
            self.visit_inside(node)

    def visit_While(self, node: ast.While) -> None:
        self._add(node, node.lineno)
        self.visit_inside(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node, node.lineno)
        self.visit_inside(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for operand, condition in enumerate(node.ifs):
            if not isinstance(condition, ast.Compare):  # mutated as a comparison
                self._add(node, condition.lineno, operand)
        self.visit_inside(node)

    def visit_Return(self, node: ast.Return) -> None:
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        if node.value is not None and not is_none:
            self._add(node, node.lineno)
        self.visit_inside(node, node.value)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
