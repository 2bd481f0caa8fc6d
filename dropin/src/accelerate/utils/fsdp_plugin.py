"""The FSDP plugin with the established fields, FSDP2 underneath whatever version is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FullOptimStateDictConfig, FullStateDictConfig, StateDictType

import hasten
from accelerate.utils.environment import environment, str_to_bool

log = logging.getLogger(__name__)
# Any in this file: torch's policy objects, enums and callables of either FSDP version.


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharded training. `fsdp_version` 1 is read as 2: FSDP1 is no longer used."""

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        asked = _env("VERSION") if self.fsdp_version is None else str(self.fsdp_version)
        if asked == "1":
            log.info("fsdp_version=1 is read as 2: FSDP1 is no longer used")
        self.fsdp_version = 2
        for name in ("sharding_strategy", "backward_prefetch", "auto_wrap_policy"):
            if getattr(self, name) is None:
                setattr(self, name, _env(name.upper()))
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"):
            if getattr(self, name) is None:
                setattr(self, name, bool(str_to_bool(_env(name.upper()) or "false")))
        if self.cpu_offload is None:
            self.cpu_offload = bool(str_to_bool(_env("OFFLOAD_PARAMS") or "false"))
        if self.reshard_after_forward is None:
            text = _env("RESHARD_AFTER_FORWARD")
            self.reshard_after_forward = True if text is None else text
        if self.transformer_cls_names_to_wrap is None and (names := _env("TRANSFORMER_CLS_TO_WRAP")):
            self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",")]
        if self.min_num_params is None and (number := _env("MIN_NUM_PARAMS")):
            self.min_num_params = int(number)
        self.set_state_dict_type(self.state_dict_type or _env("STATE_DICT_TYPE") or "SHARDED_STATE_DICT")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose the form of checkpoints: sharded or full."""
        chosen = state_dict_type or self.state_dict_type or "SHARDED_STATE_DICT"
        if isinstance(chosen, str):
            name = chosen.upper().removeprefix("STATEDICTTYPE.")
            chosen = StateDictType(int(name)) if name.isdigit() else StateDictType[name]
        self.state_dict_type = chosen
        if chosen is StateDictType.FULL_STATE_DICT:
            self.state_dict_config = self.state_dict_config or FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = self.optim_state_dict_config or FullOptimStateDictConfig(
                offload_to_cpu=True, rank0_only=True
            )

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Find the blocks to wrap; hasten does so in prepare(), so only names are checked here."""
        names = self.transformer_cls_names_to_wrap or ()
        for name in names:
            if get_module_class_from_name(model, name) is None:
                raise ValueError(f"Could not find the transformer layer class {name} in the model.")

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Kept for callers: the dtypes follow the Accelerator's mixed_precision."""

    def set_cpu_offload(self) -> None:
        """Kept for callers: the offload policy is made in prepare()."""

    def validate_mixed_precision_policy(self) -> None:
        """Kept for callers: hasten checks the policy in prepare()."""

    def validate_cpu_offload(self) -> None:
        """Kept for callers: hasten checks the policy in prepare()."""

    def to_hasten(self) -> hasten.FullyShardedDataParallelPlugin:
        """The same in hasten's terms; what FSDP1 alone knew is translated, and said."""
        options: dict[str, Any] = {
            "state_dict_type": "FULL_STATE_DICT"
            if self.state_dict_type is StateDictType.FULL_STATE_DICT
            else "SHARDED_STATE_DICT",
            "cpu_offload": _offloads(self.cpu_offload),
            "activation_checkpointing": bool(self.activation_checkpointing),
            "activation_checkpointing_offload": bool(self.activation_checkpointing_offload),
            "cpu_ram_efficient_loading": bool(self.cpu_ram_efficient_loading),
        }
        if self.sharding_strategy is not None:
            options["sharding_strategy"] = str(getattr(self.sharding_strategy, "name", self.sharding_strategy))
        reshard = getattr(self.reshard_after_forward, "name", self.reshard_after_forward)
        options["reshard_after_forward"] = reshard
        if torch.accelerator.is_available() is False and options["cpu_offload"]:
            options["cpu_offload_pin_memory"] = False
        plain = {
            "mixed_precision_policy": self.mixed_precision_policy,
            "auto_wrap_policy": _policy(self.auto_wrap_policy),
            "ignored_modules": _ignored(self.ignored_modules),
            "param_init_fn": self.param_init_fn,
            "min_num_params": self.min_num_params or None,
            "transformer_cls_names_to_wrap": tuple(self.transformer_cls_names_to_wrap or ()) or None,
        }
        translated, said = hasten.fsdp_from_fsdp1(options)
        for sentence in said:
            log.info(sentence)
        values = {name: getattr(translated, name) for name in options if hasattr(translated, name)}
        values |= {"hybrid_shard": translated.hybrid_shard, "reshard_after_forward": translated.reshard_after_forward}
        return hasten.FullyShardedDataParallelPlugin(
            **values, **{name: value for name, value in plain.items() if value is not None}
        )


def _env(name: str) -> str | None:
    return environment().get(f"FSDP_{name}") or None


def _offloads(policy: Any) -> bool:
    if isinstance(policy, bool):
        return policy
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def _policy(policy: Any) -> Any:
    """A policy by name; torch's own functions of FSDP1 are known by theirs."""
    if policy is None or isinstance(policy, str):
        return None if policy is None else policy.lower()
    name = getattr(getattr(policy, "func", policy), "__name__", "")
    known = {"transformer_auto_wrap_policy": "transformer_based_wrap", "size_based_auto_wrap_policy": "size_based_wrap"}
    return known.get(name, policy)


def _ignored(modules: Iterable[torch.nn.Module] | str | None) -> Any:
    return modules if modules is None or isinstance(modules, str) else tuple(modules)


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called `name` among a model's modules, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
