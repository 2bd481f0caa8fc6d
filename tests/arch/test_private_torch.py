"""Every private name of torch that hasten relies on is in one list, and the installed torch has it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.support.private_torch import (
    NAMES,
    TESTED_VERSIONS,
    Name,
    missing,
    set_on_self,
)
from tests.support.syntax import nodes, trees

REPOSITORY: Final = Path(__file__).parents[2]
ROOTS: Final = ("src/hasten", "dropin/src/accelerate")
READERS: Final = frozenset({"getattr", "hasattr", "setattr", "delattr"})
LIST: Final = "tests/support/private_torch.py"
NOT_TORCH: Final = frozenset(
    {
        "_exit",  # os
        "_getframe",  # sys
        "_current_frames",
        "_replace",  # named tuples
        "_fields",
        "_register_atexit",  # threading
        "_strip_protocol",  # fsspec
        "_ArgumentGroup",  # argparse
        "_action_groups",
        "_actions",
        "_AppendAction",
        "_HelpAction",
        "_format_args",
        "_option_string_actions",
        "_asdict",
        "_dataloaders",  # the drop-in's own, in a table
        "_hf_hook",  # transformers and accelerate
        "_attn_implementation",
        "_no_split_modules",
        "_supports_attention_backend",
        "_starting_state_dict",  # datasets
        "_distributed",
        "_epoch",
        "_indices",
        "_backward_epilogue",  # DeepSpeed, whose versions are bounded in pyproject.toml
        "_backward_prologue",
        "_get_data_parallel_group",
        "_hp_mapping",
        "_hp_optimizer_states_linked",
        "_last_lr",  # of its schedulers
        "_lazy_init_hp_params_optimizer_state",
        "_offload_accumulated_param_ids",
        "_offload_boundary_param_ids",
        "_optimizer_states_and_gradient_swap_in",
        "_optimizer_states_and_gradient_swap_out",
        "_release_swap_buffers",
        "_swappable_optimizer_subgroup",
        "_register_deepspeed_module",
        "_release_preflattened_grad_buffers",
        "_release_process_group_references",
        "_running_engine_backward",
        "_support_torch_style_backward",
        "_zero_init_param",
        "_get_model_param_range_map",  # megatron-core, likewise
    }
)

LISTED_USES: Final = frozenset(
    (entry.name, file) for entry in NAMES for file in entry.files
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@dataclass(frozen=True)
class TorchUse:
    """A private name that is used somewhere."""

    name: str
    file: str
    line: int
    on_self: bool  # on self, cls or super()


def sources() -> Iterator[tuple[str, ast.Module]]:
    for root in ROOTS:
        for path, tree in trees(REPOSITORY / root).items():
            file = path.relative_to(REPOSITORY).as_posix()
            if file != LIST:
                yield file, tree


def private_uses(file: str, tree: ast.Module) -> Iterator[TorchUse]:
    """Private attributes and modules, also those named by a string."""
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=name, value=value) if is_private(name):
                called_super = (
                    isinstance(value, ast.Call)
                    and getattr(value.func, "id", "") == "super"
                )
                on_self = called_super or (
                    isinstance(value, ast.Name) and value.id in ("self", "cls")
                )
                yield TorchUse(name, file, node.lineno, on_self)
            case ast.Call(
                func=ast.Name(id=reader), args=[_, ast.Constant(value=str(name)), *_]
            ) if reader in READERS and is_private(name):
                yield TorchUse(name, file, node.lineno, on_self=False)
            case ast.ImportFrom(module=str(module), names=names) if (
                module.split(".")[0] == "torch"
            ):
                for module_name in (
                    *module.split("."),
                    *(alias.name for alias in names),
                ):
                    if is_private(module_name):
                        yield TorchUse(module_name, file, node.lineno, on_self=False)
            case ast.Import(names=names):
                for alias in names:
                    module_names = alias.name.split(".")
                    for module_name in (
                        module_names if module_names[0] == "torch" else ()
                    ):
                        if is_private(module_name):
                            yield TorchUse(
                                module_name, file, node.lineno, on_self=False
                            )


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Private names that the code itself makes: functions, classes, fields, assignments to attributes."""
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if is_private(
                name
            ):
                yield name
            case ast.Attribute(
                attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")
            ) if is_private(name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) if is_private(name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) if is_private(name):
                yield name


def overridden(file: str, tree: ast.Module) -> Iterator[TorchUse]:
    """Private names of torch's classes that a subclass of ours defines again or sets."""
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    }
    for subclass in (node for node in nodes(tree) if isinstance(node, ast.ClassDef)):
        bases = [
            base
            for base in (
                private_names_of_base(node, imported) for node in subclass.bases
            )
            if base is not None
        ]
        for node in ast.walk(subclass) if bases else ():
            match node:
                case ast.FunctionDef(name=name) if is_private(name):
                    pass
                case ast.Attribute(attr=name, value=ast.Name(id="self")) if is_private(
                    name
                ):
                    pass
                case _:
                    continue
            if any(name in names for names in bases):
                yield TorchUse(name, file, node.lineno, on_self=False)


def private_names_of_base(
    node: ast.expr, imported: dict[str, tuple[str | None, str]]
) -> frozenset[str] | None:
    """The private names of a base class of torch's."""
    while isinstance(node, ast.Subscript):
        node = node.value
    name_parts = ast.unparse(node).split(".")
    if name_parts[0] == "torch":
        base_class: Any = importlib.import_module("torch")
    elif name_parts[0] in imported:
        module, name = imported[name_parts[0]]
        assert module is not None
        base_class = getattr(importlib.import_module(module), name)
    else:
        return None
    for attribute in name_parts[1:]:
        base_class = getattr(base_class, attribute)
    if (
        not inspect.isclass(base_class)
        or base_class.__module__.split(".")[0] != "torch"
    ):
        return None
    return private_names(base_class)  # type: ignore[arg-type]  # mypy takes a class's own __hash__ for its instances'


@cache  # a class of torch's is the base of many of ours, and its source is long
def private_names(torch_class: type) -> frozenset[str]:
    """The private names that a class defines, and that its methods set on self."""
    return frozenset(
        name
        for name in {*dir(torch_class), *set_on_self(torch_class)}
        if is_private(name)
    )


@pytest.fixture(scope="module")
def torch_uses() -> list[TorchUse]:
    """Private names that are not our own (some are both: then those count that the list names for the file)."""
    trees = list(sources())
    our_names = {name for _, tree in trees for name in defined_names(tree)} | NOT_TORCH
    listed = []
    for file, tree in trees:
        listed += [
            use
            for use in private_uses(file, tree)
            if use.name not in our_names or (use.name, file) in LISTED_USES
        ]
        listed += list(overridden(file, tree))
    return listed


def test_no_private_name_of_torch_is_used_outside_the_list(
    torch_uses: list[TorchUse],
) -> None:
    stray = sorted({(use.name, use.file) for use in torch_uses} - LISTED_USES)
    assert not stray, (
        f"add them to {LIST} with the versions they were seen in, or find a public way: {stray}"
    )


def test_the_list_names_nothing_that_is_not_used(torch_uses: list[TorchUse]) -> None:
    used = {(use.name, use.file) for use in torch_uses}
    idle = sorted(
        (name, file)
        for name, file in LISTED_USES
        if is_private(name) and (name, file) not in used
    )
    assert not idle, f"take them off {LIST}: {idle}"


def test_every_name_was_seen_in_the_supported_versions() -> None:
    for entry in NAMES:
        replaced_entries = [
            candidate
            for candidate in NAMES
            if candidate.owner == entry.owner and candidate.name == entry.instead_of
        ]
        seen_versions = set(entry.seen).union(
            *(candidate.seen for candidate in replaced_entries)
        )
        assert seen_versions >= set(TESTED_VERSIONS), (
            f"{entry.owner}.{entry.name} was seen in {sorted(seen_versions)} only"
        )


@pytest.mark.parametrize(
    "entry", NAMES, ids=lambda entry: f"{entry.owner}.{entry.name}"
)
def test_the_installed_torch_has_it(entry: Name) -> None:
    assert missing([entry]) == [], (
        f"torch {torch.__version__} lacks it. Without it: {entry.without}"
    )


def test_a_name_that_torch_lacks_is_found() -> None:
    absent = [
        Name("torch", "_no_such_function", (), ""),
        Name("torch.nn.parallel:DistributedDataParallel", "_no_such_attribute", (), ""),
        Name("torch.no_such_module", "x", (), ""),
    ]
    assert len(missing(absent)) == 3
