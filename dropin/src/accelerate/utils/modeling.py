"""Looking at models: sizes, ties, names. What places and loads big models follows later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import ambient, notyet
from accelerate.utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accelerate.utils.enums import CustomDtype
from accelerate.utils.imports import is_peft_available
from hasten.checkpoint.export import parse_size
from hasten.checkpoint.formats import read_tensors

__all__ = ["SAFE_WEIGHTS_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME"]
# Any in this file: device maps and foreign models.


def is_peft_model(model: Any) -> bool:
    """Whether peft made this model."""
    if not is_peft_available():
        return False
    from peft import PeftModel  # an optional package

    inner = getattr(model, "module", model)
    return isinstance(getattr(inner, "_orig_mod", inner), PeftModel)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; an index that is not given is the current one's."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes in a size such as "10GB" (thousands) or "1GiB" (1024s)."""
    return parse_size(size)


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


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make the names of each group one parameter again."""
    for group in tied_params:
        kept = next((p for name in group if (p := _get(model, name)).device.type != "meta"), None)
        if kept is None:
            continue
        for name in group:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, kept)


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), last)
    return found


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: Any = None, buffers_only: bool = False
) -> dict[str, int]:
    """Bytes of every module by name; the whole model is under the empty name."""
    sizes: dict[str, int] = {}
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        special = (special_dtypes or {}).get(name)
        width = dtype_byte_size(special or tensor.dtype)
        if special is None and chosen is not None and tensor.is_floating_point():
            width = min(dtype_byte_size(chosen), width)
        parts = name.split(".")
        for length in range(len(parts) + 1):
            key = ".".join(parts[:length])
            sizes[key] = sizes.get(key, 0) + int(tensor.numel() * width)
    return sizes


def compute_module_total_buffer_size(model: nn.Module, dtype: Any = None, special_dtypes: Any = None) -> int:
    """Bytes of a model's buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: dict[str, int]) -> list[str]:
    """Names that are not the beginning of others."""
    return [name for name in module_sizes if not any(other.startswith(f"{name}.") for other in module_sizes) and name]


def get_max_layer_size(modules: Any, module_sizes: Any, no_split_module_classes: Any) -> tuple[int, list[str]]:
    """Bytes of the largest part that is never split, and the names of such parts."""
    largest, names = 0, []
    queue = list(modules)
    while queue:
        name, module = queue.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if not children or type(module).__name__ in (no_split_module_classes or ()):
            size = module_sizes[name]
            if size > largest:
                largest, names = size, [name]
            elif size == largest:
                names.append(name)
        else:
            queue = [(f"{name}.{child}", part) for child, part in children] + queue
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and of its largest part that is never split."""
    sizes = compute_module_sizes(model)
    modules = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(modules, sizes, getattr(model, "_no_split_modules", None) or [])


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """The map with children that all sit on one device named by their parent."""
    prefix = "" if module_name == "" else f"{module_name}."
    places = [place for name, place in device_map.items() if name.startswith(prefix)]
    if len(set(places)) == 1 and len(places) > 1:
        for name in [name for name in device_map if name.startswith(prefix)]:
            del device_map[name]
        device_map[module_name] = places[0]
    level = prefix.count(".")
    children = {
        ".".join(name.split(".")[: level + 1]) for name in device_map if name.startswith(prefix) and name != module_name
    }
    for child in children:
        if any(name.startswith(f"{child}.") for name in device_map):
            clean_device_map(device_map, child)
    return device_map


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model says that it ties weights."""
    config = getattr(model, "config", None)
    return (
        bool(getattr(config, "tie_word_embeddings", False))
        and getattr(model, "get_output_embeddings", None) is not None
    )


def load_state_dict(checkpoint_file: Any, device_map: Any = None) -> dict[str, Tensor]:
    """The tensors of a weights file, in safetensors or torch's format."""
    if device_map is not None:
        notyet.refuse("utils.load_state_dict(device_map=...)", notyet.BIG_MODELS)
    found = read_tensors(Path(checkpoint_file))
    state = {name: piece.data for name, piece in found.pieces.items()}
    return {**state, **{name: state[target] for name, target in found.aliases.items()}}


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook keeps the module's parameters elsewhere; no hook here does, yet."""
    return False


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """A block in which the module's own parameters are on a device."""
    if execution_device is None:
        yield
        return
    before = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
    try:
        for name in before:
            getattr(module, name).data = getattr(module, name).data.to(execution_device)
        yield
    finally:
        for name, device in before.items():
            getattr(module, name).data = getattr(module, name).data.to(device)


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


_LATER = (
    "check_device_map check_tied_parameters_on_same_device fallback_allocate get_balanced_memory get_max_memory "
    "get_module_size_with_ties get_state_dict_from_offload get_state_dict_offloaded_model infer_auto_device_map "
    "load_checkpoint_in_model load_offloaded_weights set_module_tensor_to_device"
)
for _name in _LATER.split():
    globals()[_name] = notyet.function(f"utils.{_name}", notyet.BIG_MODELS)
