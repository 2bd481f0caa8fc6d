"""The FSDP plugin with the established fields and checks; FSDP2 works underneath whatever version is asked for."""

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

import hasten
from accelerate._impl.environment.constants import (
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
)
from accelerate._impl.environment.variables import environment
from accelerate._impl.settings.filled import Reading, fill_from_variables, is_yes
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property

log = logging.getLogger("accelerate.utils.dataclasses")
fsdp = Deferred("torch.distributed.fsdp")
wrap = Deferred("torch.distributed.fsdp.wrap")
# Any in this file: torch's policy objects, enums and callables of either FSDP version.
_DTYPES = {
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_GONE = {said.split()[0]: said for said in message("fsdp2_obsolete").split("\n")}
_SWITCHES = (
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)
_FSDP1 = "reshard_after_forward sharding_strategy backward_prefetch forward_prefetch use_orig_params limit_all_gathers"
_NO: Reading = (is_yes, False)
_READ: dict[str, Reading] = {
    "backward_prefetch": (str, None),
    "auto_wrap_policy": (str, None),
}
_READ |= {"ignored_modules": (str, None), **dict.fromkeys(_SWITCHES, _NO)}


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of sharded training, or the FSDP_* variables, as of `fsdp_version`; an Accelerator reads them as FSDP2's."""

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
    _whole = False  # whether the policy says that no block is sharded on its own

    def __post_init__(self) -> None:
        self.fsdp_version = int(
            self.fsdp_version or environment().get("FSDP_VERSION") or 1
        )
        if self.fsdp_version not in (1, 2):
            raise ValueError(
                f"fsdp_version={self.fsdp_version} does not exist; give 2, or leave it out."
            )
        if self.cpu_ram_efficient_loading is not None:  # transformers reads it there
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(
                self.cpu_ram_efficient_loading
            )
        self._settle_sharding()
        fill_from_variables(self, "FSDP_", **_READ)
        self._settle_places()
        self._settle_policies()
        self._settle_version()

    def _settle_places(self) -> None:
        self.backward_prefetch = _enum_member(
            fsdp.BackwardPrefetch, self.backward_prefetch, NO_PREFETCH=None
        )
        if self.cpu_offload is None:
            self.cpu_offload = is_yes(environment().get("FSDP_OFFLOAD_PARAMS", "False"))
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type()

    def _settle_sharding(self) -> None:
        """Take what happens to weights after a forward, under the name of either version."""
        by_name = self.sharding_strategy is not None
        reshards = self.reshard_after_forward
        expected_type = "`bool`"
        names = {"HYBRID_SHARD_ZERO2": fsdp.ShardingStrategy(5)}
        if self.fsdp_version == 1:
            fill_from_variables(self, "FSDP_", sharding_strategy=(str, "FULL_SHARD"))
            self.sharding_strategy = _enum_member(
                fsdp.ShardingStrategy, self.sharding_strategy, **names
            )
            reshards = _enum_member(fsdp.ShardingStrategy, reshards, **names)
            expected_type = "`str` or an instance of `torch.distributed.fsdp.fully_sharded_data_parallel.ShardingStrategy`"
        elif reshards is None and not by_name:
            reshards = environment().get("FSDP_RESHARD_AFTER_FORWARD") or "true"
        self.reshard_after_forward = reshards = (
            is_yes(reshards) if isinstance(reshards, str) else reshards
        )
        if isinstance(reshards, bool) == (self.fsdp_version == 1):
            raise ValueError(
                message(
                    "fsdp_reshard_after_forward",
                    reshards,
                    self.fsdp_version,
                    expected_type,
                )
            )
        if by_name:
            log.warning(message("fsdp_sharding_strategy_deprecated"))

    def _settle_policies(self) -> None:
        if isinstance(self.mixed_precision_policy, str | dict):
            self.set_mixed_precision(
                self.mixed_precision_policy,
                override=isinstance(self.mixed_precision_policy, str),
            )
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        if not isinstance(name := self.auto_wrap_policy, str):
            return
        policies = (
            wrap.transformer_auto_wrap_policy,
            wrap.size_based_auto_wrap_policy,
            None,
        )
        if name.upper() not in FSDP_AUTO_WRAP_POLICY:
            raise ValueError(
                f"Invalid auto wrap policy: {name}. Must be one of {FSDP_AUTO_WRAP_POLICY}"
            )
        self.auto_wrap_policy = policies[FSDP_AUTO_WRAP_POLICY.index(name.upper())]
        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = environment().get(
                    "FSDP_TRANSFORMER_CLS_TO_WRAP"
                )
            if isinstance(self.transformer_cls_names_to_wrap, str):
                self.transformer_cls_names_to_wrap = (
                    self.transformer_cls_names_to_wrap.split(",")
                )
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            fill_from_variables(self, "FSDP_", min_num_params=(int, 0))
            if not isinstance(size := self.min_num_params, int):
                raise ValueError(
                    f"`min_num_params` must be an integer. Got {size} of type {type(size)}"
                )
        else:
            self._whole = True

    def _settle_version(self) -> None:
        """Fill what FSDP1 alone has, or leave it out; check what FSDP2 alone has."""
        if self.activation_checkpointing_offload and not (
            self.activation_checkpointing and self.fsdp_version == 2
        ):
            if self.activation_checkpointing:
                need = "`fsdp_version=2`"
            else:
                need = "`activation_checkpointing=True`"
            raise ValueError(
                f"`activation_checkpointing_offload=True` requires {need}."
            )
        if self.fsdp_version == 2:
            if self.forward_prefetch is not None:
                raise ValueError(message("fsdp2_forward_prefetch"))
            for option_name in [
                option_name
                for option_name in _GONE
                if getattr(self, option_name) is not None
            ]:
                log.warning(_GONE[option_name])
                setattr(self, option_name, None)
            return
        fill_from_variables(
            self,
            "FSDP_",
            use_orig_params=_NO,
            sync_module_states=_NO,
            forward_prefetch=_NO,
        )
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            warnings.warn(message("fsdp_states_synchronized"), stacklevel=4)
            self.sync_module_states = True
        if self.sync_module_states:
            self.param_init_fn = _empty_weights

    @classmethod
    def of(cls, settings: hasten.FullyShardedDataParallelPlugin) -> Self:
        """Return the plugin that shows settings which came from flags, the environment or a file."""
        shown = "reshard_after_forward cpu_offload ignored_modules state_dict_type transformer_cls_names_to_wrap min_num_params"
        plugin_fields = {}
        for option_name in (*shown.split(), *_SWITCHES[:2]):
            plugin_fields[option_name] = getattr(settings, option_name)
        if settings.auto_wrap_policy == "auto":
            plugin_fields["auto_wrap_policy"] = None
        else:
            plugin_fields["auto_wrap_policy"] = settings.auto_wrap_policy
        names = plugin_fields["transformer_cls_names_to_wrap"]
        plugin = cls(
            fsdp_version=2,
            **{**plugin_fields, "transformer_cls_names_to_wrap": names and list(names)},
        )
        plugin.cpu_ram_efficient_loading = settings.cpu_ram_efficient_loading
        plugin.param_init_fn = settings.param_init_fn
        if settings.hybrid_shard:
            if settings.reshard_after_forward:
                plugin.sharding_strategy = "HYBRID_SHARD"
            else:
                plugin.sharding_strategy = "HYBRID_SHARD_ZERO2"
        return plugin

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        type_name = (
            state_dict_type
            or self.state_dict_type
            or environment().get("FSDP_STATE_DICT_TYPE")
        )
        self.state_dict_type = _enum_member(
            fsdp.StateDictType,
            type_name or FSDP2_STATE_DICT_TYPE[self.fsdp_version == 1],
        )
        if self.state_dict_type is fsdp.StateDictType.LOCAL_STATE_DICT:
            if self.fsdp_version == 2:
                raise ValueError(message("fsdp2_local_state_dict"))
            return
        kind, rank0 = (
            ("Full", {"rank0_only": True})
            if self.whole_checkpoints
            else ("Sharded", {})
        )
        for attribute_name, config_kind in (
            ("state_dict_config", ""),
            ("optim_state_dict_config", "Optim"),
        ):
            config_object = getattr(fsdp, f"{kind}{config_kind}StateDictConfig")(
                offload_to_cpu=True, **rank0
            )
            setattr(
                self, attribute_name, getattr(self, attribute_name) or config_object
            )

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Bind the policy to the model's classes. Raises: ValueError for a class that the model has not."""
        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(
                    getattr(model, "_no_split_modules", None) or []
                )
            layer_classes = _find_layer_classes(
                model, self.transformer_cls_names_to_wrap
            )
            self.auto_wrap_policy = partial(
                wrap.transformer_auto_wrap_policy, transformer_layer_cls=layer_classes
            )
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            self.auto_wrap_policy = (size := self.min_num_params or None) and partial(
                wrap.size_based_auto_wrap_policy, min_num_params=size
            )

    def set_mixed_precision(
        self,
        mixed_precision: Any,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        policy_class, dtype_names = self._wrap_policy()
        if isinstance(dtype := mixed_precision, str) and dtype not in _DTYPES:
            raise ValueError(
                f"Invalid mixed precision: {dtype}. Must be one of {list(_DTYPES)}"
            )
        dtype = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        if isinstance(policy := self.mixed_precision_policy, dict):
            self.mixed_precision_policy = policy_class(
                **_check_dtypes(policy, dtype_names)
            )
        elif policy is None or override:
            if buffer_autocast and self.fsdp_version == 1:
                last = torch.float32
            else:
                last = dtype
            self.mixed_precision_policy = policy_class(
                **dict(zip(dtype_names, (dtype, dtype, last), strict=True))
            )

    def _wrap_policy(self) -> tuple[Any, list[str]]:
        """Return the version's class of precision policies and its dtypes."""
        if self.fsdp_version == 1:
            policy_class = fsdp.MixedPrecision
        else:
            policy_class = fsdp.MixedPrecisionPolicy
        return policy_class, [
            "param_dtype",
            "reduce_dtype",
            "buffer_dtype" if self.fsdp_version == 1 else "output_dtype",
        ]

    def validate_mixed_precision_policy(self) -> None:
        """Raise a ValueError for a policy of another class than the version's."""
        if not isinstance(
            self.mixed_precision_policy, policy_class := self._wrap_policy()[0]
        ):
            raise ValueError(
                f"mixed_precision_policy must be an instance of `torch.distributed.fsdp.{policy_class.__name__}`."
            )

    def set_cpu_offload(self) -> None:
        """Turn a yes or no into torch's policy."""
        if isinstance(offloads := self.cpu_offload, bool):
            if offloads:
                new = fsdp.CPUOffloadPolicy()
            else:
                new = fsdp.OffloadPolicy()
            if self.fsdp_version == 1:
                self.cpu_offload = fsdp.CPUOffload(offload_params=offloads)
            else:
                self.cpu_offload = new

    def validate_cpu_offload(self) -> None:
        """Raise a ValueError for a policy of another class than the version's."""
        if self.fsdp_version == 1:
            offload_class = fsdp.CPUOffload
        else:
            offload_class = fsdp.OffloadPolicy
        if not isinstance(self.cpu_offload, offload_class):
            raise ValueError(
                message(
                    "fsdp_cpu_offload",
                    offload_class.__name__,
                    self.fsdp_version,
                    self.cpu_offload,
                )
            )

    whole_checkpoints = shown_property(
        lambda self: self.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT,
        "Whether checkpoints hold whole tensors.",
    )

    def to_hasten(self, say: bool = True) -> hasten.FullyShardedDataParallelPlugin:
        """Return the same in hasten's terms; what FSDP1 alone knew is translated, and said unless it has been before."""
        values: dict[str, Any] = {
            switch_name: bool(getattr(self, switch_name)) for switch_name in _SWITCHES
        } | self._placed_parameters()
        if isinstance(policy := self.mixed_precision_policy, fsdp.MixedPrecision):
            policy = fsdp.MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
        values |= {
            "sync_module_states": self.sync_module_states,
            "mixed_precision_policy": policy,
        }
        if self.param_init_fn is _empty_weights:
            values["param_init_fn"] = None
        else:
            values["param_init_fn"] = self.param_init_fn
        if self.whole_checkpoints:
            values["state_dict_type"] = "FULL_STATE_DICT"
        else:
            values["state_dict_type"] = "SHARDED_STATE_DICT"
        values |= {**self._block_classes(), **self._translate_fsdp1(say)}
        return hasten.FullyShardedDataParallelPlugin(
            **{
                n: option_value
                for n, option_value in values.items()
                if option_value is not None
            }
        )

    def _placed_parameters(self) -> dict[str, Any]:
        offload: Any = self.cpu_offload
        if not getattr(
            offload, "offload_params", isinstance(offload, fsdp.CPUOffloadPolicy)
        ):
            return {"cpu_offload": False}
        pinned = (
            getattr(offload, "pin_memory", True) and torch.accelerator.is_available()
        )
        return {"cpu_offload": True, "cpu_offload_pin_memory": pinned}

    def _block_classes(self) -> dict[str, Any]:
        """Return the modules that are sharded on their own, and those that are not sharded."""
        ignored = self.ignored_modules
        names = _variable_words(self.transformer_cls_names_to_wrap or ())
        policy = _as_choice(self.auto_wrap_policy)
        return {
            "auto_wrap_policy": "no_wrap" if policy is None and self._whole else policy,
            "ignored_modules": ignored
            if ignored is None or isinstance(ignored, str)
            else tuple(ignored),
            "min_num_params": self.min_num_params or None,
            "transformer_cls_names_to_wrap": tuple(names) or None,
        }

    def _translate_fsdp1(self, say: bool) -> dict[str, Any]:
        """Return the settings that FSDP1 knew by other names."""
        old = {}
        for option_name in _FSDP1.split():
            old[option_name] = getattr(
                getattr(self, option_name), "name", getattr(self, option_name)
            )
        if old["reshard_after_forward"] is not None and self.fsdp_version == 1:
            del old["sharding_strategy"]  # a default
        translated, log_sentences = hasten.fsdp_from_fsdp1(
            {
                option_name: option_value
                for option_name, option_value in old.items()
                if option_value is not None
            }
        )
        for sentence in log_sentences if say else ():
            log.info(sentence)
        option_names = (
            "reshard_after_forward",
            "hybrid_shard",
            "forward_prefetch_depth",
        )
        return {
            option_name: getattr(translated, option_name)
            for option_name in option_names
        }


def _enum_member(kind: Any, member_or_word: Any, **names: Any) -> Any:
    """Return the member of a torch enum that a word or a number in a word stands for; other values as they are."""
    if not isinstance(member_or_word, str):
        return member_or_word
    member_name = member_or_word.upper()
    if member_name.isdigit():
        return kind(int(member_name))
    if member_name in names:
        return names[member_name]
    return kind[member_name]


def _check_dtypes(policy: dict[str, Any], names: list[str]) -> dict[str, Any]:
    known_dtypes = list(_DTYPES.values())
    if policy.keys() != set(names) or any(
        dtype not in known_dtypes for dtype in policy.values()
    ):
        raise ValueError(message("fsdp_precision_policy", policy, names, known_dtypes))
    return policy


def _find_layer_classes(model: torch.nn.Module, names: Any) -> set[Any]:
    layer_classes = {}
    for class_name in _variable_words(names):
        layer_classes[class_name] = get_module_class_from_name(model, class_name)
    if missing := [
        class_name
        for class_name, layer_class in layer_classes.items()
        if layer_class is None
    ]:
        raise ValueError(
            f"Could not find the transformer layer class {missing[0]} in the model."
        )
    return set(layer_classes.values())


def _variable_words(names: Any) -> list[str]:
    class_names = []
    for class_name in names.split(",") if isinstance(names, str) else names:
        class_names.append(class_name.strip())
    return class_names


def _empty_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Allocate the module's tensors, which the first rank fills."""
    return module.to_empty(
        device=torch.accelerator.current_accelerator() or "cpu", recurse=False
    )


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    for submodule in module.modules():
        if type(submodule).__name__ == name:
            return type(submodule)
    return None


def _as_choice(policy: Any) -> Any:
    """Return a policy as a lower-case name or as a function of one module.

    Raises: TypeError for an object that cannot be called with a module.
    """
    if policy is None or isinstance(policy, str):
        return None if policy is None else policy.lower()
    if policy is wrap.transformer_auto_wrap_policy:
        return "transformer_based_wrap"
    if policy is wrap.size_based_auto_wrap_policy:
        return "size_based_wrap"
    if isinstance(policy, wrap.CustomPolicy):
        return _Chosen(policy._lambda_fn)
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy is a {type(policy).__name__}; give a name, or a function of a module."
        )
    if "recurse" in inspect.signature(policy).parameters:
        return _Asked(policy)
    return policy


class _Chosen:
    """Policy of FSDP1 that may return options instead of True."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, module: nn.Module) -> bool:
        return bool(self.function(module))

    def __eq__(self, compared: object) -> bool:
        return type(compared) is type(self) and self.function is compared.function

    __hash__ = None  # type: ignore[assignment]  # compared, never hashed


class _Asked(_Chosen):
    """Policy of FSDP1 with a `recurse` argument; it is called with recurse=False only, whether to wrap the module."""

    def __call__(self, module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(self.function(module=module, recurse=False, nonwrapped_numel=size))
