"""Sharded models: saving and loading them by hand, names, and helpers other libraries call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accelerate._impl.views.logging import get_logger
from hasten.strategies.base import Wish
from hasten.strategies.recompute import Recompute
from hasten.strategies.wrapping import blocks_to_recompute, blocks_to_shard

logger = get_logger("accelerate.utils.fsdp_utils")
# Any in this file: plugins, models and optimizers of either package's making.


def enable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on rank 0 only."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """Names without what wrappers put into them."""
    wrappers = ("._checkpoint_wrapped_module", "_orig_mod.", "._orig_mod")
    clean = {}
    for name, value in named_params.items():
        for part in wrappers:
            name = name.replace(part, "")
        clean[name] = value
    return clean


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any) -> set[nn.Parameter]:
    """The parameters of modules given as such, or by a regular expression over their names."""
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
    """The init function; hasten ties weights again by itself when it materialises a model."""
    return param_init_fn


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Let the optimizer update other parameters; `mapping` finds each by the address of the one it has now.

    Raises: KeyError for a parameter without another, and then nothing is changed.
    """
    known = [[mapping.get(_address(one)) for one in group["params"]] for group in optimizer.param_groups]
    if any(one is None for group in known for one in group):
        raise KeyError(
            "a parameter of the optimizer has no entry in `mapping`, and training would go on without updating it. "
            "Give an entry for the address (`parameter.data_ptr()`) of every parameter."
        )
    for group, parameters in zip(optimizer.param_groups, known, strict=True):
        group["params"] = parameters


def _address(parameter: Any) -> Any:
    """A parameter's address; callers may have put that of another one in the place of the method."""
    return parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """A function that tells the modules of this model which are sharded on their own; None where there are none."""
    chosen = {id(block) for block in blocks_to_shard(model, fsdp2_plugin.to_hasten(say=False))}
    return (lambda module: id(module) in chosen) if chosen else None


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model, with the blocks that are sharded on their own recomputed in backward."""
    settings = accelerator.state.fsdp_plugin.to_hasten(say=False)
    find = partial(blocks_to_recompute, config=settings)
    recompute = Recompute(find, "fsdp.activation_checkpointing", settings.activation_checkpointing_offload)
    return recompute.apply(model, Wish(place=False, train=True), accelerator.ctx, accelerator.precision)


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Fill a sharded model from whole weights that rank 0 has. Ranks: every rank."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, full_sd, options=options)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model, sharded. Ranks: every rank."""
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """A loss scaler that sees overflows in any rank's shard."""
    return torch.amp.GradScaler(**kwargs)
