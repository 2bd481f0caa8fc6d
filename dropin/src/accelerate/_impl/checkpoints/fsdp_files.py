"""Saving and loading one sharded model or optimizer by hand, under the established names.

Whole: `pytorch_model_fsdp.bin` and `optimizer.bin`. Shards: the folders `pytorch_model_fsdp_0` and `optimizer_0`, which hold
checkpoints of hasten; folders of torch.distributed.checkpoint, as the original package writes them, are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.modules.module import _IncompatibleKeys

from accelerate._impl.checkpoints.dcp_folders import fill, is_dcp_folder, names_in
from accelerate._impl.environment.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._impl.models.modeling import is_peft_model
from accelerate._impl.surface.homes import settle
from hasten.checkpoint.agreeing import agreeing
from hasten.checkpoint.base import Blob, Component, StateTree
from hasten.checkpoint.disk import Disk
from hasten.checkpoint.export import replace_files_only
from hasten.checkpoint.filling import run_copies
from hasten.checkpoint.formats import encode_torch, read_tensors
from hasten.checkpoint.gathering import gathered
from hasten.checkpoint.manifest import Manifest
from hasten.checkpoint.model_state import LoadReport, model_component, plan_model
from hasten.checkpoint.optimizer_state import optimizer_component, parameter_names, plan_optimizer
from hasten.checkpoint.places import locate
from hasten.checkpoint.reader import Found, open_checkpoint
from hasten.checkpoint.weights import load_weights
from hasten.checkpoint.writer import finish, prepare, start
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, IncompleteCheckpointError
from hasten.modules.names import plain_name

# Any in this file: plugins, accelerators, models and optimizers of either package's making.


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model's weights, as the plugin's state_dict_type says. Ranks: every rank."""
    module = accelerator.unwrap_model(model)
    component = model_component(module, "torch" if fsdp_plugin.whole_checkpoints else "safetensors")
    if names := _adapter_names(module, adapter_only):
        kept = {name: value for name, value in component.tensors.items() if name in names}
        component = Component(kept, None, "model", component.format, main_only=component.main_only & names)
    _save(fsdp_plugin, accelerator.ctx.world, component, "model", Path(output_dir), FSDP_MODEL_NAME, model_index)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> _IncompatibleKeys:
    """Fill a sharded model from what `save_fsdp_model` wrote; in torch's form, that nothing was amiss. Ranks: every rank.

    Raises: CheckpointError naming what is missing or unexpected.
    """
    module = accelerator.unwrap_model(model)
    names = _adapter_names(module, adapter_only)
    world = accelerator.ctx.world
    folder = _folder(Path(input_dir), FSDP_MODEL_NAME, model_index)
    if is_dcp_folder(folder):
        _fill_model(module, folder, names)
        return _IncompatibleKeys([], [])
    with _open(Path(input_dir), FSDP_MODEL_NAME, model_index, "model", world) as found:
        with agreeing(world, f"checking {input_dir} against the model"):
            plan = plan_model(module, found, strict=names is None)
            _check_adapter(plan.report, names, found.name)
        run_copies(plan.copies)
        plan.finish()
    return _IncompatibleKeys([], [])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write a sharded optimizer's state by parameter name, as the plugin's state_dict_type says. Ranks: every rank."""
    component = optimizer_component(optimizer, parameter_names([accelerator.unwrap_model(model)]))
    world = accelerator.ctx.world
    _save(fsdp_plugin, world, component, "optimizer", Path(output_dir), OPTIMIZER_NAME, optimizer_index)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Fill a sharded optimizer from what `save_fsdp_optimizer` wrote. Ranks: every rank.

    Raises: CheckpointError when groups, names or shapes differ.
    """
    module = accelerator.unwrap_model(model)
    world = accelerator.ctx.world
    folder = _folder(Path(input_dir), OPTIMIZER_NAME, optimizer_index)
    if is_dcp_folder(folder):
        _fill_optimizer(module, getattr(optimizer, "optimizer", optimizer), folder)
        return
    with _open(Path(input_dir), OPTIMIZER_NAME, optimizer_index, "optimizer", world) as found:
        with agreeing(world, f"checking {input_dir} against the optimizer"):
            plan = plan_optimizer(optimizer, parameter_names([module]), found)
        run_copies(plan.copies)
        plan.finish()


def load_original_parts(accelerator: Any, folder: Path, wanted: Sequence[nn.Module]) -> None:
    """Fill sharded models and optimizers from a folder of the original package, sharded or whole. Ranks: every rank.

    `wanted` are the models that no hook has loaded already.
    """
    plugin, done = accelerator.state.fsdp_plugin, accelerator.prepared
    for index, model in enumerate(done.models):
        if not any(accelerator.unwrap_model(model) is one for one in wanted):
            continue
        if _folder(folder, FSDP_MODEL_NAME, index).is_dir() or _file(folder, FSDP_MODEL_NAME, index).is_file():
            load_fsdp_model(plugin, accelerator, model, folder, index)
        else:
            numbered = folder / f"model_{index}.safetensors"
            load_weights(accelerator.unwrap_model(model), numbered if index else folder)
    for index, optimizer in enumerate(done.optimizers):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owner = next((m for m in done.models if any(id(p) in held for p in m.parameters())), done.models[0])
        load_fsdp_optimizer(plugin, accelerator, optimizer, owner, folder, index)


def _folder(place: Path, stem: str, index: int) -> Path:
    """The folder of shards; `place` itself where it is that folder already."""
    return place if place.name.startswith(stem) and place.is_dir() else place / f"{stem}_{index}"


def _file(place: Path, stem: str, index: int) -> Path:
    return place / (f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin")


def _save(plugin: Any, world: Comm, component: Component, kind: str, place: Path, stem: str, index: int) -> None:
    if plugin.whole_checkpoints:
        tree = gathered(StateTree({kind: component}), world, world.rank == 0)
        _write_whole(_file(place, stem, index), tree.components[kind], world)
        return
    store, name = locate(place / f"{stem}_{index}")
    group = start(store, world, name)
    finish(prepare(StateTree({kind: component}), group, world), group, world, Manifest(notes={"partial": True}))


def _write_whole(file: Path, component: Component, world: Comm) -> None:
    with agreeing(world, f"writing {file}"):
        if world.rank == 0:
            blob: Blob = encode_torch(component.tensors, component.data)
            replace_files_only(file.parent, {file.name: blob}, Disk())


@contextmanager
def _open(place: Path, stem: str, index: int, kind: str, world: Comm) -> Iterator[Found]:
    """What lies in the shards' folder or the whole file, mapped, for the time of the block."""
    folder, file = _folder(place, stem, index), _file(place, stem, index)
    if (folder / "manifest.json").is_file():
        store, name = locate(folder)
        with open_checkpoint(store, name, world) as checkpoint:
            yield checkpoint.component(kind)
    elif file.is_file():
        content = read_tensors(file)
        pieces = {key: [piece] for key, piece in content.pieces.items()}
        yield Found(file.name, kind, pieces, dict(content.aliases), content.data)
    else:
        raise IncompleteCheckpointError(
            f"{place} has neither {folder.name} nor {file.name}, so there is no sharded {kind} to load. Give the folder "
            f"that save_fsdp_{kind} wrote to."
        )


def _adapter_names(module: nn.Module, adapter_only: bool) -> set[str] | None:
    """The names that belong to peft's adapters, where only those are wanted: peft puts the adapter's name into them."""
    if not adapter_only or not is_peft_model(module):
        return None
    adapters: Any = module.peft_config
    return {name for key in module.state_dict() if set((name := plain_name(key)).split(".")) & set(adapters)}


def _check_adapter(report: LoadReport, names: set[str] | None, where: str) -> None:
    if names is None:
        return
    missing = sorted(names & {*report.missing, *report.skipped})
    if missing or report.unexpected:
        raise CheckpointError(
            f"{where}: the checkpoint lacks {missing[:3]} of the adapter, or has others {report.unexpected[:3]}. Nothing "
            "was loaded. Add the adapter as it was when it was saved."
        )


def _fill_model(module: nn.Module, folder: Path, names: set[str] | None) -> None:
    """Read a model that torch.distributed.checkpoint wrote, alone or under the name `model`."""
    state = {plain_name(key): value for key, value in module.state_dict().items()}
    state = state if names is None else {key: value for key, value in state.items() if key in names}
    stored = names_in(folder)
    prefix = "" if set(state) & stored else "model."
    missing = sorted(key for key in state if prefix + key not in stored)
    unexpected = sorted(stored - {prefix + key for key in state})
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: the checkpoint lacks {missing[:3]} and has {unexpected[:3]}, which the model does not. Nothing was "
            "loaded. Build the model as it was when it was saved."
        )
    fill({prefix + key: value for key, value in state.items()}, folder)


def _fill_optimizer(module: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read an optimizer that torch.distributed.checkpoint wrote, by the names of parameters."""
    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    fill(state, folder)
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


settle(__name__, "accelerate.utils.fsdp_utils")
