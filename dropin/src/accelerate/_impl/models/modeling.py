"""Looking at models, placing and loading them: hasten's own ways under the established names."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate._impl import ambient
from accelerate._impl.enums import CustomDtype
from accelerate._impl.environment.packages import is_peft_available
from accelerate._impl.surface.shown import like
from hasten.bigmodel import device_map as maps
from hasten.bigmodel import load, tensors
from hasten.bigmodel.dispatch import device_of
from hasten.bigmodel.load import Loaded
from hasten.bigmodel.offload_files import OffloadedWeightsLoader
from hasten.bigmodel.tensors import align_module_device
from hasten.checkpoint.export import parse_size, read_model
from hasten.errors import PrepareError
from hasten.optional import need

# Any in this file: device maps and foreign models.


def is_peft_model(model: Any) -> bool:
    """Whether peft made this model."""
    inner = getattr(model, "module", model)
    return is_peft_available() and isinstance(getattr(inner, "_orig_mod", inner), need("peft").PeftModel)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; an index that is not given is the current one's."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one element."""
    special = {torch.bool: 1 / 8, CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2, CustomDtype.FP8: 1}
    if dtype in special:
        return special[dtype]
    found = re.search(r"[^\d](\d+)(_\w+)?$", str(dtype))
    if found is None:
        raise ValueError(f"`dtype` is not a valid dtype: {dtype}.")
    return int(found.groups()[0]) // 8


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """What tells the memory of a tensor from any other."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Buffers that a state dict leaves out."""
    if not recurse:
        return set(module._non_persistent_buffers_set)
    found = set()
    for name, part in module.named_modules():
        found |= {f"{name}.{one}" if fqns and name else one for one in part._non_persistent_buffers_set}
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: Any = None, buffers_only: bool = False
) -> dict[str, int]:
    """Bytes of every module by name; the whole model is under the empty name."""
    sizes: dict[str, int] = {}
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        width, parts = _width(tensor, chosen, (special_dtypes or {}).get(name)), name.split(".")
        for key in (".".join(parts[:length]) for length in range(len(parts) + 1)):
            sizes[key] = sizes.get(key, 0) + int(tensor.numel() * width)
    return sizes


def _width(tensor: Tensor, chosen: Any, special: Any) -> float:
    """Bytes of one number, in the dtype it will have."""
    width = dtype_byte_size(special or tensor.dtype)
    smaller = special is None and chosen is not None and tensor.is_floating_point()
    return min(dtype_byte_size(chosen), width) if smaller else width


def compute_module_total_buffer_size(model: nn.Module, dtype: Any = None, special_dtypes: Any = None) -> int:
    """Bytes of a model's buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: dict[str, int]) -> list[str]:
    """Names that are not the beginning of others."""
    return [name for name in module_sizes if not any(other.startswith(f"{name}.") for other in module_sizes) and name]


def get_max_layer_size(modules: Any, module_sizes: Any, no_split_module_classes: Any) -> tuple[int, list[str]]:
    """Bytes of the largest part that is never split, and the names of such parts."""
    sizes, queue = dict[str, int](), list(modules)
    while queue:
        name, module = queue.pop(0)
        children = _children(name, module) if isinstance(module, nn.Module) else []
        if not children or type(module).__name__ in (no_split_module_classes or ()):
            sizes[name] = module_sizes[name]
        else:
            queue = children + queue
    largest = max(sizes.values(), default=0)
    return largest, [name for name, size in sizes.items() if size == largest]


def get_module_size_with_ties(
    tied_params: list[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Any
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module with those that share its parameters, and which these are."""
    names, parts = [], []
    for tied in tied_params:
        found = next(
            ((name, part) for name, part in modules_to_treat if tied.startswith(f"{name}.") or tied == name), None
        )
        if found is not None and found[0] not in names:
            names.append(found[0])
            parts.append(found[1])
            module_size += module_sizes[found[0]] - module_sizes.get(tied, 0)
    return module_size, names, parts


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """The first module that fits into the limit, with its name, and the modules without it.

    A module that is too large is looked into, unless its class is not to be split.
    """
    limit = parse_size(size_limit)
    for at, (name, part) in enumerate(modules):
        if _size_with_ties(name, module_sizes, modules, tied_parameters or ()) <= limit:
            return name, part, [*modules[:at], *modules[at + 1 :]]
        inside = [] if type(part).__name__ in (no_split_module_classes or ()) else _children(name, part)
        found, chosen, rest = fallback_allocate(inside, module_sizes, limit, no_split_module_classes, tied_parameters)
        if found is not None:
            return found, chosen, [*modules[:at], *rest, *modules[at + 1 :]]
    return None, None, list(modules)


def _children(name: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{one}", child) for one, child in part.named_children()]


def _size_with_ties(name: str, sizes: Mapping[str, int], modules: Any, tied_parameters: Any) -> int:
    """Bytes of a module with those that share its parameters."""
    inside = [ties for ties in tied_parameters if any(one.startswith(f"{name}.") for one in ties)]
    others = [one for ties in inside for one in ties if not one.startswith(f"{name}.")]
    return get_module_size_with_ties(others, sizes[name], sizes, modules)[0]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and of its largest part that is never split."""
    sizes = compute_module_sizes(model)
    modules = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(modules, sizes, getattr(model, "_no_split_modules", None) or [])


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """The map with children that all sit on one device named by their parent; the given one is changed too."""
    short = maps.clean_device_map(dict(device_map), module_name)
    device_map.clear()
    device_map.update(short)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise unless every parameter of the model has a device."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if any(maps.owner_in(device_map, name) is None for name in names):
        maps.check_device_map(model, device_map)


def _in_torch_dtypes(work_out: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    """The function of hasten's; what is to have a dtype that torch does not know counts as it is."""
    arguments = signature(work_out)

    @like(work_out)
    def run(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        given = arguments.bind(*args, **kwargs).arguments
        asked = {"": given.get("dtype"), **(given.get("special_dtypes") or {})}
        known = {name: dtype for name, dtype in asked.items() if isinstance(dtype, str | torch.dtype)}
        return OrderedDict(work_out(**{**given, "dtype": known.pop("", None), "special_dtypes": known}))

    return run


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Return the bytes of each device in order; sizes given as text are converted in place, which transformers relies on."""
    if max_memory is None:
        return dict(maps.get_max_memory())
    max_memory.update({key: parse_size(size) for key, size in max_memory.items() if isinstance(size, str)})
    return dict(sorted(max_memory.items(), key=lambda item: maps.device_order(item[0])))


infer_auto_device_map = _in_torch_dtypes(maps.infer_auto_device_map)
get_balanced_memory = _in_torch_dtypes(maps.get_balanced_memory)


def check_tied_parameters_on_same_device(tied_params: list[list[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of tied parameters that a map puts on several devices."""
    for group in tied_params:
        places = {name: device_map[owner] for name in group if (owner := maps.owner_in(device_map, name)) is not None}
        if len(set(places.values())) > 1:
            logging.getLogger("accelerate.utils.modeling").warning(
                "Tied parameters are on different devices: %s. Please modify your custom device map or set "
                "`device_map='auto'`.",
                places,
            )


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Tensor | None = None,
    dtype: Any = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one tensor of a module on a device; caches are never filled by it, so there is nothing to clear."""
    if fp16_statistics is not None:
        raise NotImplementedError(
            "fp16_statistics belong to 8-bit weights of bitsandbytes, which are not supported yet"
        )
    try:
        tensors.set_module_tensor_to_device(module, tensor_name, device, value, dtype, tied_params_map, non_blocking)
    except PrepareError as error:
        raise ValueError(str(error)) from error


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    dtype: Any = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Loaded:
    """Fill a model from a checkpoint, each weight where the map says."""
    return load.load_checkpoint_in_model(
        model, Path(checkpoint), device_map, offload_folder, dtype, offload_buffers, keep_in_fp32_modules, strict
    )


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: Any) -> None:
    """Fill a model with weights that were offloaded to a folder."""
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index or {})
    for name in index or {}:
        set_module_tensor_to_device(model, name, "cpu", loader[name])


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """The whole state of a model, offloaded parts from where they rest."""
    state = dict(model.state_dict())
    for name, tensor in list(state.items()):
        if tensor.is_meta:
            owner, _, last = name.rpartition(".")
            with align_module_device(model.get_submodule(owner), torch.device("cpu")):
                state[name] = getattr(model.get_submodule(owner), last).detach().clone()
    return state


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Any = "cpu"
) -> dict[str, Any]:
    """A state dict with one module's offloaded weights, on a device."""
    root = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for name, tensor in module.state_dict().items():
            key = f"{root}.{name}" if root else name
            if key in state_dict:
                state_dict[key] = tensor.detach().to(device_to_put_offload)
    return state_dict


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model says that it ties weights."""
    config = getattr(model, "config", None)
    return (
        bool(getattr(config, "tie_word_embeddings", False))
        and getattr(model, "get_output_embeddings", None) is not None
    )


def load_state_dict(checkpoint_file: Any, device_map: Any = None) -> dict[str, Tensor]:
    """The tensors of a weights file, in safetensors or torch's format."""
    state = read_model(checkpoint_file)
    if device_map is None:
        return state
    places = {name: device_map.get(maps.owner_in(device_map, name) or "", "cpu") for name in state}
    return {name: one.to(device_of("cpu" if places[name] == "disk" else places[name])) for name, one in state.items()}


def extract_submodules_state_dict(state_dict: Mapping[str, Tensor], submodule_names: list[str]) -> dict[str, Tensor]:
    """The entries that belong to some modules."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in submodule_names)
    }


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's parameters come to a device for its forward only."""
    hook = getattr(module, "_hf_hook", None)
    return bool(getattr(hook, "offload", False))


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A loss scaler for this process's device."""
    return torch.amp.GradScaler(ambient.device().type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """A block under autocast in the current precision; one that does nothing without it."""
    precision = ambient.AMBIENT.whole.get("_mixed_precision", "no")
    if not native_amp or precision not in ("fp16", "bf16", "fp8"):
        return nullcontext()
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    kwargs = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(ambient.device().type, dtype, **kwargs)
