"""Every setting acts or is refused: each field of the schema has a reader in the library, or a rule that refuses it, proven by running.

A read counts when the attribute is taken from something known to hold its section: a parameter or attribute annotated with the
section's class, a name bound to `….section` or `….section(Class)`, or the chain `….section.field` itself. Reading in `config` or `cli` does not count:
there settings are only carried. A property of a section counts as a reader of what it reads if the library reads the property.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import pytest

import hasten
import hasten.extensions.bigmodel
import hasten.extensions.trainer
from hasten.config import checks
from hasten.config.base import Section
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.config.schema import BY_PATH, FIELDS, FieldInfo, subsection
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError
from hasten.optim.run_part import EVENTS
from tests.support.syntax import trees

SOURCE: Final = Path(hasten.__file__).parent
CARRIERS: Final = ("config", "cli")


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """The names of a chain such as `self._config.fsdp`; calls and subscripts end it."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return tuple(reversed(names))


def _classes_in(annotation: ast.expr | None) -> set[str]:
    if annotation is None:
        return set()
    class_names = {
        node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)
    }
    return class_names | {
        node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)
    }


class Module:
    """One file: which names hold which section, and which attributes are read from them."""

    def __init__(self, tree: ast.Module, owners: frozenset[str]) -> None:
        kinds = (ast.arg, ast.AnnAssign, ast.Assign, ast.Attribute, ast.Call)
        self._nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        # last name of an expression -> classes it may hold
        self._holders: dict[str, set[str]] = {}
        self._sections = owners
        self._annotations()
        for _ in range(3):  # names bound to names bound to …
            self._bindings()

    def _add_holder(self, name: str, classes: set[str]) -> None:
        self._holders.setdefault(name, set()).update(classes)

    def _annotations(self) -> None:
        for node in self._nodes:
            if isinstance(node, ast.arg):
                self._add_holder(
                    node.arg, _classes_in(node.annotation) & self._sections
                )
            elif isinstance(node, ast.AnnAssign) and (names := _dotted(node.target)):
                self._add_holder(
                    names[-1], _classes_in(node.annotation) & self._sections
                )

    def _bindings(self) -> None:
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(
                        node.value, ast.Tuple
                    ):
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    for left, right in pairs:
                        if (names := _dotted(left)) and (
                            section_classes := self._classes_of(right)
                        ):
                            self._add_holder(names[-1], section_classes)

    def _classes_of(self, node: ast.expr) -> set[str]:
        """The section classes that an expression may hold."""
        if isinstance(node, ast.BoolOp):
            return set().union(*(self._classes_of(value) for value in node.values))
        if isinstance(node, ast.Call) and _dotted(node.func)[-1:] == ("section",):
            return _classes_in(node.args[0]) & self._sections
        names = _dotted(node)
        if not names:
            return set()
        section_classes = set(self._holders.get(names[-1], set()))
        if isinstance(node, ast.Attribute):
            for cls in self._classes_of(node.value) or {"Config"}:
                section_classes |= {
                    inner
                    for owner, name, inner in SECTIONS
                    if owner == cls and name == names[-1]
                }
        return section_classes

    def reads(self) -> Iterator[tuple[str, str]]:
        """(class, field) for every attribute taken from a section; `given(section)` takes all of them."""
        for node in self._nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "given"
            ):
                for cls in self._classes_of(node.args[0]):
                    yield from (
                        (cls, info.path[-1])
                        for info in FIELDS
                        if info.owner.__name__ == cls
                    )
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                for cls in self._classes_of(node.value):
                    yield cls, node.attr


def _sections() -> tuple[tuple[str, str, str], ...]:
    """(owner, field, class) of every field that holds a section."""
    section_fields: list[tuple[str, str, str]] = []
    todo: list[type[Section]] = [Config]
    while todo:
        cls = todo.pop()
        for name, spec in cls.__dataclass_fields__.items():
            if inner := subsection(spec.type):
                section_fields.append((cls.__name__, name, inner.__name__))
                todo.append(inner)
    return tuple(section_fields)


SECTIONS: Final = _sections()
OWNERS: Final = frozenset({"Config", *(cls for _, _, cls in SECTIONS)})


@cache
def all_reads() -> frozenset[tuple[str, str]]:
    reads: set[tuple[str, str]] = set()
    for path, tree in trees(SOURCE).items():
        if path.relative_to(SOURCE).parts[0] not in CARRIERS:
            reads |= set(Module(tree, OWNERS).reads())
    return frozenset(reads)


def has_reader(info: FieldInfo) -> bool:
    return (info.owner.__name__, info.path[-1]) in all_reads()


def alternative_values(info: FieldInfo) -> list[Any]:  # Any: values of every type
    """Values besides the default; none for a setting that can have one value only."""
    if get_origin(info.type) is Literal:
        return [value for value in get_args(info.type) if value != info.default]
    kinds = {
        info.type,
        get_origin(info.type),
        *get_args(info.type),
        *map(get_origin, get_args(info.type)),
    } - {NoneType}
    literal = [
        value
        for type_argument in get_args(info.type)
        if get_origin(type_argument) is Literal
        for value in get_args(type_argument)
    ]
    if bool in kinds:
        return [not info.default]
    for kind, value in ((int, 7), (float, 0.75), (str, "something")):
        if kind in kinds:
            return [value]
    if tuple in kinds:
        return [(1,) if "int" in str(info.type) else ("something",)]
    return literal or [{"a": 1} if "Mapping" in str(info.type) else print]


# Any: a value of the setting
def refusals(info: FieldInfo, value: Any) -> list[ConfigError]:
    entry = SettingEntry(info.path, value, SettingSource("code", info.path[-1]))
    try:
        checks.refuse_absent({info.path: entry})
    except ConfigError as error:
        return [error]
    return []


@pytest.mark.parametrize("info", FIELDS, ids=lambda info: info.name)
def test_every_setting_acts_or_is_refused(info: FieldInfo) -> None:
    values = alternative_values(info)
    if has_reader(info) or not values:
        return
    for value in values:
        complaints = refusals(info, value)
        assert complaints, (
            f"{info.name}={value!r} has no reader in the library and no row in config/checks.py refuses it"
        )
        assert str(complaints[0]).startswith(f"{info.name}=")
        assert "\n" not in str(complaints[0])
    assert not refusals(info, info.default)


def test_every_row_of_the_table_refuses_something() -> None:
    for path, row in checks.ABSENT:
        below = [
            info
            for info in FIELDS
            if info.path[: len(path)] == path and info.path[-1] not in row.but
        ]
        assert below, f"{path} is no setting"
        assert any(
            checks.refuses(
                row,
                SettingEntry(info.path, value, SettingSource("code", info.name)),
            )
            for info in below
            for value in alternative_values(info)
        ), row
        for name in row.but:
            assert has_reader(BY_PATH[(*path, name)]), (
                f"{path}.{name} is excepted but nobody reads it"
            )


def test_the_finder_finds_and_misses() -> None:
    def reads(text: str) -> set[tuple[str, str]]:
        return set(Module(ast.parse(text), OWNERS).reads())

    assert ("LaunchConfig", "role") in reads(
        "def f(config: Config): return config.launch.role"
    )
    assert ("LaunchConfig", "role") in reads(
        "def f(c: Config):\n  launch, x = c.launch, 1\n  return launch.role"
    )
    assert ("LaunchConfig", "role") in reads(
        "class A:\n  def __init__(self, l: LaunchConfig): self._l = l\n  def f(self): return self._l.role"
    )
    assert ("LaunchConfig", "role") not in reads(
        "def f(report: Report): return report.role"
    )
    assert ("LaunchConfig", "role") not in reads(
        "def f(config: Config): config.launch.role = 1"
    )
    assert ("TERecipeKwargs", "margin") in reads(
        "def f(c: FP8Config): return c.te.margin"
    )
    assert not has_reader(BY_PATH[("fp8", "te", "interval")])


def test_settings_of_code_and_files_are_refused_alike(tmp_path: Path) -> None:
    for name, value, words in (
        ("xla.downcast_bf16", True, "deprecated there, is not in this version"),
        (
            "megatron.use_custom_fsdp",
            True,
            "sharding parameters or offloading optimizer state with Megatron is not in this version",
        ),
        (
            "parallelism.tp_handler.enable_async_tp",
            True,
            "tensor parallelism is not in this version",
        ),
        (
            "parallelism.sp_handler.sp_seq_length",
            8,
            "kernels for sequence parallelism is not in this version",
        ),
    ):
        resolved = resolve(code={name: value})
        with pytest.raises(ConfigError, match=words):
            checks.refuse_absent(resolved.entries)
    # of another tool, for a strategy not chosen
    leftover = resolve(env={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    checks.refuse_absent(leftover.entries)


# ---------------------------------------------------------------- parameters of the public surface

BASES: Final = frozenset(
    {"ModelHook", "SequentialHook", "RunPart"}
)  # every method has an answer for an object that does nothing


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every public function, and every public method of the public classes."""
    faces = (
        hasten,
        hasten.extensions.bigmodel,
        hasten.extending,
        hasten.testing,
        hasten.extensions.trainer,
    )
    for name, module in {
        name: home for face in faces for name, home in vars(face)["_PUBLIC"].items()
    }.items():
        path = SOURCE.parent / Path(*module.split(".")).with_suffix(".py")
        for node in trees(SOURCE)[path].body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == name
                and not _is_stub(node)
            ):
                yield name, node
            elif (
                isinstance(node, ast.ClassDef)
                and node.name == name
                and name not in BASES
            ):
                methods = [
                    inner for inner in node.body if isinstance(inner, ast.FunctionDef)
                ]
                public = [
                    public_method
                    for public_method in methods
                    if not public_method.name.startswith("_")
                    or public_method.name == "__init__"
                ]
                parents = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if "TrainerCallback" in parents:  # events: the Trainer calls them
                    public = [
                        method for method in public if not method.name.startswith("on_")
                    ]
                if "RunPart" in parents:  # events: the run calls them
                    public = [method for method in public if method.name not in EVENTS]
                yield from (
                    (f"{name}.{public_method.name}", public_method)
                    for public_method in public
                    if not _is_stub(public_method)
                )


def _is_stub(function: ast.FunctionDef) -> bool:
    """Whether the body says nothing but what an implementation must do."""
    if any(
        isinstance(mark, ast.Name) and mark.id == "overload"
        for mark in function.decorator_list
    ):
        return True
    body = [
        node
        for node in function.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return not body or (len(body) == 1 and isinstance(body[0], ast.Raise))


def unread_parameters(function: ast.FunctionDef) -> list[str]:
    """The parameters that the body never reads; `locals()` reads all of them."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [
        argument
        for argument in (arguments.vararg, arguments.kwarg)
        if argument is not None
    ]
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    }
    if "locals" in read:
        return []
    return [
        argument.arg
        for argument in named
        if argument.arg not in read | {"self", "cls"}
        and not argument.arg.startswith("_")
    ]


def test_every_parameter_of_the_public_surface_is_read() -> None:
    functions = list(public_functions())
    assert len(functions) > 100
    ignored = [
        f"{name}({parameter}=)"
        for name, function in functions
        for parameter in unread_parameters(function)
    ]
    assert not ignored, f"accepted and ignored: {ignored}; let them act, or refuse them"
    example = ast.parse("def f(a, b, *, c): return a + c").body[0]
    assert isinstance(example, ast.FunctionDef)
    assert unread_parameters(example) == ["b"]
    assert {name for name, _ in functions} > {
        "Accelerator.__init__",
        "dispatch_model",
        "Trainer.train",
        "Pool.run",
    }
