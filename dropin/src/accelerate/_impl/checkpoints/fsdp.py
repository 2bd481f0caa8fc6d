"""Sharded models saved and loaded by hand: whole as torch's files, or as shards in hasten's safetensors, read in torch's too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from accelerate._impl.environment.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._impl.models.modeling import is_peft_model
from accelerate._impl.models.other import get_module_children_bottom_up
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from hasten.accelerator.components import components
from hasten.modules.names import plain_name

# Any in this file: plugins, accelerators, models and optimizers of either package's making.
object_files = Deferred("accelerate._impl.checkpoints.object_files")
export = Deferred("hasten.checkpoint.export")
dcp = Deferred("torch.distributed.checkpoint.state_dict")
_POLICY = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params")


def enable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on rank 0 only."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")  # without which transformers does not look at it


def disable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in named_params.items()}


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any) -> set[nn.Parameter]:
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    chosen: Iterable[nn.Module] = modules
    found = {parameter for module in chosen for parameter in module.parameters()}
    for parameter in found:
        parameter.data = parameter.data.to(device)
    return found


def ensure_weights_retied(param_init_fn: Any, model: nn.Module, device: Any) -> Any:
    """Return the init function unchanged; hasten ties weights again by itself when it materialises a model."""
    return param_init_fn


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Let the optimizer update other parameters, found by the address of those it has. Raises: KeyError for one without another."""
    known = [
        [mapping.get(_address(one), mapping.get(one.data_ptr)) for one in group["params"]]
        for group in optimizer.param_groups
    ]
    if any(one is None for group in known for one in group):
        raise KeyError(message("parameter_without_another"))
    for group, parameters in zip(optimizer.param_groups, known, strict=True):
        group["params"] = parameters


def _address(parameter: Any) -> Any:
    """Return a parameter's address; callers may have put that of another one in the place of the method."""
    return parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    seen: Any = SimpleNamespace(**{name: getattr(fsdp2_plugin, name, None) for name in _POLICY})
    FullyShardedDataParallelPlugin.set_auto_wrap_policy(seen, model)
    bound = getattr(seen.auto_wrap_policy, "keywords", {})
    if kinds := bound.get("transformer_layer_cls"):
        return lambda module: isinstance(module, tuple(kinds))
    if least := bound.get("min_num_params"):
        return lambda module: sum(one.numel() for one in module.parameters()) > least
    return None


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper  # imports DTensor

    plugin = accelerator.state.fsdp_plugin
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda module: False)
    for name, module in get_module_children_bottom_up(model, return_fqns=True)[:-1]:
        if chosen(module):
            made = checkpoint_wrapper.checkpoint_wrapper(module)
            made = checkpoint_wrapper.offload_wrapper(made) if plugin.activation_checkpointing_offload else made
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], made)
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Fill a sharded model from whole weights that rank 0 has. Ranks: every rank."""
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    dcp.set_model_state_dict(model, full_sd, options=options)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Return the model, sharded. Ranks: every rank."""
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler that sees overflows in any rank's shard."""
    return torch.amp.GradScaler(**kwargs)


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
    module, world = accelerator.unwrap_model(model), accelerator.ctx.world
    files = _files("model", output_dir, model_index)
    object_files.save_model(module, files, world, fsdp_plugin.whole_checkpoints, _adapter_names(module, adapter_only))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> _IncompatibleKeys:
    """Fill a sharded model from what `save_fsdp_model` wrote. Ranks: every rank. Raises: CheckpointError naming what differs."""
    module, files = accelerator.unwrap_model(model), _files("model", input_dir, model_index)
    object_files.load_model(module, files, accelerator.ctx.world, _adapter_names(module, adapter_only))
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
    module, world = accelerator.unwrap_model(model), accelerator.ctx.world
    files = _files("optimizer", output_dir, optimizer_index)
    object_files.save_optimizer(optimizer, module, files, world, fsdp_plugin.whole_checkpoints)


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
    """Fill a sharded optimizer from what `save_fsdp_optimizer` wrote. Ranks: every rank. Raises: CheckpointError if they differ."""
    files = _files("optimizer", input_dir, optimizer_index)
    object_files.load_optimizer(optimizer, accelerator.unwrap_model(model), files, accelerator.ctx.world)


def load_original_parts(accelerator: Any, folder: Path, wanted: Sequence[nn.Module]) -> None:
    """Fill sharded models, the `wanted` ones, and optimizers from a folder of the original package. Ranks: every rank."""
    plugin, done = accelerator.state.fsdp_plugin, components(accelerator).prepared
    for index, model in enumerate(done.models):
        if not any(accelerator.unwrap_model(model) is one for one in wanted):
            continue
        if _files("model", folder, index).exists:
            load_fsdp_model(plugin, accelerator, model, folder, index)
        else:
            numbered = folder / f"model_{index}.safetensors"
            export.load_weights(accelerator.unwrap_model(model), numbered if index else folder)
    for index, optimizer in enumerate(done.optimizers):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owner = next((m for m in done.models if any(id(p) in held for p in m.parameters())), done.models[0])
        load_fsdp_optimizer(plugin, accelerator, optimizer, owner, folder, index)


def _files(kind: Literal["model", "optimizer"], folder: Any, index: int) -> Any:
    """Return the places of a model or an optimizer: the folder of its shards, given or below the given one, and a file of whole tensors."""
    place, stem = Path(folder), {"model": FSDP_MODEL_NAME, "optimizer": OPTIMIZER_NAME}[kind]
    given = place.name.startswith(stem) and place.is_dir()
    shards = place if given else place / f"{stem}_{index}"
    return object_files.ObjectFiles(kind, shards, place / (f"{stem}_{index}.bin" if index else f"{stem}.bin"))


def _adapter_names(module: nn.Module, adapter_only: bool) -> set[str] | None:
    """Return the names that belong to peft's adapters, where only those are wanted: peft puts the adapter's name into them."""
    if not adapter_only or not is_peft_model(module):
        return None
    adapters: Any = module.peft_config
    return {name for key in module.state_dict() if set((name := plain_name(key)).split(".")) & set(adapters)}
