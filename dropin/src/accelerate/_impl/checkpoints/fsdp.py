"""Sharded models saved and loaded by hand, in files of torch: whole, shards of torch.distributed.checkpoint, or one of each rank."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from accelerate._impl.environment.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._impl.models.modeling import is_peft_model
from accelerate._impl.models.other import get_module_children_bottom_up
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from hasten.accelerator.components import components
from hasten.comm.agreement import agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, IncompleteCheckpointError
from hasten.modules.names import plain_name
from hasten.optional import need

# Any in this file: plugins, accelerators, models and optimizers of either package's making.
checkpoint = Deferred("torch.distributed.checkpoint")
dcp = Deferred("torch.distributed.checkpoint.state_dict")
export = Deferred("hasten.checkpoint.export")
formats = Deferred("hasten.checkpoint.format.formats")
reader = Deferred("hasten.checkpoint.reader")
reshard = Deferred("hasten.checkpoint.reshard")
state_dicts = Deferred("hasten.checkpoint.state_dicts")
torch_folder = Deferred("hasten.extensions.checkpoint_tools.torch_folder")
_POLICY = ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params")


def enable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on rank 0 only."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"
    # without which transformers does not look at it
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")


def disable_fsdp_ram_efficient_loading() -> None:
    """Ask libraries that build models to fill them on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    return {
        plain_name(parameter_name): value
        for parameter_name, value in named_params.items()
    }


def get_parameters_from_modules(
    modules: Any, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = []
        for module_name, module in model.named_modules():
            if pattern.fullmatch(module_name):
                modules.append(module)
    selected_modules: Iterable[nn.Module] = modules
    parameters: set[nn.Parameter] = set()
    for module in selected_modules:
        parameters.update(module.parameters())
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
    return parameters


def ensure_weights_retied(param_init_fn: Any, model: nn.Module, device: Any) -> Any:
    """Return the init function unchanged; hasten ties weights again by itself when it materialises a model."""
    return param_init_fn


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]
) -> None:
    """Let the optimizer update other parameters, found by the address of those it has. Raises: KeyError for one without another."""
    new_parameters = []
    for group in optimizer.param_groups:
        group_parameters = []
        for parameter in group["params"]:
            address = _parameter_address(parameter)
            new_parameter = mapping.get(address, mapping.get(parameter.data_ptr))
            if new_parameter is None:
                raise KeyError(message("parameter_without_another"))
            group_parameters.append(new_parameter)
        new_parameters.append(group_parameters)
    for group, parameters in zip(optimizer.param_groups, new_parameters, strict=True):
        group["params"] = parameters


def _parameter_address(parameter: Any) -> Any:
    """Return a parameter's address; callers may have put that of another one in the place of the method."""
    if callable(parameter.data_ptr):
        return parameter.data_ptr()
    return parameter.data_ptr


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: Any, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    plugin_copy: Any = SimpleNamespace(
        **{
            field_name: getattr(fsdp2_plugin, field_name, None)
            for field_name in _POLICY
        }
    )
    FullyShardedDataParallelPlugin.set_auto_wrap_policy(plugin_copy, model)
    policy_keywords = getattr(plugin_copy.auto_wrap_policy, "keywords", {})
    if kinds := policy_keywords.get("transformer_layer_cls"):
        return lambda module: isinstance(module, tuple(kinds))
    if min_num_params := policy_keywords.get("min_num_params"):
        return lambda module: (
            sum(parameter.numel() for parameter in module.parameters()) > min_num_params
        )
    return None


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    # imports DTensor
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    plugin = accelerator.state.fsdp_plugin
    wraps_module = fsdp2_prepare_auto_wrap_policy(plugin, model) or (
        lambda module: False
    )
    for module_name, module in get_module_children_bottom_up(model, return_fqns=True)[
        :-1
    ]:
        if wraps_module(module):
            wrapped_module = checkpoint_wrapper.checkpoint_wrapper(module)
            if plugin.activation_checkpointing_offload:
                wrapped_module = checkpoint_wrapper.offload_wrapper(wrapped_module)
            else:
                wrapped_module = wrapped_module
            setattr(
                model.get_submodule(module_name.rpartition(".")[0]),
                module_name.rpartition(".")[2],
                wrapped_module,
            )
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any,
    model: nn.Module,
    full_sd: dict[str, Any],
    cpu_offload: bool = False,
) -> None:
    """Fill a sharded model from whole weights that rank 0 has. Ranks: every rank."""
    load_options = dcp.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
    )
    dcp.set_model_state_dict(model, full_sd, options=load_options)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Return the model, sharded. Ranks: every rank."""
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler that sees overflows in any rank's shard."""
    return torch.amp.GradScaler(**kwargs)


def _get_model_state_dict(
    model: nn.Module, adapter_only: bool = False, sd_options: Any = None
) -> dict[str, Any]:
    """Return a model's weights, or its adapter's alone: shards under the names that peft saves. Ranks: every rank."""
    weights: dict[str, Any]
    if not adapter_only or not is_peft_model(model):
        weights = dcp.get_model_state_dict(model, options=sd_options)
    elif sd_options is not None and sd_options.full_state_dict:
        weights = dcp.get_model_state_dict(
            model, options=replace(sd_options, ignore_frozen_params=True)
        )
    else:
        weights = need("peft").get_peft_model_state_dict(
            model, adapter_name=model.active_adapter
        )
    return weights


def _set_model_state_dict(
    model: nn.Module,
    state_dict: dict[str, Any],
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    """Fill a model, or its adapter alone, with what `_get_model_state_dict` returned. Ranks: every rank."""
    if not adapter_only or not is_peft_model(model):
        return dcp.set_model_state_dict(model, state_dict, options=sd_options)
    if sd_options is not None and sd_options.full_state_dict:
        return dcp.set_model_state_dict(
            model, state_dict, options=replace(sd_options, strict=False)
        )
    return need("peft").set_peft_model_state_dict(
        model, state_dict, adapter_name=model.active_adapter
    )


def _prepare_sd_options(fsdp_plugin: Any) -> Any:
    """Return torch's options of state dictionaries: whole ones are gathered on rank 0, and sent from there."""
    is_full = fsdp_plugin.whole_checkpoints
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    return dcp.StateDictOptions(
        full_state_dict=is_full,
        cpu_offload=is_full and has_peers,
        broadcast_from_rank0=is_full and has_peers,
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """Places of one model or optimizer in a folder: torch's shards, a file of whole tensors, a file of each rank."""

    kind: Literal["model", "optimizer"]
    shards: Path
    whole: Path
    of_rank: Path

    @classmethod
    def of(
        cls, kind: Literal["model", "optimizer"], folder: Any, index: int, rank: int
    ) -> Self:
        """Return the places below a folder; the folder of shards itself is known by its name."""
        base_folder = Path(folder)
        stem = {"model": FSDP_MODEL_NAME, "optimizer": OPTIMIZER_NAME}[kind]
        is_shards = base_folder.name.startswith(stem) and base_folder.is_dir()
        if is_shards:
            shards = base_folder
        else:
            shards = base_folder / f"{stem}_{index}"
        whole_file = base_folder / (f"{stem}_{index}.bin" if index else f"{stem}.bin")
        return cls(
            kind, shards, whole_file, base_folder / f"{stem}_{index}_rank{rank}.bin"
        )

    @property
    def exists(self) -> bool:
        return torch_folder.is_torch_folder(self.shards) or self.whole.is_file()

    def write(
        self, state: dict[str, Any], world: Comm, is_full: bool, use_dcp: bool
    ) -> None:
        """Write a state dictionary. Ranks: every rank."""
        self.whole.parent.mkdir(parents=True, exist_ok=True)
        with agreeing(world, f"writing {self.kind} files to {self.whole.parent}"):
            if is_full and world.rank == 0:
                torch.save(state, self.whole)
            elif not is_full and not use_dcp:
                torch.save(state, self.of_rank)
        if not is_full and use_dcp:
            with warnings.catch_warnings():
                # one process
                warnings.filterwarnings(
                    "ignore", message="torch.distributed is disabled"
                )
                storage = checkpoint.FileSystemWriter(self.shards)
                checkpoint.save(
                    {self.kind: state},
                    storage_writer=storage,
                    no_dist=not dist.is_initialized(),
                )

    def check(self, use_dcp: bool) -> None:
        """Raise: IncompleteCheckpointError where none of the files is there."""
        if not (self.exists if use_dcp else self.of_rank.is_file()):
            raise IncompleteCheckpointError(
                f"{self.whole.parent} has neither {self.shards.name} nor {self.whole.name}, so there is no {self.kind} to load. "
                f"Give the folder that the {self.kind} was saved to, and `use_dcp` as it was then."
            )


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
    world = accelerator.ctx.world
    module = accelerator.unwrap_model(model)
    weights = _get_model_state_dict(
        module, adapter_only=adapter_only, sd_options=_prepare_sd_options(fsdp_plugin)
    )
    files = _Files.of("model", output_dir, model_index, world.rank)
    files.write(weights, world, fsdp_plugin.whole_checkpoints, use_dcp)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Fill a sharded model from what `save_fsdp_model` wrote. Ranks: every rank. Raises: CheckpointError naming what differs."""
    module = accelerator.unwrap_model(model)
    files = _Files.of("model", input_dir, model_index, accelerator.ctx.rank)
    weights, load_options = _read_weights(module, files, adapter_only, use_dcp)
    return _set_model_state_dict(
        module, weights, adapter_only=adapter_only, sd_options=load_options
    )


def _read_weights(
    module: nn.Module, files: _Files, adapter_only: bool, use_dcp: bool
) -> tuple[dict[str, Any], Any]:
    """Return the weights that files hold, in the form that a model is filled with, and torch's options for it."""
    files.check(use_dcp)
    is_whole = use_dcp and not torch_folder.is_torch_folder(files.shards)
    options = _prepare_sd_options(SimpleNamespace(whole_checkpoints=is_whole))
    if not use_dcp:
        return torch.load(files.of_rank, weights_only=True), options
    model_state = _get_model_state_dict(
        module, adapter_only=adapter_only, sd_options=options
    )
    if not is_whole:
        _fill_weights(model_state, files.shards)
    elif not options.broadcast_from_rank0 or dist.get_rank() == 0:
        weights = torch.load(files.whole, weights_only=True, mmap=True)
        _check_names(files.whole, set(model_state), set(weights))
        return weights, options
    return model_state, options


def _fill_weights(state: dict[str, Any], folder: Path) -> None:
    """Read weights that torch.distributed.checkpoint wrote, at the top level or under the key `model`."""
    stored = torch_folder.names_in(folder)
    prefix = "" if set(state) & stored else "model."
    _check_names(
        folder, set(state), {tensor_name.removeprefix(prefix) for tensor_name in stored}
    )
    torch_folder.fill_state(
        {prefix + tensor_name: value for tensor_name, value in state.items()}, folder
    )


def _check_names(checkpoint: Path, names: set[str], stored: set[str]) -> None:
    if names != stored:
        missing = sorted(names - stored)
        unexpected = sorted(stored - names)
        raise CheckpointError(
            f"{checkpoint}: the checkpoint lacks {missing[:3]} and has {unexpected[:3]}, which the model does not. Nothing was loaded. "
            "Build the model (with its adapter) as it was when it was saved."
        )


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
    world = accelerator.ctx.world
    module = accelerator.unwrap_model(model)
    save_options = _prepare_sd_options(fsdp_plugin)
    plain_optimizer = getattr(optimizer, "optimizer", optimizer)
    optimizer_state = dcp.get_optimizer_state_dict(
        module, plain_optimizer, options=save_options
    )
    files = _Files.of("optimizer", output_dir, optimizer_index, world.rank)
    files.write(optimizer_state, world, fsdp_plugin.whole_checkpoints, use_dcp)


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
    module = accelerator.unwrap_model(model)
    world = accelerator.ctx.world
    files = _Files.of("optimizer", input_dir, optimizer_index, world.rank)
    files.check(use_dcp)
    if use_dcp and not torch_folder.is_torch_folder(files.shards):
        _load_whole_optimizer(optimizer, module, files.whole, world)
    else:
        _load_optimizer_shards(
            getattr(optimizer, "optimizer", optimizer), module, files, use_dcp
        )


def _load_optimizer_shards(
    optimizer: torch.optim.Optimizer, module: nn.Module, files: _Files, use_dcp: bool
) -> None:
    if use_dcp:
        optimizer_state = {"optimizer": dcp.get_optimizer_state_dict(module, optimizer)}
        torch_folder.fill_state(optimizer_state, files.shards)
    else:
        optimizer_state = {"optimizer": torch.load(files.of_rank, weights_only=True)}
    dcp.set_optimizer_state_dict(module, optimizer, optimizer_state["optimizer"])


def _load_whole_optimizer(
    optimizer: Any, module: nn.Module, file: Path, world: Comm
) -> None:
    """Fill an optimizer from a file by the names or the numbers of parameters. Ranks: every rank."""
    content = formats.read_tensors(file)
    pieces = {key: [piece] for key, piece in content.pieces.items()}
    stored_component = reader.StoredComponent(
        file.name, "optimizer", pieces, dict(content.aliases), content.data
    )
    with agreeing(world, f"checking {file} against the optimizer"):
        plan = state_dicts.plan_optimizer(
            optimizer, state_dicts.parameter_names([module]), stored_component
        )
    reshard.run_copies(plan.copies)
    plan.finish()


def load_original_parts(
    accelerator: Any, folder: Path, wanted_models: Sequence[nn.Module]
) -> None:
    """Fill sharded models, the `wanted` ones, and optimizers from a folder of the original package. Ranks: every rank."""
    plugin = accelerator.state.fsdp_plugin
    done = components(accelerator).prepared
    for index, model in enumerate(done.models):
        if not any(
            accelerator.unwrap_model(model) is wanted_model
            for wanted_model in wanted_models
        ):
            continue
        if _Files.of("model", folder, index, 0).exists:
            load_fsdp_model(plugin, accelerator, model, folder, index)
        else:
            numbered = folder / f"model_{index}.safetensors"
            export.load_weights(
                accelerator.unwrap_model(model), numbered if index else folder
            )
    for index, optimizer in enumerate(done.optimizers):
        parameter_ids = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter_ids.add(id(parameter))
        owner = done.models[0]
        for m in done.models:
            if any(id(p) in parameter_ids for p in m.parameters()):
                owner = m
                break
        load_fsdp_optimizer(plugin, accelerator, optimizer, owner, folder, index)
