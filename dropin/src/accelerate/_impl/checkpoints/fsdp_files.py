"""Saving and loading one sharded model or optimizer by hand, under the established names.

Whole: `pytorch_model_fsdp.bin` and `optimizer.bin`. Shards: the folders `pytorch_model_fsdp_0` and `optimizer_0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from accelerate._impl.environment.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._impl.models.modeling import is_peft_model
from hasten.checkpoint import parts
from hasten.checkpoint.parts import Part
from hasten.checkpoint.weights import load_weights
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
    module, world = accelerator.unwrap_model(model), accelerator.ctx.world
    part = _model_in(Path(output_dir), model_index)
    parts.save_model(module, part, world, fsdp_plugin.whole_checkpoints, _adapter_names(module, adapter_only))


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
    part = _model_in(Path(input_dir), model_index)
    parts.load_model(module, part, accelerator.ctx.world, _adapter_names(module, adapter_only))
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
    part = _optimizer_in(Path(output_dir), optimizer_index)
    parts.save_optimizer(optimizer, module, part, world, fsdp_plugin.whole_checkpoints)


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
    part = _optimizer_in(Path(input_dir), optimizer_index)
    parts.load_optimizer(optimizer, accelerator.unwrap_model(model), part, accelerator.ctx.world)


def load_original_parts(accelerator: Any, folder: Path, wanted: Sequence[nn.Module]) -> None:
    """Fill sharded models and optimizers from a folder of the original package, sharded or whole. Ranks: every rank.

    `wanted` are the models that no hook has loaded already.
    """
    plugin, done = accelerator.state.fsdp_plugin, accelerator.prepared
    for index, model in enumerate(done.models):
        if not any(accelerator.unwrap_model(model) is one for one in wanted):
            continue
        if _model_in(folder, index).exists:
            load_fsdp_model(plugin, accelerator, model, folder, index)
        else:
            numbered = folder / f"model_{index}.safetensors"
            load_weights(accelerator.unwrap_model(model), numbered if index else folder)
    for index, optimizer in enumerate(done.optimizers):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owner = next((m for m in done.models if any(id(p) in held for p in m.parameters())), done.models[0])
        load_fsdp_optimizer(plugin, accelerator, optimizer, owner, folder, index)


def _model_in(place: Path, index: int) -> Part:
    return Part("model", *_places(place, FSDP_MODEL_NAME, index))


def _optimizer_in(place: Path, index: int) -> Part:
    return Part("optimizer", *_places(place, OPTIMIZER_NAME, index))


def _places(place: Path, stem: str, index: int) -> tuple[Path, Path]:
    """The folder of shards, which `place` itself may be, and the file of whole tensors."""
    given = place.name.startswith(stem) and place.is_dir()
    return place if given else place / f"{stem}_{index}", place / (f"{stem}_{index}.bin" if index else f"{stem}.bin")


def _adapter_names(module: nn.Module, adapter_only: bool) -> set[str] | None:
    """The names that belong to peft's adapters, where only those are wanted: peft puts the adapter's name into them."""
    if not adapter_only or not is_peft_model(module):
        return None
    adapters: Any = module.peft_config
    return {name for key in module.state_dict() if set((name := plain_name(key)).split(".")) & set(adapters)}
