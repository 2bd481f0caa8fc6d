"""Loading and placing big models, on hasten's placement and streaming."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate._impl.environment.variables import parse_flag_from_env
from accelerate._impl.models import hooked
from accelerate._impl.models.hooks import (
    UserCpuOffloadHook,
    mirror_hooks,
    mirrored_hook,
    remove_hook_from_submodules,
    show_plan,
)
from accelerate._impl.models.modeling import (
    fill_model,
    has_offloaded_params,
    load_checkpoint_in_model,
)
from accelerate._impl.models.planning import (
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
)
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import like
from hasten.extensions.bigmodel import dispatch
from hasten.extensions.bigmodel import tensors as casting
from hasten.extensions.bigmodel.device_map import MAP_METHODS, OFFLOAD, owner_in
from hasten.extensions.bigmodel.placed import Immovable, streamers_of
from hasten.modules import meta
from hasten.modules.forwarding import is_dispatched
from hasten.modules.surgery import named_tensors

logger = logging.getLogger("accelerate.big_modeling")
_STILL = ("cpu", "meta")  # devices that nothing is copied to
# Any in this file: devices and maps in the many forms the established API takes.


def _with_buffers(
    create: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    """Return the function of hasten's, and torch's own default device if buffers are included, by the argument or a variable."""

    @like(create)
    @contextmanager
    def run(*args: Any, **kwargs: Any) -> Iterator[None]:
        bound_arguments = signature(create).bind(*args, **kwargs).arguments
        buffers = bound_arguments.pop("include_buffers", None)
        if buffers is None:
            includes_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS")
        else:
            includes_buffers = buffers
        with (
            torch.device(bound_arguments.get("device", "meta"))
            if includes_buffers
            else create(**bound_arguments)
        ):
            yield

    return run


init_empty_weights = _with_buffers(meta.init_empty_weights)
init_on_device = _with_buffers(meta.init_on_device)


@like(dispatch.cpu_offload_with_hook)
def cpu_offload_with_hook(
    model: nn.Module, *args: Any, **kwargs: Any
) -> tuple[nn.Module, UserCpuOffloadHook]:
    model, hook = dispatch.cpu_offload_with_hook(model, *args, **kwargs)
    mirror_hooks(model)
    return model, UserCpuOffloadHook(model, hook.hook)


def _with_shown_hooks(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return the function of hasten's, after which libraries find the hooks they look for."""

    @like(function)
    def run(*args: Any, **kwargs: Any) -> nn.Module:
        bound_arguments = signature(function).bind(*args, **kwargs).arguments
        device = bound_arguments["execution_device"] = _remove_offloading(
            bound_arguments["model"], bound_arguments.get("execution_device")
        )
        model: nn.Module = getattr(_module_for_device(device), function.__name__)(
            **bound_arguments
        )
        if is_dispatched(model):
            show_plan(
                [
                    (model, {"io_same_device": True}),
                    *hooked.hooks_of_offloading(model, device, bound_arguments),
                ]
            )
        mirror_hooks(model)
        return model

    return run


cpu_offload = _with_shown_hooks(dispatch.cpu_offload)
disk_offload = _with_shown_hooks(dispatch.disk_offload)


def _remove_offloading(model: nn.Module, device: Any) -> Any:
    """Take off an earlier offloading; return the device to compute on."""
    if is_dispatched(model) or any(map(has_offloaded_params, model.modules())):
        remove_hook_from_submodules(model)
    if device is None:
        return next(model.parameters()).device
    return device


def _module_for_device(device: Any) -> Any:
    """Return the function that places weights on the device: streamed, and to the CPU and the meta device by hooks."""
    if dispatch.device_of(device).type in _STILL:
        return hooked
    return dispatch


@like(dispatch.dispatch_model)
def dispatch_model(
    model: nn.Module, device_map: Mapping[str, Any], *args: Any, **kwargs: Any
) -> nn.Module:
    check_device_map(model, device_map)
    _dispatch_by_map(
        signature(dispatch.dispatch_model)
        .bind(model, device_map, *args, **kwargs)
        .arguments,
        model,
        device_map,
    )
    if "_hf_hook" in model.__dict__:
        offload_targets = []
        for offload_target in dict.fromkeys(map(str, device_map.values())):
            if offload_target in OFFLOAD:
                offload_targets.append(offload_target)
        if offload_targets:
            logger.warning(message("offloaded_to", " and ".join(offload_targets)))
        model.__dict__.update(to=_Move(model, "to"), cuda=_Move(model, "cuda"))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # an attribute that libraries look at
    return model


def _dispatch_by_map(
    bound_arguments: dict[str, Any], model: nn.Module, device_map: Mapping[str, Any]
) -> None:
    unplaced_names = []
    for module_name, _ in named_tensors(model):
        if owner_in(dict(device_map), module_name) is None:
            unplaced_names.append(module_name)
    # whoever skips the check means them to stay
    module_devices = {**device_map, **dict.fromkeys(unplaced_names, "cpu")}
    main_device = bound_arguments.get("main_device")
    index = bound_arguments.get("offload_index")
    first_device = "cpu"
    for module_device in module_devices.values():
        if str(module_device) not in OFFLOAD:
            first_device = module_device
            break
    main_device = _remove_offloading(
        model, first_device if main_device is None else main_device
    )
    disk_modules = []
    for module_name, module_device in device_map.items():
        if str(module_device) == "disk":
            disk_modules.append(module_name)
    if disk_modules and bound_arguments.get("offload_dir") is None and index is None:
        raise ValueError(message("offload_needs_dir", ", ".join(disk_modules)))
    devices = {*map(str, module_devices.values())}
    is_spread = bool(
        disk_modules or bound_arguments.get("force_hooks") or len(devices) > 1
    )
    streams = _module_for_device(main_device) is dispatch or not devices <= {
        *OFFLOAD,
        *_STILL,
    }
    if index is not None or (streams and (is_spread or devices <= {*OFFLOAD})):
        dispatch.dispatch_model(**{**bound_arguments, "device_map": module_devices})
        if is_dispatched(model):
            show_plan(
                hooked.hooks_of_map(model, device_map, main_device, bound_arguments)
            )
    elif is_spread:
        passed_names = (
            signature(hooked.dispatch_model).parameters.keys() & bound_arguments.keys()
        )
        mirror_hooks(
            hooked.dispatch_model(
                **{
                    module_name: bound_arguments[module_name]
                    for module_name in passed_names
                }
                | {"main_device": main_device}
            )
        )
    else:
        model.to(next(iter(module_devices.values())))


class _Move(Immovable):
    """`to` and `cuda` of a dispatched model: a warning, and an error for one that is partly elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "_hf_hook" in self.model.__dict__:
            targets = (*args[:1], kwargs.get("device"), kwargs.get("tensor"))
            if self.name != "to" or any(
                isinstance(tensor_or_target, str | int | torch.device | Tensor)
                for tensor_or_target in targets
            ):
                logger.warning(
                    "You shouldn't move a model that is dispatched using accelerate hooks."
                )
            if streamers_of(self.model) or any(
                tensor_or_target.is_meta for tensor_or_target in self.model.parameters()
            ):
                raise RuntimeError(
                    "You can't move a model that has some modules offloaded to cpu or disk."
                )
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    module_devices = _worked_out(
        model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
    )
    placement_options: dict[str, Any] = {
        "device_map": module_devices,
        "offload_buffers": offload_buffers,
    }
    load_options = {
        **placement_options,
        "offload_folder": offload_folder,
        "dtype": dtype,
        "strict": strict,
    }
    dispatch_options = {
        **placement_options,
        "offload_dir": offload_folder,
        "preload_module_classes": preload_module_classes,
    }
    if {*map(str, (module_devices or {}).values())} <= {*OFFLOAD, *_STILL}:
        load_options.update(
            full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0
        )
        load_checkpoint_in_model(
            model,
            checkpoint,
            offload_state_dict=bool(offload_state_dict),
            **load_options,
        )
    else:
        dispatch_options["offload_index"] = (
            dict(fill_model(model, checkpoint, **load_options).offload_index) or None
        )
    if module_devices is None:
        return model
    return dispatch_model(
        model, skip_keys=skip_keys, force_hooks=force_hooks, **dispatch_options
    )


def _worked_out(
    model: nn.Module,
    ways: Any,
    limits: Any,
    no_split: Any,
    dtype: Any,
    offload_buffers: bool,
) -> Any:
    if not isinstance(ways, str):
        return ways
    if ways not in MAP_METHODS:
        raise ValueError(message("unknown_device_map"))
    options = {"no_split_module_classes": no_split, "dtype": dtype}
    if ways != "sequential":
        limits = get_balanced_memory(
            model, max_memory=limits, low_zero=ways == "balanced_low_0", **options
        )
    return infer_auto_device_map(
        model, max_memory=limits, offload_buffers=offload_buffers, **options
    )


attach_layerwise_casting_hooks = mirrored_hook(casting.attach_layerwise_casting_hooks)


def _layer_types(model: nn.Module) -> set[str]:
    """Return the kinds of attention that the configuration of a model of transformers lists, or stands for."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    else:
        config = config
    if (listed := getattr(config, "layer_types", None)) is not None:
        return set(listed)
    if getattr(config, "sliding_window", None):
        return {"sliding_attention"}
    return set()


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Raise a ValueError for layers that carry a state along the sequence, which each process would begin anew."""
    if recurrent := sorted(
        kind for kind in _layer_types(model) if "linear_attention" in kind
    ):
        raise ValueError(message("recurrent_layers", recurrent, type(model).__name__))


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Let attention of transformers be causal without the masks it is given. Raises: ValueError for masks that are stricter."""
    if stricter := sorted(_layer_types(model) - {"full_attention"}):
        raise ValueError(message("masks_dropped", stricter, type(model).__name__))
    for module_name, module in model.named_modules():
        if module_name.endswith("self_attn"):
            module.register_forward_pre_hook(
                _without_mask, with_kwargs=True, prepend=True
            )


def _without_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if "attention_mask" in kwargs:
        dropped = {"attention_mask": None, "is_causal": True}
    else:
        dropped = {}
    return args, {**kwargs, **dropped}


for _hook_maker in (
    _refuse_recurrent_layers_under_sequence_parallelism,
    _attach_context_parallel_hooks,
    _without_mask,
):
    # by which clients find the hooks
    _hook_maker.__module__ = "accelerate.big_modeling"
