"""Saving and loading a single model or optimizer: as a folder of shards, or as one file with whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from hasten.checkpoint.base import Component, StateTree
from hasten.checkpoint.export import replace_files_only
from hasten.checkpoint.format.formats import encode_torch, read_tensors
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.format.torch_folder import fill, is_torch_folder, names_in
from hasten.checkpoint.ownership import gathered
from hasten.checkpoint.reader import FoundComponent, open_checkpoint
from hasten.checkpoint.reshard import run_copies
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.state_dicts import (
    LoadReport,
    model_component,
    optimizer_component,
    parameter_names,
    plan_model,
    plan_optimizer,
)
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.locate import locate
from hasten.comm.agreement import agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, IncompleteCheckpointError
from hasten.modules.names import plain_name


@dataclass(frozen=True, slots=True)
class ObjectFiles:
    """Location of a model or optimizer: shards in `folder` (when loading, also torch's), or whole tensors in `file`."""

    kind: Literal["model", "optimizer"]
    folder: Path
    file: Path

    @property
    def exists(self) -> bool:
        return self.folder.is_dir() or self.file.is_file()


def save_model(module: nn.Module, files: ObjectFiles, world: Comm, whole: bool, names: set[str] | None = None) -> None:
    """Write a model's weights, either those in `names` or all. Ranks: every rank."""
    component = model_component(module, "torch" if whole else "safetensors")
    if names:
        kept = {name: value for name, value in component.tensors.items() if name in names}
        component = Component(kept, None, "model", component.format, main_only=component.main_only & names)
    _save(component, files, world, whole)


def load_model(module: nn.Module, files: ObjectFiles, world: Comm, names: set[str] | None = None) -> None:
    """Load a model, or only its tensors in `names`, which must then match the file exactly. Ranks: every rank.

    Raises: CheckpointError naming missing and unexpected tensors.
    """
    if is_torch_folder(files.folder):
        _fill_model(module, files.folder, names)
        return
    with _open(files, world) as found:
        with agreeing(world, f"checking {files.folder.parent} against the model"):
            plan = plan_model(module, found, strict=names is None)
            _check_names(plan.report, names, found.name)
        run_copies(plan.copies)
        plan.finish()


def save_optimizer(optimizer: Optimizer, module: nn.Module, files: ObjectFiles, world: Comm, whole: bool) -> None:
    """Write an optimizer's state by the model's parameter names. Ranks: every rank."""
    _save(optimizer_component(optimizer, parameter_names([module])), files, world, whole)


def load_optimizer(optimizer: Optimizer, module: nn.Module, files: ObjectFiles, world: Comm) -> None:
    """Load an optimizer by parameter names. Ranks: every rank. Raises: CheckpointError if groups or shapes differ."""
    if is_torch_folder(files.folder):
        inner = getattr(optimizer, "optimizer", optimizer)
        state = {"optimizer": get_optimizer_state_dict(module, inner)}
        fill(state, files.folder)
        set_optimizer_state_dict(module, inner, state["optimizer"])
        return
    with _open(files, world) as found:
        with agreeing(world, f"checking {files.folder.parent} against the optimizer"):
            plan = plan_optimizer(optimizer, parameter_names([module]), found)
        run_copies(plan.copies)
        plan.finish()


def _save(component: Component, files: ObjectFiles, world: Comm, whole: bool) -> None:
    if whole:
        tree = gathered(StateTree({files.kind: component}), world, world.rank == 0)
        with agreeing(world, f"writing {files.file}"):
            if world.rank == 0:
                blob = encode_torch(tree.components[files.kind].tensors, component.data)
                replace_files_only(files.file.parent, {files.file.name: blob}, Disk())
        return
    store, name = locate(files.folder)
    save_tree(store, name, StateTree({files.kind: component}), Manifest(notes={"partial": True}), world)


@contextmanager
def _open(files: ObjectFiles, world: Comm) -> Iterator[FoundComponent]:
    """Context manager that provides the memory-mapped content of the folder of shards or the whole file."""
    if (files.folder / "manifest.json").is_file():
        store, name = locate(files.folder)
        with open_checkpoint(store, name, world) as checkpoint:
            yield checkpoint.component(files.kind)
    elif files.file.is_file():
        content = read_tensors(files.file)
        pieces = {key: [piece] for key, piece in content.pieces.items()}
        yield FoundComponent(files.file.name, files.kind, pieces, dict(content.aliases), content.data)
    else:
        raise IncompleteCheckpointError(
            f"{files.file.parent} has neither {files.folder.name} nor {files.file.name}, so there is no {files.kind} to load. Give the folder that the {files.kind} was saved to."
        )


def _check_names(report: LoadReport, names: set[str] | None, where: str) -> None:
    missing = sorted((names or set()) & {*report.missing, *report.skipped})
    if names is not None and (missing or report.unexpected):
        raise CheckpointError(
            f"{where}: the checkpoint lacks {missing[:3]}, or has others {report.unexpected[:3]}. Nothing was loaded. Build the model (with its adapter) as it was when it was saved."
        )


def _fill_model(module: nn.Module, folder: Path, names: set[str] | None) -> None:
    """Load a model that torch.distributed.checkpoint wrote, at the top level or under the key `model`."""
    state = {plain_name(key): value for key, value in module.state_dict().items()}
    state = state if names is None else {key: value for key, value in state.items() if key in names}
    stored = names_in(folder)
    prefix = "" if set(state) & stored else "model."
    missing = sorted(key for key in state if prefix + key not in stored)
    unexpected = sorted(stored - {prefix + key for key in state})
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: the checkpoint lacks {missing[:3]} and has {unexpected[:3]}, which the model does not. Nothing was loaded. Build the model as it was when it was saved."
        )
    fill({prefix + key: value for key, value in state.items()}, folder)
