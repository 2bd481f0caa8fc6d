"""Rewriting of a script from `accelerate` to `hasten`: only names change, so that comments and layout are preserved."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Final

import hasten
from hasten import data, extending, modules
from hasten.config.layers import nearest
from hasten.extension import offers
from hasten.extensions.migrate.attributes import INSTEAD, OF_OTHER_OBJECTS

OLD: Final = "accelerate"
NEW: Final = "hasten"
_MAIN: Final = "Accelerator"


def _homes() -> dict[str, ModuleType]:
    modules_of_names: list[ModuleType] = [data, modules, extending]
    with suppress(ModuleNotFoundError):  # the extension may have been deleted
        # the users' module of another extension
        modules_of_names.append(import_module(f"{NEW}.bigmodel"))
    homes = {name: module for module in modules_of_names for name in module.__all__}
    return homes | dict.fromkeys((*hasten.__all__, *offers("public_names")), hasten)


HOMES: Final = MappingProxyType(_homes())
"""The public module from which a migrated script imports each name."""
NOTES: Final = MappingProxyType(
    {
        "free_memory": "returns one None for one object, where Accelerate returns a list; remove the comma of `model, = ...`",
        "save_state": "without a folder numbers the checkpoints under project_dir",
        "load_state": "also restores the position of loaders; do not call skip_first_batches after it",
        "gather_object": "returns a list with the object of each rank; Accelerate concatenates the lists of the ranks",
        "gather_for_metrics": "counts each sample once; Accelerate truncates the last batch",
        "main_process_first": "may not be nested",
        "init_trackers": "opens hasten's trackers, whose files and folders have other names",
    }
)
"""Methods whose behaviour differs from Accelerate's, with the difference."""
_LOGGER: Final = "get_logger works without an Accelerator, and names the rank in lines of every process only"
_ALONE: Final = "prepare raises an error for an optimizer or scheduler without its model and optimizer; pass them together"
_METHODS: Final = (
    *(
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "prepare_data_loader",
    ),
    *("reduce", "save", "wait_for_everyone"),
)
_TREES: Final = "prepared loaders move batches to the device; other tensors are moved by .to(accelerator.device)"
FUNCTIONS: Final = MappingProxyType(
    {
        **{name: f"use accelerator.{name}()" for name in _METHODS},
        "extract_model_from_parallel": "use accelerator.unwrap_model()",
        "release_memory": "use accelerator.free_memory()",
        "send_to_device": _TREES,
        "AcceleratedOptimizer": "prepare() returns hasten.extending.PreparedOptimizer",
        "AcceleratedScheduler": "prepare() returns hasten.extending.PreparedScheduler",
        "AcceleratorState": "use the attributes of the Accelerator",
        "GeneralTracker": "subclass hasten.extending.Tracker",
        "GradientState": "use accelerator.sync_gradients",
        "PartialState": "use hasten.Process",
    }
)
"""Names of Accelerate's modules that hasten has under another name, with the replacement."""
_PARTS: Final = frozenset(
    {
        *(
            "big_modeling",
            "checkpointing",
            "data_loader",
            "hooks",
            "inference",
            "launchers",
            "local_sgd",
            "logging",
        ),
        *(
            "memory_utils",
            "optimizer",
            "parallelism_config",
            "scheduler",
            "state",
            "test_utils",
            "tracking",
            "utils",
        ),
    }
)
"""Modules of Accelerate."""
_SHUFFLE: Final = "shuffles by seed and epoch, in a different order than Accelerate: single losses differ, loss curves do not"
_SCHEDULER: Final = (
    "steps a prepared scheduler once per update, Accelerate once per process and update: give its lengths (total_steps, "
    "num_training_steps, milestones) in updates"
)


@dataclass(frozen=True, slots=True, order=True)
class MigrationFinding:
    """One line that needs a review."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """A script's new text, and the findings for its author."""

    text: str
    findings: tuple[MigrationFinding, ...]


@dataclass(frozen=True, slots=True)
class _Edit:
    begin: int
    end: int
    text: str


def migrate(source: str) -> Migrated:
    """Return the script with hasten's names. Raises: SyntaxError for text that is not Python."""
    tree = ast.parse(source)
    work = _Script(source, tree)
    work.imports()
    work.uses()
    text = source.encode()
    for edit in sorted(work.edits, key=lambda one: one.begin, reverse=True):
        text = text[: edit.begin] + edit.text.encode() + text[edit.end :]
    return Migrated(text.decode(), tuple(sorted(set(work.findings))))


class _Script:
    """One script under analysis; edits are offsets in its UTF-8 bytes."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self.edits: list[_Edit] = []
        self.findings: list[MigrationFinding] = []
        self._source = source
        self._tree = tree
        lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._bytes = source.encode()
        # names in the script that now refer to hasten -> hasten's names
        self._known: dict[str, str] = {}
        self._num_made = 0
        self._modules: set[str] = set()  # names in the script for the package itself

    def _note(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.findings.append(MigrationFinding(node.lineno, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[(node.end_lineno or node.lineno) - 1] + (
            node.end_col_offset or node.col_offset
        )

    # -- imports --------------------------------------------------------------------------------------------------
    def imports(self) -> None:
        """Edit the import statements."""
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.level == 0
                and _is_old(node.module)
            ):
                self._import_from(node)
            elif isinstance(node, ast.Import):
                self._import(node)

    def _import_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None, "a module without a name is relative"
        taken: dict[str, list[ast.alias]] = {}
        for one in node.names:
            if one.name in HOMES:
                self._known[one.asname or one.name] = one.name
                taken.setdefault(HOMES[one.name].__name__, []).append(one)
        left = [one for one in node.names if one.name not in HOMES]
        for one in left:
            self._note(node, _stays(f"{node.module}.{one.name}", one.name))
        begin, end = self._span(node)
        if (
            len(taken) == 1 and not left
            # only the module's name, to preserve parentheses and comments between the names
        ):
            at = self._bytes.index(node.module.encode(), begin)
            self.edits.append(_Edit(at, at + len(node.module), next(iter(taken))))
        elif taken:
            indent = " " * node.col_offset
            comments = [
                f"{text}\n{indent}"
                for text in _comments(self._bytes[begin:end].decode())
            ]
            homes = [*sorted(taken.items()), *([(node.module, left)] if left else [])]
            parts = [f"from {home} import {_names(names)}" for home, names in homes]
            self.edits.append(
                _Edit(begin, end, "".join(comments) + f"\n{indent}".join(parts))
            )

    def _import(self, node: ast.Import) -> None:
        for one in node.names:
            if one.name == OLD:
                self._modules.add(one.asname or OLD)
                begin, end = self._span(node)
                at = self._bytes.index(OLD.encode(), begin, end)
                self.edits.append(_Edit(at, at + len(OLD), NEW))
            elif _is_old(one.name):
                self._note(
                    node, f"`import {one.name}` stays; import names from hasten instead"
                )

    # -- uses -----------------------------------------------------------------------------------------------------
    def uses(self) -> None:
        """Edit dotted names, and note calls that behave differently in hasten."""
        objects = set(self._accelerators())
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                self._attribute(node, objects)
            elif isinstance(node, ast.Call):
                self._call(node, objects)

    def _accelerators(self) -> Iterator[str]:
        """Yield the names of variables that hold an Accelerator."""
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and self._name(node.value.func) == _MAIN
            ):
                yield from (one.id for one in node.targets if isinstance(one, ast.Name))
        yield "accelerator"

    def _name(self, node: ast.expr) -> str | None:
        """Return hasten's name for an expression, or None."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute) and _root(node) in self._modules:
            return node.attr if node.attr in HOMES else None
        return None

    def _is_accelerator(self, node: ast.expr, objects: set[str]) -> bool:
        """Return whether an expression is a variable with an Accelerator, or a call that creates one."""
        if isinstance(node, ast.Name):
            return node.id in objects
        return isinstance(node, ast.Call) and self._name(node.func) == _MAIN

    def _attribute(self, node: ast.Attribute, objects: set[str]) -> None:
        uses_accelerate = self._known or self._modules
        if (
            uses_accelerate
            and node.attr in OF_OTHER_OBJECTS
            and not self._is_accelerator(node.value, objects)
        ):
            self._note(
                node, f"{node.attr} is not in hasten; {OF_OTHER_OBJECTS[node.attr]}"
            )
        if self._is_accelerator(node.value, objects):
            if (
                not hasattr(hasten.Accelerator, node.attr)
                and node.attr not in hasten.Accelerator.__init__.__code__.co_names
            ):
                instead = f"; {INSTEAD[node.attr]}" if node.attr in INSTEAD else ""
                self._note(node, f"hasten's Accelerator has no {node.attr}{instead}")
            return
        if (
            not isinstance(node.ctx, ast.Load)
            or _root(node) not in self._modules
            or isinstance(node.value, ast.Attribute)
        ):
            if (
                isinstance(node.value, ast.Attribute)
                and _root(node) in self._modules
                and node.attr in HOMES
            ):
                self._replace_dotted(node)
            return
        if node.attr in HOMES:
            self._replace_dotted(node)
        elif node.attr not in _PARTS:
            self._note(node, _stays(f"accelerate.{node.attr}", node.attr))

    def _replace_dotted(self, node: ast.Attribute) -> None:
        """Replace a dotted name: accelerate.utils.set_seed becomes hasten.set_seed."""
        begin, end = self._span(node)
        root = _root(node)
        inner = HOMES[node.attr].__name__.removeprefix(NEW)
        self.edits.append(
            _Edit(begin, end, f"{NEW if root == OLD else root}{inner}.{node.attr}")
        )

    def _call(self, node: ast.Call, objects: set[str]) -> None:
        name = self._name(node.func)
        if any(
            one.arg == "shuffle" and getattr(one.value, "value", True)
            for one in node.keywords
        ):
            self._note(node, f"hasten {_SHUFFLE}")
        if name == _MAIN:
            self._num_made += 1
            if self._num_made > 1:
                self._note(
                    node,
                    "each hasten Accelerator has separate settings; Accelerate shares those of the first",
                )
        if name is not None:
            self._keywords(node, name, getattr(HOMES[name], name))
        if name == "get_logger":
            self._note(node, _LOGGER)
        if not isinstance(node.func, ast.Attribute) or not self._is_accelerator(
            node.func.value, objects
        ):
            return
        method = node.func.attr
        if method in NOTES and not (
            method == "save_state" and (node.args or node.keywords)
        ):
            self._note(node, f"{method} {NOTES[method]}")
        if method == "reduce" and any(one.arg == "scale" for one in node.keywords):
            self._note(
                node,
                "reduce always applies `scale`; Accelerate applies it on TPUs only",
            )
        if method == "prepare":
            self._prepared(node)
        if (found := getattr(hasten.Accelerator, method, None)) is not None:
            self._keywords(node, f"Accelerator.{method}", found)

    def _prepared(self, node: ast.Call) -> None:
        """Note arguments of prepare() that hasten prepares in another way."""
        arguments = [ast.unparse(one).lower() for one in node.args]
        if any(isinstance(one, ast.Constant) for one in node.args):
            self._note(
                node,
                "prepare raises an error for other objects than models, optimizers, schedulers and loaders; Accelerate returns them",
            )
        if len(arguments) == 1 and "optim" in arguments[0]:
            self._note(node, _ALONE)
        if any("sched" in one for one in arguments):
            self._note(node, f"prepare {_SCHEDULER}")

    # Any: a class or function of hasten
    def _keywords(self, node: ast.Call, name: str, target: Any) -> None:
        try:
            known = inspect.signature(target).parameters
        # a property, or a callable without a signature: nothing to compare
        except (TypeError, ValueError):
            return
        names = {
            name
            for name, one in known.items()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        }
        if name != _MAIN and any(
            one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()
        ):
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in names:
                near = nearest(keyword.arg, names)
                self._note(
                    node,
                    f"hasten.{name} has no argument {keyword.arg}{near and f'; did you mean {near}?'}",
                )


def _stays(name: str, last: str) -> str:
    """Return the finding about a name of Accelerate that is not rewritten."""
    if last in _PARTS:
        return f"the module {name} stays; import names from hasten instead"
    if last in FUNCTIONS:
        return f"{name} stays; {FUNCTIONS[last]}"
    return f"{name} has no equivalent in hasten and stays"


def _is_old(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == OLD


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _names(names: Iterable[ast.alias]) -> str:
    return ", ".join(
        one.name if one.asname is None else f"{one.name} as {one.asname}"
        for one in names
    )


def _comments(text: str) -> list[str]:
    return [
        one.string
        for one in tokenize.generate_tokens(io.StringIO(text).readline)
        if one.type == tokenize.COMMENT
    ]
