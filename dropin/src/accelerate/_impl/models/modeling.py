"""Looking at models, placing and loading them: hasten's own ways under the established names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import reduce
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from accelerate._impl import ambient
from accelerate._impl.environment.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate._impl.environment.packages import is_peft_available
from accelerate._impl.models.align import offloading_hook
from accelerate._impl.models.planning import (
    check_tied_parameters_on_same_device,
    ties_of,
)
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from hasten.checkpoint.export import read_model, weight_files
from hasten.errors import CheckpointError
from hasten.extensions.bigmodel import device_map as maps
from hasten.extensions.bigmodel import load, tensors
from hasten.extensions.bigmodel.dispatch import device_of
from hasten.extensions.bigmodel.load import Loaded
from hasten.extensions.bigmodel.offload_files import (
    OffloadedWeightsLoader,
    offload_weight,
    save_offload_index,
)
from hasten.modules.names import is_dtensor
from hasten.optional import need

logger = logging.getLogger("accelerate.utils.modeling")
dcp = Deferred("torch.distributed.checkpoint.state_dict")
# Any in this file: device maps and foreign models.


def is_peft_model(model: Any) -> bool:
    inner = getattr(model, "module", model)
    return is_peft_available() and isinstance(
        getattr(inner, "_orig_mod", inner), need("peft").PeftModel
    )


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    numbered = first_device.type == second_device.type not in ("cpu", "meta")
    return first_device == second_device or (
        numbered and (first_device.index or 0) == (second_device.index or 0)
    )


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    if recurse:
        named_modules = module.named_modules()
    else:
        named_modules = [("", module)]
    buffer_labels = set()
    for module_name, submodule in named_modules:
        prefix = f"{module_name}." if fqns and module_name else ""
        for buffer_name in submodule._non_persistent_buffers_set:
            buffer_labels.add(prefix + buffer_name)
    return buffer_labels


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        if remove_non_persistent:
            left_out = get_non_persistent_buffers(module, recurse, fqns=True)
        else:
            left_out = set()
        yield from (
            (tensor_name, buffer)
            for tensor_name, buffer in module.named_buffers(recurse=recurse)
            if tensor_name not in left_out
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
    current_tensor = _check_tensor(module, tensor_name, device, value)
    stays_in_place = value is None and current_tensor.device == device_of(device)
    if stays_in_place or (
        value is not None
        and dtype is not None
        and not value.is_floating_point()
        and not value.is_complex()
    ):
        dtype = None
    elif dtype is None and type(current_tensor) in (Tensor, nn.Parameter):
        dtype = current_tensor.dtype
    tensors.set_module_tensor_to_device(
        module, tensor_name, device, value, dtype, tied_params_map, non_blocking
    )
    if fp16_statistics is not None:  # of weights in 8 bits
        attrgetter(tensor_name)(module).SCB = fp16_statistics.to(device)


def _check_tensor(
    module: nn.Module, name: str, device: Any, value: Tensor | None
) -> Tensor:
    """Return the tensor of that name. Raises: ValueError for a wrong name or shape, or without a value to put in its place."""
    *path, tensor_name = name.split(".")
    owner = reduce(getattr, path, module)
    if tensor_name not in owner._parameters and tensor_name not in owner._buffers:
        raise ValueError(
            f"{owner} does not have a parameter or a buffer named {tensor_name}."
        )
    current_tensor = cast(
        "Tensor",
        owner._parameters[tensor_name]
        if tensor_name in owner._parameters
        else owner._buffers[tensor_name],
    )
    if current_tensor.device.type == "meta" and value is None and str(device) != "meta":
        raise ValueError(
            f"{tensor_name} is on the meta device, we need a `value` to put in on {device}."
        )
    if (
        value is not None
        and current_tensor.shape != value.shape
        and type(current_tensor) in (Tensor, nn.Parameter)
    ):
        raise ValueError(
            message("shape_of_tensor", value.shape, tensor_name, current_tensor.shape)
        )
    return current_tensor


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
) -> None:
    """Fill a model from a checkpoint, each weight where the map says; those for the disk are written to the folder."""
    if device_map is None and (
        broadcast_from_rank0 or any(map(is_dtensor, model.parameters()))
    ):
        _load_over_processes(
            model, Path(checkpoint), strict, full_state_dict, broadcast_from_rank0
        )
        return
    load_options = {
        "offload_buffers": offload_buffers,
        "keep_in_fp32_modules": keep_in_fp32_modules,
    }
    loaded = fill_model(
        model, checkpoint, device_map, offload_folder, dtype, strict, **load_options
    )
    _write_for_the_disk(
        model, loaded, device_map or {}, offload_folder or "", offload_buffers
    )


def _write_for_the_disk(
    model: nn.Module,
    loaded: Loaded,
    device_map: Mapping[str, Any],
    folder: Any,
    buffers: bool,
) -> None:
    """Write the weights that the map sends to the disk, with their index."""
    index: dict[str, Any] = {}
    for tensor_name, weight in OffloadedWeightsLoader(
        index=loaded.offload_index
    ).items():
        offload_weight(weight, tensor_name, folder, index)
    for tensor_name, tensor in list(
        named_module_tensors(model, buffers, recurse=True, remove_non_persistent=True)
    ):
        if (
            not tensor.is_meta
            and str(device_map.get(maps.owner_in(device_map, tensor_name) or ""))
            == "disk"
        ):
            offload_weight(tensor.detach(), tensor_name, folder, index)
            tensors.set_module_tensor_to_device(model, tensor_name, "meta")
    save_offload_index(index, folder)


def _load_over_processes(
    model: nn.Module, checkpoint: Path, strict: bool, full: bool, from_first: bool
) -> None:
    """Fill a model that is sharded, or one that gets what the first rank reads. Ranks: every rank."""
    options = dcp.StateDictOptions(
        full_state_dict=full, broadcast_from_rank0=from_first, strict=strict
    )
    if from_first and torch.distributed.get_rank() > 0:
        state: Any = {}
    else:
        state = read_model(_locate_weights(checkpoint))
    dcp.set_model_state_dict(model, state, options=options)


def fill_model(
    model: nn.Module,
    checkpoint: Any,
    device_map: Any,
    offload_folder: Any,
    dtype: Any,
    strict: bool,
    **load_options: Any,
) -> Loaded:
    """Fill a model; weights for the disk stay in the checkpoint's files where these can be mapped."""
    module_devices = device_map or {}
    if offload_folder is None and "disk" in map(str, module_devices.values()):
        raise ValueError(message("offload_needs_folder"))
    unplaced_names = []
    for tensor_name in model.state_dict():
        if device_map and maps.owner_in(module_devices, tensor_name) is None:
            unplaced_names.append(tensor_name)
    if unplaced_names:
        raise ValueError(f"{unplaced_names[0]} doesn't have any device set.")
    ties = ties_of(model)
    if device_map:
        check_tied_parameters_on_same_device(ties, device_map)
    checkpoint_path = _locate_weights(Path(checkpoint))
    options = (device_map, offload_folder, dtype if device_map else None)
    try:
        for file in weight_files(checkpoint_path):
            _check_format(file)
        loaded = load.load_checkpoint_in_model(
            model, checkpoint_path, *options, **load_options
        )
    except CheckpointError as error:
        with suppress(CheckpointError):
            _refuse_shapes(
                model,
                map(load_state_dict, weight_files(checkpoint_path)),
                device_map is None,
            )
        raise (RuntimeError if device_map is None else ValueError)(
            str(error)
        ) from error
    for tensor_name in loaded.unexpected if device_map and strict else ():
        _check_tensor(model, tensor_name, "meta", None)
    _tell_unexpected(model, loaded, checkpoint, strict)
    return loaded


def _refuse_shapes(
    model: nn.Module, states: Iterable[dict[str, Tensor]], loads_state_dict: bool
) -> None:
    """Raise torch's error, or for single weights the first one's, if shapes in the files are not the model's."""
    for state in states:
        if loads_state_dict:
            model.load_state_dict(state, strict=False)
        for tensor_name in state.keys() & model.state_dict().keys():
            _check_tensor(model, tensor_name, "meta", state[tensor_name])


def _locate_weights(checkpoint: Path) -> Path:
    """Return the file or folder to read: a folder may have one index under any name."""
    if not checkpoint.exists():
        raise ValueError(message("no_checkpoint", checkpoint))
    if checkpoint.is_file() or any(
        (checkpoint / file_name).is_file()
        for file_name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
    ):
        return checkpoint
    index_files = sorted(checkpoint.glob("*.index.json"))
    if not index_files:
        raise ValueError(
            message("no_weights_in_folder", checkpoint, WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
        )
    if len(index_files) > 1:
        raise ValueError(
            f"{checkpoint} containing more than one `.index.json` file, delete the irrelevant ones."
        )
    return index_files[0]


def _tell_unexpected(
    model: nn.Module, loaded: Loaded, checkpoint: Any, strict: bool
) -> None:
    names = loaded.unexpected
    kind = type(model).__name__
    if names and strict:
        listed = ", ".join(f'"{tensor_name}"' for tensor_name in names)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {kind}:\n\tUnexpected key(s) in state_dict: {listed}. "
        )
    if names:
        logger.warning(message("weights_not_used", checkpoint, kind, set(names)))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: Any
) -> None:
    for weight_name, weight in OffloadedWeightsLoader(
        save_folder=offload_folder, index=index or {}
    ).items():
        set_module_tensor_to_device(model, weight_name, "cpu", weight)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state of a model on the CPU, offloaded parts from where they rest."""
    state = dict(model.state_dict())
    for tensor_name, tensor in list(state.items()):
        if tensor.is_meta:
            owner, _, last = tensor_name.rpartition(".")
            with align_module_device(model.get_submodule(owner), torch.device("cpu")):
                state[tensor_name] = (
                    getattr(model.get_submodule(owner), last).detach().clone()
                )
    host_state = {}
    for tensor_name, tensor_or_state in state.items():
        if isinstance(tensor_or_state, Tensor):
            host_state[tensor_name] = tensor_or_state.to("cpu")
        else:
            host_state[tensor_name] = tensor_or_state
    return host_state


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Any = "cpu",
) -> dict[str, Any]:
    root = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for tensor_name, tensor in module.state_dict().items():
            key = f"{root}.{tensor_name}" if root else tensor_name
            if key in state_dict:
                state_dict[key] = tensor.detach().to(device_to_put_offload)
    return state_dict


def load_state_dict(checkpoint_file: Any, device_map: Any = None) -> dict[str, Tensor]:
    _check_format(Path(checkpoint_file))
    state = read_model(checkpoint_file)
    if device_map is None:
        return state
    weight_devices = {}
    for weight_name in state:
        weight_devices[weight_name] = device_map.get(
            maps.owner_in(device_map, weight_name) or "", "cpu"
        )
    placed_weights = {}
    for weight_name, weight in state.items():
        placed_weights[weight_name] = weight.to(
            device_of(
                "cpu"
                if weight_devices[weight_name] == "disk"
                else weight_devices[weight_name]
            )
        )
    return placed_weights


def _check_format(file: Path) -> None:
    """Raise for a safetensors file of another framework; warn if the file does not say."""
    if file.suffix != ".safetensors":
        return
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    if metadata is None:
        logger.warning(message("no_metadata", file))
    elif (kind := metadata.get("format")) not in ("pt", "tf", "flax"):
        raise OSError(message("no_valid_metadata", file))
    elif kind != "pt":
        raise ValueError(
            f"The checkpoint passed was saved with {kind}, we need a the pt format."
        )


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: list[str]
) -> dict[str, Tensor]:
    submodule_tensors = {}
    for submodule_name in submodule_names:
        for key, tensor in state_dict.items():
            if f"{key}.".startswith(f"{submodule_name}."):
                submodule_tensors[key] = tensor
    return submodule_tensors


def has_offloaded_params(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def align_module_device(
    module: nn.Module, execution_device: Any = None
) -> AbstractContextManager[None]:
    """Return a block in which a module's parameters are on a device: the given one, or that of its hook."""
    if execution_device is None and has_offloaded_params(module):
        execution_device = cast("Any", module)._hf_hook.execution_device
    if (hook := offloading_hook(module)) is not None:
        return hook.brought_weights(
            module, None if execution_device is None else device_of(execution_device)
        )
    return tensors.align_module_device(module, execution_device)


def get_grad_scaler(
    distributed_type: Any = None, **kwargs: Any
) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(ambient.device().type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return a block under autocast in the current precision, or torch's own; one that does nothing without `native_amp`."""
    if not native_amp:
        return nullcontext()
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
    dtype = dtypes.get(ambient.AMBIENT.whole.get("_mixed_precision", "no"))
    if autocast_kwargs is None:
        kwargs = {}
    else:
        kwargs = autocast_kwargs.to_kwargs()
    return torch.autocast(ambient.device().type, dtype, **kwargs)
