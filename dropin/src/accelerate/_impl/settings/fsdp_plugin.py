"""The FSDP plugin with the established fields, FSDP2 underneath whatever version is asked for."""

import logging
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed import fsdp

import hasten
from accelerate._impl.environment.variables import environment, str_to_bool
from accelerate._impl.settings.filled import Reading, fill, yes
from accelerate._impl.surface.shown import shown
from hasten.strategies.fsdp.shard_groups import as_choice

log = logging.getLogger("accelerate.utils.fsdp_plugin")
# Any in this file: torch's policy objects, enums and callables of either FSDP version.
_DTYPES = {"fp32": torch.float32, "no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_AS_THEY_ARE = "sync_module_states mixed_precision_policy param_init_fn"
_SWITCHES = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
_FSDP1 = "reshard_after_forward sharding_strategy backward_prefetch forward_prefetch use_orig_params limit_all_gathers"
_READ: dict[str, Reading] = {
    **dict.fromkeys(
        ("sharding_strategy", "reshard_after_forward", "backward_prefetch", "auto_wrap_policy"), (str, None)
    ),
    **dict.fromkeys(("use_orig_params", "sync_module_states", "forward_prefetch"), (yes, None)),
    **dict.fromkeys(_SWITCHES, (yes, False)),
    "min_num_params": (int, None),
}


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharded training. `fsdp_version` 1 is read as 2: FSDP1 is no longer used.

    What is not given comes from the FSDP_* variables. Changes made to the plugin before a model is prepared count.
    """

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
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self.fsdp_version = _version(_env("VERSION") if self.fsdp_version is None else str(self.fsdp_version))
        self._take_environment()
        self.set_cpu_offload()
        if self.reshard_after_forward is None and self.sharding_strategy is None:
            self.reshard_after_forward = True
        self.reshard_after_forward = _reshard(self.reshard_after_forward)
        self.transformer_cls_names_to_wrap = _words(self.transformer_cls_names_to_wrap)
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.set_state_dict_type(self.state_dict_type or _env("STATE_DICT_TYPE") or "SHARDED_STATE_DICT")

    def _take_environment(self) -> None:
        """Fill what was not given from the FSDP_* variables; two have other names than the options."""
        fill(self, "FSDP_", **_READ)
        if self.cpu_offload is None:
            self.cpu_offload = yes(_env("OFFLOAD_PARAMS") or "no")
        if self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = _env("TRANSFORMER_CLS_TO_WRAP")

    @classmethod
    def of(cls, settings: hasten.FullyShardedDataParallelPlugin) -> Self:
        """The plugin that shows settings which came from flags, the environment or a file."""
        known = {name: getattr(settings, name) for name in cls.__dataclass_fields__ if hasattr(settings, name)}
        policy = None if settings.auto_wrap_policy == "auto" else settings.auto_wrap_policy
        made = cls(**{**known, "auto_wrap_policy": policy})
        if settings.hybrid_shard:
            made.sharding_strategy = "HYBRID_SHARD" if settings.reshard_after_forward else "HYBRID_SHARD_ZERO2"
        return made

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose the form of checkpoints: sharded or full."""
        chosen = state_dict_type or self.state_dict_type or "SHARDED_STATE_DICT"
        self.state_dict_type = _state_dict_type(chosen) if isinstance(chosen, str) else chosen
        if self.whole_checkpoints:
            self.state_dict_config = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        else:
            self.state_dict_config = fsdp.ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Find the blocks to wrap; hasten does so in prepare(), so only names are checked here."""
        for name in self.transformer_cls_names_to_wrap or ():
            if get_module_class_from_name(model, name) is None:
                raise ValueError(f"Could not find the transformer layer class {name} in the model.")

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute and reduce in this precision, unless a policy was given and is not to be overridden."""
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = _DTYPES.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"mixed_precision={mixed_precision!r}: give one of {', '.join(_DTYPES)} or a dtype.")
        self.mixed_precision_policy = fsdp.MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype
        )

    def set_cpu_offload(self) -> None:
        """Turn a yes or no into torch's policy."""
        if not isinstance(self.cpu_offload, fsdp.OffloadPolicy):
            wanted = bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload))
            pinned = torch.accelerator.is_available()
            self.cpu_offload = fsdp.CPUOffloadPolicy(pin_memory=pinned) if wanted else fsdp.OffloadPolicy()

    def validate_mixed_precision_policy(self) -> None:
        """Kept for callers: hasten checks the policy in prepare()."""

    validate_cpu_offload = validate_mixed_precision_policy
    whole_checkpoints = shown(
        lambda self: self.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT,
        "Whether checkpoints hold whole tensors instead of shards.",
    )

    def to_hasten(self, say: bool = True) -> hasten.FullyShardedDataParallelPlugin:
        """The same in hasten's terms; what FSDP1 alone knew is translated, and said unless it has been before."""
        offload = self.cpu_offload if isinstance(self.cpu_offload, fsdp.CPUOffloadPolicy) else None
        values: dict[str, Any] = {name: getattr(self, name) for name in _AS_THEY_ARE.split()}
        values |= {name: bool(getattr(self, name)) for name in _SWITCHES}
        values |= {"cpu_offload": offload is not None, "cpu_offload_pin_memory": getattr(offload, "pin_memory", None)}
        values["state_dict_type"] = "FULL_STATE_DICT" if self.whole_checkpoints else "SHARDED_STATE_DICT"
        values |= {**self._blocks(), **self._translated(say)}
        return hasten.FullyShardedDataParallelPlugin(**{n: value for n, value in values.items() if value is not None})

    def _blocks(self) -> dict[str, Any]:
        """What is sharded on its own, and what is not sharded."""
        ignored = self.ignored_modules
        return {
            "auto_wrap_policy": as_choice(self.auto_wrap_policy),
            "ignored_modules": ignored if ignored is None or isinstance(ignored, str) else tuple(ignored),
            "min_num_params": self.min_num_params or None,
            "transformer_cls_names_to_wrap": tuple(self.transformer_cls_names_to_wrap or ()) or None,
        }

    def _translated(self, say: bool) -> dict[str, Any]:
        """What FSDP1 knew by other names."""
        old = {name: getattr(getattr(self, name), "name", getattr(self, name)) for name in _FSDP1.split()}
        found, said = hasten.fsdp_from_fsdp1({name: value for name, value in old.items() if value is not None})
        for sentence in said if say else ():
            log.info(sentence)
        depth = found.forward_prefetch_depth or None
        reshard, hybrid = found.reshard_after_forward, found.hybrid_shard
        return {"reshard_after_forward": reshard, "hybrid_shard": hybrid, "forward_prefetch_depth": depth}


def _env(name: str) -> str | None:
    return environment().get(f"FSDP_{name}") or None


def _version(asked: str | None) -> int:
    if asked not in (None, "1", "2"):
        raise ValueError(f"fsdp_version={asked} does not exist; give 2, or leave it out.")
    if asked == "1":
        log.info("fsdp_version=1 is read as 2: FSDP1 is no longer used")
    return 2


def _words(names: Any) -> list[str] | None:
    words = names.split(",") if isinstance(names, str) else names
    return None if words is None else [word.strip() for word in words]


def _state_dict_type(word: str) -> fsdp.StateDictType:
    name = word.upper().removeprefix("STATEDICTTYPE.")
    known = {kind.name: kind for kind in fsdp.StateDictType} | {str(kind.value): kind for kind in fsdp.StateDictType}
    if name not in known:
        raise ValueError(f"state_dict_type={word!r}: give one of {', '.join(fsdp.StateDictType.__members__)}.")
    return known[name]


def _reshard(value: Any) -> Any:
    """True or False from the words and numbers that stand for them; the name of a strategy stays."""
    if value is None:
        return None
    word = str(getattr(value, "name", value))
    return bool(str_to_bool(word)) if word.lower() in ("true", "false", "1", "0") else word


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called `name` among a model's modules, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
