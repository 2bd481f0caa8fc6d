"""Rewriting of a script from `accelerate` to `hasten`: only names change, so that comments and layout are preserved."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import hasten
from hasten import bigmodel, data, extending, modules, trainer
from hasten.accelerator.established import INSTEAD, VALUES
from hasten.tools.migrate.arguments import advice

# class or function -> (name, position) of each argument that counts steps
_WARMED: Final = (("num_warmup_steps", 1), ("num_training_steps", 2))
COUNTS: Final = MappingProxyType[str, tuple[tuple[str, int], ...]](
    {
        "OneCycleLR": (("total_steps", 2), ("steps_per_epoch", 4)),
        "CosineAnnealingLR": (("T_max", 1),),
        "CosineAnnealingWarmRestarts": (("T_0", 1),),
        "LinearLR": (("total_iters", 3),),
        "ConstantLR": (("total_iters", 2),),
        "PolynomialLR": (("total_iters", 1),),
        "StepLR": (("step_size", 1),),
        "get_scheduler": (("num_warmup_steps", 2), ("num_training_steps", 3)),
        "get_linear_schedule_with_warmup": _WARMED,
        "get_cosine_schedule_with_warmup": _WARMED,
        "get_cosine_with_hard_restarts_schedule_with_warmup": _WARMED,
        "get_polynomial_decay_schedule_with_warmup": _WARMED,
        "get_constant_schedule_with_warmup": _WARMED[:1],
    }
)


def lengths(tree: ast.Module, owners: set[str], main: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that counts steps of a schedule that is prepared later, with the name of its Accelerator.

    `owners` are the names of Accelerators, `main` the name of their class. Nothing is yielded for a script in which Accelerate
    itself steps a schedule once per update (`split_batches`, `step_scheduler_with_optimizer=False`).
    """
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(one.arg in ("split_batches", "step_scheduler_with_optimizer") for call in calls for one in call.keywords):
        return
    made = {
        target.id: node.lineno
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last(node.value.func) == main
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for owner, name, line in _prepared(calls, owners):
        for node in nodes:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            named = any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            if named and made.get(owner, node.lineno) < node.lineno < line:
                yield from ((found, owner) for found in _counts(node.value))


def _prepared(calls: list[ast.Call], owners: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (Accelerator, name, line) for each variable passed to prepare and prepare_scheduler."""
    for call in calls:
        method = call.func
        if (
            isinstance(method, ast.Attribute)
            and method.attr in ("prepare", "prepare_scheduler")
            and isinstance(method.value, ast.Name)
            and method.value.id in owners
        ):
            yield from ((method.value.id, one.id, call.lineno) for one in call.args if isinstance(one, ast.Name))


def _counts(call: ast.Call) -> Iterator[ast.expr]:
    for name, position in COUNTS.get(_last(call.func), ()):
        given = [one.value for one in call.keywords if one.arg == name]
        given += call.args[position : position + 1]
        yield from (one for one in given if not (isinstance(one, ast.Constant) and not one.value))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


OLD: Final = "accelerate"
NEW: Final = "hasten"
_MAIN: Final = "Accelerator"
HOMES: Final = MappingProxyType(
    {
        name: module
        for module in (data, modules, extending, trainer, bigmodel, hasten)  # the last one wins
        for name in module.__all__
    }
)
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
_METHODS: Final = (
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "pad_across_processes", "prepare_data_loader"),
    *("prepare_optimizer", "prepare_scheduler", "reduce", "save", "wait_for_everyone"),
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
        *("big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "local_sgd", "logging"),
        *("memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "test_utils", "tracking", "utils"),
    }
)
"""Modules of Accelerate."""
_SIZES: Final = "hasten's ParallelismConfig only contains the sizes; compute this from its *_size fields"
ELSEWHERE: Final = MappingProxyType(
    {
        **dict.fromkeys(("total_size", "data_parallel_size", "non_data_parallel_size"), _SIZES),
        **dict.fromkeys(("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names"), _SIZES),
        **dict.fromkeys(("fsdp_dim_names", "active_mesh_dims"), _SIZES),
        "hf_device_map": "hasten does not set hf_device_map on a model; keep the device map",
        "_hf_hook": "hasten's hooks are not stored as _hf_hook of a module",
        "build_device_mesh": "hasten's ParallelismConfig builds no mesh; prepare() does",
        "to_kwargs": "hasten's settings are plain dataclasses without to_kwargs; use dataclasses.asdict",
        "deepspeed_config_process": "hasten fills the configuration of DeepSpeedPlugin in prepare()",
    }
)
"""Attributes of other objects that hasten's do not have, with their replacements."""
_LOGGER: Final = "get_logger's lines do not begin with [RANK n], and it may be used before an Accelerator is created"
_COPIES: Final = (
    "hasten's prepared loaders, optimizers and schedulers cannot be copied or pickled; save their state_dict()"
)
_ALONE: Final = "prepare refuses an optimizer before its model, and a scheduler before its optimizer; pass them in one call, or the model first"
_KINDS: Final = (
    "objects that hasten's prepare returns are of other classes (Loader, PreparedOptimizer, PreparedScheduler)"
)
_FIELDS: Final = "hasten's settings have different fields and defaults (use_seedable_sampler=True)"
_STATEFUL: Final = (
    "hasten's loaders are not instances of torchdata's StatefulDataLoader; all of them have state_dict(), with "
    "different keys"
)
_SHUFFLE: Final = (
    "shuffles by seed and epoch, in a different order than Accelerate: single losses differ, loss curves do not"
)
_SCHEDULER: Final = (
    "steps a prepared scheduler once per update; Accelerate steps it once per process: lengths in the call that creates it are divided "
    "by num_processes; check others (milestones, gamma, custom functions)"
)


_STATEFUL_KEYS: Final = ("'_num_yielded'", "'_iterator_finished'")
_ASKS_CLASS: Final = ("type(loader)", "type(optimizer)", "type(scheduler)", "type(dataloader)", "type(lr_scheduler)")


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
        self._known: dict[str, str] = {}  # names in the script that now refer to hasten -> hasten's names
        self._num_made = 0
        self._model_line = 0  # line of the first prepare() of something else than an optimizer or a scheduler; 0: none
        self._modules: set[str] = set()  # names in the script for the package itself

    def _note(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.findings.append(MigrationFinding(node.lineno, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or node.col_offset)

    # -- imports --------------------------------------------------------------------------------------------------
    def imports(self) -> None:
        """Edit the import statements."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_old(node.module):
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
        ):  # only the module's name, to preserve parentheses and comments between the names
            at = self._bytes.index(node.module.encode(), begin)
            self.edits.append(_Edit(at, at + len(node.module), next(iter(taken))))
        elif taken:
            indent = " " * node.col_offset
            comments = [f"{text}\n{indent}" for text in _comments(self._bytes[begin:end].decode())]
            homes = [*sorted(taken.items()), *([(node.module, left)] if left else [])]
            parts = [f"from {home} import {_names(names)}" for home, names in homes]
            self.edits.append(_Edit(begin, end, "".join(comments) + f"\n{indent}".join(parts)))

    def _import(self, node: ast.Import) -> None:
        for one in node.names:
            if one.name == OLD:
                self._modules.add(one.asname or OLD)
                begin, end = self._span(node)
                at = self._bytes.index(OLD.encode(), begin, end)
                self.edits.append(_Edit(at, at + len(OLD), NEW))
            elif _is_old(one.name):
                self._note(node, f"`import {one.name}` stays; import names from hasten instead")

    # -- uses -----------------------------------------------------------------------------------------------------
    def uses(self) -> None:
        """Edit dotted names, and note calls that behave differently in hasten."""
        objects = set(self._accelerators())
        self._schedules(objects)
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        lines = [node.lineno for node in calls if self._prepares(node, objects) and not _follows(node)]
        self._model_line = min(lines, default=0)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.slice) in _STATEFUL_KEYS:
                self._note(node, _STATEFUL)
            if isinstance(node, ast.Attribute):
                self._attribute(node, objects)
            elif isinstance(node, ast.Call):
                self._call(node, objects)
                self._habits(node, objects)

    def _schedules(self, objects: set[str]) -> None:
        """Divide the lengths of prepared schedules by the number of processes, rounded up: hasten counts updates."""
        if not self._known and not self._modules:
            return
        for node, owner in lengths(self._tree, objects, _MAIN):
            begin, end = self._span(node)
            inner = self._bytes[begin:end].decode()
            if (per_process := _factor_beside(node, f"{owner}.num_processes")) is not None:
                first, last = self._span(per_process)
                self.edits.append(_Edit(begin, end, self._bytes[first:last].decode()))
                continue
            plain = isinstance(node, ast.Call | ast.Name | ast.Constant | ast.Attribute)
            new = f"-(-{inner if plain else f'({inner})'} // {owner}.num_processes)"
            self.edits.append(_Edit(begin, end, new))

    def _prepares(self, node: ast.Call, objects: set[str]) -> bool:
        """Return whether this calls prepare, or a prepare method for one kind of object, on an Accelerator."""
        method = node.func
        if not isinstance(method, ast.Attribute) or not method.attr.startswith("prepare"):
            return False
        owner = method.value
        made = isinstance(owner, ast.Call) and self._name(owner.func) == _MAIN
        return made or (isinstance(owner, ast.Name) and owner.id in objects)

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

    def _attribute(self, node: ast.Attribute, objects: set[str]) -> None:
        if node.attr in ELSEWHERE:
            self._note(node, ELSEWHERE[node.attr])
        if isinstance(node.value, ast.Name) and node.value.id in objects:
            if (
                not hasattr(hasten.Accelerator, node.attr)
                and node.attr not in hasten.Accelerator.__init__.__code__.co_names
                and node.attr not in VALUES
            ):
                instead = f"; {INSTEAD[node.attr]}" if node.attr in INSTEAD else ""
                self._note(node, f"hasten's Accelerator has no {node.attr}{instead}")
            return
        if (
            not isinstance(node.ctx, ast.Load)
            or _root(node) not in self._modules
            or isinstance(node.value, ast.Attribute)
        ):
            if isinstance(node.value, ast.Attribute) and _root(node) in self._modules and node.attr in HOMES:
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
        self.edits.append(_Edit(begin, end, f"{NEW if root == OLD else root}{inner}.{node.attr}"))

    def _call(self, node: ast.Call, objects: set[str]) -> None:
        name = self._name(node.func)
        if any(one.arg == "shuffle" and getattr(one.value, "value", True) for one in node.keywords):
            self._note(node, f"hasten {_SHUFFLE}")
        if name == _MAIN:
            self._num_made += 1
            if self._num_made > 1:
                self._note(node, "each hasten Accelerator has separate settings; Accelerate shares those of the first")
        if name is not None:
            self._keywords(node, name, getattr(HOMES[name], name))
        if not isinstance(node.func, ast.Attribute) or not isinstance(node.func.value, ast.Name):
            return
        if node.func.value.id not in objects:
            return
        method = node.func.attr
        if method in NOTES and not (method == "save_state" and (node.args or node.keywords)):
            self._note(node, f"{method} {NOTES[method]}")
        if method == "reduce" and any(one.arg == "scale" for one in node.keywords):
            self._note(node, "reduce always applies `scale`; Accelerate applies it on TPUs only")
        if method == "prepare" and any(isinstance(one, ast.Constant) for one in node.args):
            self._note(
                node,
                "prepare raises an error for other objects than models, optimizers, schedulers and loaders; Accelerate returns them",
            )
        if method == "prepare" and any("sched" in ast.unparse(one).lower() for one in node.args):
            self._note(node, f"prepare {_SCHEDULER}")
        if (found := getattr(hasten.Accelerator, method, None)) is not None:
            self._keywords(node, f"Accelerator.{method}", found)

    def _habits(self, node: ast.Call, objects: set[str]) -> None:
        """Note calls of other functions that rely on behaviour that hasten does not have."""
        text = ast.unparse(node)
        if self._prepares(node, objects) and _follows(node) and not 0 < self._model_line <= node.lineno:
            self._note(node, _ALONE)
        if self._name(node.func) == "get_logger":
            self._note(node, _LOGGER)
        if self._known and text.startswith(("asdict(", "dataclasses.asdict(")):
            self._note(node, _FIELDS)
        if self._known and text.startswith("isinstance(") and "StatefulDataLoader" in text:
            self._note(node, _STATEFUL)
        if self._known and text.startswith(_ASKS_CLASS):
            self._note(node, _KINDS)
        if text.startswith(("pickle.dump", "copy.deepcopy(optim", "copy.deepcopy(sched", "copy.deepcopy(loader")):
            self._note(node, _COPIES)

    def _keywords(self, node: ast.Call, name: str, target: Any) -> None:  # Any: a class or function of hasten
        try:
            known = inspect.signature(target).parameters
        except (TypeError, ValueError):  # a property, or a callable without a signature: nothing to compare
            return
        names = {name for name, one in known.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
        if name != _MAIN and any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in names:
                hint = advice(name, keyword, names)
                self._note(node, f"hasten.{name} has no argument {keyword.arg}{hint and f': {hint}'}")


def _factor_beside(node: ast.expr, factor: str) -> ast.expr | None:
    """Return the other factor of a product with `factor`; None for other expressions."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    if ast.unparse(node.right) == factor:
        return node.left
    return node.right if ast.unparse(node.left) == factor else None


def _follows(node: ast.Call) -> bool:
    """Return whether a call prepares only optimizers and schedulers, judged by their names."""
    words = [ast.unparse(one).lower() for one in node.args]
    kinds = ("prepare_optimizer", "prepare_scheduler")
    if isinstance(node.func, ast.Attribute) and node.func.attr in kinds:
        return True
    return bool(words) and all(any(kind in word for kind in ("optim", "sched")) for word in words)


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
    return ", ".join(one.name if one.asname is None else f"{one.name} as {one.asname}" for one in names)


def _comments(text: str) -> list[str]:
    return [one.string for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type == tokenize.COMMENT]
