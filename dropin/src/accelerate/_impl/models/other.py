"""Helpers that fit nowhere else in the established layout: unwrapping, saving, sizes."""

from __future__ import annotations

import codecs
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.views.logging import get_logger
from accelerate._impl.views.state import PartialState
from hasten.modules import forwarding
from hasten.modules.names import is_dtensor
from hasten.precision.autocast import AutocastForward

logger = get_logger("accelerate.utils.other")
export = Deferred("hasten.checkpoint.export")
formats = Deferred("hasten.checkpoint.format.formats")
manifests = Deferred("accelerate._impl.checkpoints.manifests")
_NUMPY = (
    np.zeros(0).__reduce__()[0],
    np.ndarray,
    codecs.encode,
    np.dtype,
    np.dtypes.UInt32DType,
)
# of which states of random generators are made
TORCH_SAFE_GLOBALS: list[Any] = [*_NUMPY]
# Any in this file: the caller's objects.


def is_compiled_module(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    return any(map(is_compiled_module, module.modules()))


def is_repeated_blocks(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(set(map(type, module))) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    return any(map(is_repeated_blocks, module.modules()))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy over the same parameters in which repeated blocks, and what lies beside them, are compiled one by one."""
    if not has_repeated_blocks(module):
        compiled_module: Any = torch.compile(module, **compile_kwargs)
        return cast("nn.Module", compiled_module)
    compiled_copy = copy(module)
    if is_repeated_blocks(module):
        compile_child: Callable[..., Any] = torch.compile
    else:
        compile_child = compile_regions
    compiled_children = {}
    for child_name, child in module.named_children():
        compiled_children[child_name] = compile_child(child, **compile_kwargs)
    for child in compiled_children.values():
        child.__dict__.pop("_orig_mod", None)  # the outermost module shows the original
    compiled_copy.__dict__.update(_modules=compiled_children, _orig_mod=module)
    return compiled_copy


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile repeated blocks one by one and what is beside them whole, in place; an engine keeps its hooks."""
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return
    is_block_list = is_repeated_blocks(module)
    for child in module.children():
        if is_block_list:
            child.compile(**compile_kwargs)
        else:
            compile_regions_deepspeed(child, **compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return the module, compiled in place, because its shards belong to its own blocks."""
    compile_regions_deepspeed(module, **compile_kwargs)
    return module


def model_has_dtensor(model: nn.Module) -> bool:
    return any(map(is_dtensor, model.parameters()))


def extract_model_from_parallel(
    model: Any,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:
    """Return the user's own module inside wrappers; the autocast around its forward and its compilation go when asked."""
    inner = _unwrap_parallel(getattr(model, "_orig_mod", model), recursive)
    if not keep_torch_compile:
        inner = getattr(inner, "_orig_mod", inner)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if keep_torch_compile:
        return _restore_compiled(model, inner)
    return inner


def _restore_compiled(model: Any, inner: Any) -> Any:
    if "_orig_mod" in getattr(model, "__dict__", ()):  # compiled by regions
        model.__dict__["_orig_mod"] = inner
    elif is_compiled_module(model):
        model._orig_mod = inner
    else:
        return inner
    return model


def show_original_forward(model: Any) -> None:
    """Set the attribute under which libraries find the forward that a model had before its autocast."""
    inner = _unwrap_parallel(getattr(model, "_orig_mod", model))
    if (
        isinstance(inner, nn.Module)
        and (autocast_forward := forwarding.find(inner, AutocastForward.tag))
        is not None
    ):
        inner.__dict__["_original_forward"] = autocast_forward.inner


def _restore_forward(model: Any) -> None:
    forwarding.restore(model, AutocastForward.tag)
    if (original_forward := model.__dict__.pop("_original_forward", None)) is not None:
        model.forward = original_forward


def _unwrap_parallel(model: Any, everywhere: bool = False) -> Any:
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    for submodule in list(model.modules()) if everywhere else ():
        submodule.__dict__["_modules"].update(
            {
                child_name: _unwrap_parallel(child)
                for child_name, child in submodule.named_children()
            }
        )
    return model


def wait_for_everyone() -> None:
    """Wait until every process is here. Ranks: every rank."""
    PartialState().wait_for_everyone()


def tell_shared(tensors: Mapping[str, torch.Tensor]) -> Collection[str]:
    repeated: Collection[str] = formats.find_tied_names(tensors)
    if repeated:
        logger.warning(
            message("shared_tensors_removed", set(repeated)), main_process_only=True
        )
    return repeated


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors, each stored once: names that share memory are reduced to the first of them."""
    tensors = {}
    for tensor_name, tensor_or_object in state_dict.items():
        if isinstance(tensor_or_object, torch.Tensor):
            tensors[tensor_name] = tensor_or_object.contiguous()
    repeated = tell_shared(
        {
            tensor_name: tensor_or_object
            for tensor_name, tensor_or_object in state_dict.items()
            if tensor_name in tensors
        }
    )
    unshared_tensors = {}
    for tensor_name, tensor_or_object in state_dict.items():
        if tensor_name not in repeated:
            unshared_tensors[tensor_name] = tensors.get(tensor_name, tensor_or_object)
    return unshared_tensors


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    process_state = PartialState()
    if (
        process_state.is_local_main_process
        if save_on_each_node
        else process_state.is_main_process
    ):
        if isinstance(f, str | Path):
            with manifests.hide_manifest(Path(f).parent):
                if safe_serialization:
                    saved = clean_state_dict_for_safetensors(obj)
                else:
                    saved = obj
                export.save_object(saved, f, safe_serialization)
        else:
            torch.save(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the object that torch.save wrote; code inside a file is never run unless `weights_only=False` says so."""
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return torch.load(
            f, map_location=map_location, **{"weights_only": True, **kwargs}
        )


def get_pretty_name(obj: Any) -> str:
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = getattr(obj, "__class__", obj)
    return str(
        getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj
    )


def merge_dicts(
    source: Mapping[str, Any], destination: dict[str, Any]
) -> dict[str, Any]:
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    return attrgetter(attr)(obj)


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[Any]:
    return [pair if return_fqns else pair[1] for pair in _behind_children("", model)]


def _behind_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child, inner in module.named_children():
        yield from _behind_children(f"{name}.{child}" if name else child, inner)
    yield name, module


def check_os_kernel() -> None:
    """Warn, on the main process, of a Linux kernel before 5.5."""
    machine = platform.uname()
    if machine.system == "Linux":
        kernel_version = re.match(r"(\d+)\.(\d+)(\.\d+)?", machine.release)
    else:
        kernel_version = None
    if kernel_version and (int(kernel_version[1]), int(kernel_version[2])) < (5, 5):
        logger.warning(message("old_kernel", kernel_version[0]), main_process_only=True)


def get_model_tp_size(model: nn.Module) -> int | None:
    return getattr(model, "tp_size", None)
