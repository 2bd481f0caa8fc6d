"""One-token mutants of a module: comparisons, arithmetic, constants, conditions and return values, each changed in one place."""

from __future__ import annotations

import ast
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module's source with one token changed."""

    module: str
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        """Module, line and change, as a survivor is listed."""
        return f"{self.module}:{self.line} {self.change}"


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines."""
    num_places = len(_Places.of(source))
    mutants = []
    for index in range(num_places):
        tree = ast.parse(source)
        spot = _Places.of_tree(tree)[index]
        original_text = spot.text()
        spot.mutate()
        change = f"{original_text} -> {spot.text()}"
        mutants.append(
            Mutant(
                module, spot.line, change, ast.unparse(ast.fix_missing_locations(tree))
            )
        )
    return mutants


@dataclass(slots=True)
class _Place:
    """A node that can be changed."""

    node: ast.expr | ast.stmt
    operand: int = 0

    @property
    def line(self) -> int:
        return self.node.lineno

    def text(self) -> str:
        """Return the node's first line as source code: of a branch, its condition."""
        if isinstance(self.node, ast.If | ast.While):
            return f"if {ast.unparse(self.node.test)}"
        return ast.unparse(self.node)

    def mutate(self) -> None:
        """Change the node in place."""
        match self.node:
            case ast.Compare() as comparison:
                operator = comparison.ops[self.operand]
                comparison.ops[self.operand] = COMPARISONS[type(operator)]()
            case ast.BinOp() | ast.AugAssign() as arithmetic:
                arithmetic.op = ARITHMETIC[type(arithmetic.op)]()
            case ast.BoolOp() as condition:
                condition.op = (
                    ast.Or() if isinstance(condition.op, ast.And) else ast.And()
                )
            case ast.Constant() as constant:
                constant.value = (
                    not constant.value
                    if isinstance(constant.value, bool)
                    else _next_number(constant)
                )
            case ast.If() | ast.While() | ast.IfExp() as branch:
                branch.test = ast.UnaryOp(ast.Not(), branch.test)
            case ast.Return() as returned:
                returned.value = ast.Constant(None)
            case node:
                raise AssertionError(f"no mutation of {type(node).__name__}")


def _next_number(constant: ast.Constant) -> int | float:
    assert isinstance(constant.value, int | float)
    return constant.value + 1


class _Places(ast.NodeVisitor):
    """Collects the places of a module that can be changed; messages, annotations and decorators are left out."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self._statement: ast.stmt = ast.Pass()

    @classmethod
    def of(cls, source: str) -> list[_Place]:
        return cls.of_tree(ast.parse(source))

    @classmethod
    def of_tree(cls, tree: ast.Module) -> list[_Place]:
        visitor = cls()
        for statement in tree.body:
            visitor.visit(statement)
        return visitor.places

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are left to the tests of messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion never acts in a correct program."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text is left to the tests of messages."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operand, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                self.places.append(_Place(node, operand))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(side, TEXT) or _is_string(side)
            for side in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not is_text:
            self.places.append(_Place(node))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC and not isinstance(node.value, TEXT):
            self.places.append(_Place(node))
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.places.append(_Place(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool | int | float):
            self.places.append(_Place(node))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.places.append(_Place(node))
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.places.append(_Place(node))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.places.append(_Place(node))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.places.append(_Place(node))
        self.visit(node.value)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
