"""Dispatch of a model: each module on its device, and modules that do not fit streamed from host memory or disk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.export import parse_size
from hasten.checkpoint.format.formats import Piece
from hasten.errors import PrepareError
from hasten.extensions.bigmodel.device_map import (
    OFFLOAD,
    check_device_map,
    owner_in,
    tensor_of,
)
from hasten.extensions.bigmodel.offload_files import find_disk_weights
from hasten.extensions.bigmodel.packs import Pack, PackedTensor, Table, mapped_entry
from hasten.extensions.bigmodel.placed import (
    PlacedForward,
    StreamedForward,
    end_dispatch,
    keep_in_place,
    move_tensors,
)
from hasten.extensions.bigmodel.placement_plan import format_bytes
from hasten.extensions.bigmodel.stream import Streamer
from hasten.extensions.bigmodel.units import (
    NamedTensor,
    cut_into_units,
    make_units,
    tensors_in,
)
from hasten.modules import forwarding
from hasten.modules.hooks import (
    Args,
    Kwargs,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from hasten.modules.meta import meta_names
from hasten.modules.surgery import parent_of
from hasten.runtime.devices import choose_device, empty_cache
from hasten.runtime.host_pool import HostPool, aligned_bytes

log = logging.getLogger(__name__)
Place = int | str | torch.device


def device_of(device_key: Place) -> torch.device:
    """Return the torch device of a map's entry; an integer is the index of an accelerator."""
    if isinstance(device_key, int):
        tensor_class = torch.accelerator.current_accelerator()
        if tensor_class is None:
            raise PrepareError(
                f"device {device_key} was requested, but this machine has only the CPU; use 'cpu' or 'disk'."
            )
        return torch.device(tensor_class.type, device_key)
    return torch.device(device_key)


def main_device_of(device_map: Mapping[str, Place]) -> torch.device:
    """Return the device on which offloaded modules compute: the first accelerator of the map, else the CPU."""
    device_keys = []
    for device_key in device_map.values():
        if str(device_key) not in OFFLOAD:
            device_keys.append(device_key)
    return device_of(device_keys[0]) if device_keys else torch.device("cpu")


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Place],
    main_device: Place | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    *,
    resident: float | str = 0,
) -> nn.Module:
    """Return the model with every module on its device in the map.

    Inputs are moved to the modules' devices, and outputs to the device of the inputs. Modules on "cpu" (beside an accelerator) and "disk" are streamed to `main_device` while earlier modules compute;
    up to `resident` bytes of them ("8GB") stay there permanently. Weights on the disk are read from `offload_index`, whose
    entries name safetensors files, or from files in `offload_dir`; weights found in neither are written there.
    Raises: PrepareError if weights are on the meta device and no source for them is given.
    """
    check_device_map(model, device_map)
    end_dispatch(model)
    if main_device is None:
        compute_device = main_device_of(device_map)
    else:
        compute_device = device_of(main_device)
    offload_kinds = ("disk",) if compute_device.type == "cpu" else OFFLOAD
    skipped_keys = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
    device_names = {
        entry_name: str(device_key) for entry_name, device_key in device_map.items()
    }
    streamed_names = set()
    for entry_name, device_key in device_names.items():
        if device_key in offload_kinds:
            streamed_names.add(entry_name)
    if state_dict:
        _fill_meta_tensors(model, state_dict)
    on_disk = _tensors_on(model, device_names, "disk", offload_buffers)
    disk_pieces = find_disk_weights(model, on_disk, offload_dir, offload_index)
    # the index may also list weights that are still to be read into host memory
    if offload_index is not None:
        host_names = _tensors_on(model, device_names, "cpu", offload_buffers)
        unread_names = []
        for entry_name in host_names:
            if entry_name in offload_index and tensor_of(model, entry_name).is_meta:
                unread_names.append(entry_name)
        disk_pieces |= find_disk_weights(model, unread_names, None, offload_index)
    _refuse_empty(model, streamed_names, disk_pieces)
    _place_tensors(model, device_map, offload_kinds, compute_device, offload_buffers)
    resident_kinds = set()
    for entry_name in device_map.keys() - streamed_names:
        resident_kinds.add(device_of(device_map[entry_name]).type)
    if streamed_names or force_hooks or resident_kinds != {"cpu"}:
        _attach_forwards(
            model, device_map, streamed_names, compute_device, skipped_keys
        )
    if streamed_names:
        _start_streaming(
            model,
            device_names,
            streamed_names,
            compute_device,
            disk_pieces,
            _Options(
                offload_buffers, preload_module_classes or (), skipped_keys, resident
            ),
        )
    return model


class _Options:
    """Options of weight streaming."""

    def __init__(
        self,
        buffers: bool,
        whole: Collection[str],
        skipped_keys: Collection[str],
        resident: float | str,
    ) -> None:
        self.buffers = buffers
        self.whole = whole
        self.skip = skipped_keys
        self.resident = parse_size(resident)


def _tensors_on(
    model: nn.Module, device_names: Mapping[str, str], device_name: str, buffers: bool
) -> list[str]:
    """Return the names of parameters, and with `buffers` of buffers, that the map assigns to `place`."""
    tensor_names = (
        named_tensor.name for named_tensor in tensors_in(model, "", buffers)
    )
    selected_names = []
    for name in tensor_names:
        if device_names[owner_in(device_names, name) or ""] == device_name:
            selected_names.append(name)
    return selected_names


def _fill_meta_tensors(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Replace tensors on the meta device by their values in the state dict."""
    for module_name, module in model.named_modules():
        for tensor_table in (module._parameters, module._buffers):
            for tensor_key, tensor in tensor_table.items():
                loaded_tensor = state_dict.get(
                    f"{module_name}.{tensor_key}" if module_name else tensor_key
                )
                if tensor is not None and tensor.is_meta and loaded_tensor is not None:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    if is_parameter:
                        loaded_tensor = nn.Parameter(
                            loaded_tensor, tensor.requires_grad
                        )
                    tensor_table[tensor_key] = loaded_tensor


def _refuse_empty(
    model: nn.Module, streamed_names: Collection[str], disk_pieces: Mapping[str, Piece]
) -> None:
    empty_names = [name for name in meta_names(model) if disk_pieces.get(name) is None]
    if empty_names:
        raise PrepareError(
            f"{empty_names[0]} and {len(empty_names) - 1} more tensors of {type(model).__name__} are on the meta device, so there is "
            "nothing to dispatch. Use load_checkpoint_and_dispatch(model, folder, device_map), or give state_dict= or "
            "offload_dir= with the weights."
        )


def _place_tensors(
    model: nn.Module,
    device_map: Mapping[str, Place],
    offload_kinds: Collection[str],
    compute_device: torch.device,
    offload_buffers: bool,
) -> None:
    """Move resident tensors to their devices, and the buffers of streamed modules to the main one.

    A tensor that is shared by parts on several devices gets a copy on each; streamed parts use the one on the main device.
    """
    named_tensors = list(tensors_in(model, "", buffers=True))
    copies_by_tensor: dict[int, dict[torch.device, Tensor]] = {
        id(named_tensor.tensor): {} for named_tensor in named_tensors
    }
    waiting_tensors: list[NamedTensor] = []
    for named_tensor in named_tensors:
        device_key = device_map[owner_in(device_map, named_tensor.name) or ""]
        is_streamed = str(device_key) in offload_kinds
        if is_streamed and (
            isinstance(named_tensor.tensor, nn.Parameter) or offload_buffers
        ):
            waiting_tensors.append(named_tensor)
            continue
        if is_streamed:
            target_device = compute_device
        elif str(device_key) == "disk":
            target_device = torch.device("cpu")
        else:
            target_device = device_of(device_key)
        device_copies = copies_by_tensor[id(named_tensor.tensor)]
        if target_device not in device_copies:
            if device_copies:
                device_copy = _copy_to(named_tensor.tensor, target_device)
            else:
                device_copy = _move_to(named_tensor.tensor, target_device)
            device_copies[target_device] = device_copy
        named_tensor.table[named_tensor.key] = device_copies[target_device]
    for named_tensor in waiting_tensors:
        device_copies = copies_by_tensor[id(named_tensor.tensor)]
        if device_copies and compute_device not in device_copies:
            device_copies[compute_device] = _copy_to(
                named_tensor.tensor, torch.device("cpu")
            )
        named_tensor.table[named_tensor.key] = device_copies.get(
            compute_device, named_tensor.tensor
        )


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return another tensor with the values on a device."""
    if tensor.is_meta:
        return tensor
    copied_tensor = tensor.detach().to(device, copy=True)
    tensor_class: Any = type(tensor)  # Any: a subclass with another constructor
    if isinstance(tensor, nn.Parameter):
        copied_parameter: Tensor = tensor_class(
            copied_tensor, requires_grad=tensor.requires_grad
        )
    else:
        copied_parameter = copied_tensor
    return copied_parameter


def _move_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; plain parameters stay the same objects."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        moved_tensor = tensor.data.to(device)
        if type(tensor) is nn.Parameter and type(moved_tensor) is Tensor:
            tensor.data = moved_tensor
            return tensor
        return type(tensor)(moved_tensor, requires_grad=tensor.requires_grad)
    return tensor.to(device)


def _attach_forwards(
    model: nn.Module,
    device_map: Mapping[str, Place],
    streamed_names: Collection[str],
    compute_device: torch.device,
    skipped_keys: Collection[str],
) -> None:
    """Attach forwards that move the inputs of every module to its device, and the model's outputs to the device of its inputs."""
    modules_by_name = dict(model.named_modules(remove_duplicate=False))
    for module_name, device_key in device_map.items():
        if (
            module_name
            and module_name not in streamed_names
            and module_name in modules_by_name
        ):
            for called_module in _called_modules(modules_by_name[module_name]):
                if forwarding.find(called_module, PlacedForward.tag) is None:
                    forwarding.replace(
                        called_module,
                        PlacedForward(device_of(device_key), skipped_keys),
                    )
    root_device = device_map.get("")
    if root_device is None or "" in streamed_names:
        input_device = compute_device
    else:
        input_device = device_of(root_device)
    if forwarding.find(model, PlacedForward.tag) is None:
        forwarding.replace(
            model, PlacedForward(input_device, skipped_keys, return_to_input=True)
        )
    keep_in_place(model)


def _called_modules(module: nn.Module) -> list[nn.Module]:
    """Return the module itself, or the items of a module list, which is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        called_modules = []
        for child_module in module.children():
            called_modules += _called_modules(child_module)
        return called_modules
    return [module]


def _rest_in_pool(packs: Sequence[Pack], host_pool: HostPool) -> None:
    """Move the tensors that rest in host memory into the pool."""
    unpinned_bytes = 0
    for pack in packs:
        for entry in pack.entries:
            rests_in_memory = entry.piece is None or entry.to_host
            if rests_in_memory and host_pool.adopt_tensor(entry.resting_tensor) is None:
                unpinned_bytes += aligned_bytes(entry.num_bytes)
    if unpinned_bytes:
        host_pool.reserve_bytes(unpinned_bytes)
    for pack in packs:
        pack.move_to_host(host_pool)


def _start_streaming(
    model: nn.Module,
    device_names: Mapping[str, str],
    streamed_names: Collection[str],
    compute_device: torch.device,
    disk_pieces: Mapping[str, Piece],
    options: _Options,
) -> None:
    def is_streamed_name(name: str) -> bool:
        return owner_in(device_names, name) in streamed_names

    named_tensors = list(tensors_in(model, "", buffers=True))
    resident_tensors = [
        named for named in named_tensors if not is_streamed_name(named.name)
    ]
    resident_ids = {id(named.tensor) for named in resident_tensors}
    unit_cuts = cut_into_units(
        model,
        lambda name: (
            is_streamed_name(name) and id(tensor_of(model, name)) not in resident_ids
        ),
        options.buffers,
        options.whole,
    )

    def entry_of(
        named_tensor: NamedTensor, table_places: list[tuple[Table, str]]
    ) -> PackedTensor:
        file_piece = disk_pieces.get(named_tensor.name)
        to_host = (
            device_names[owner_in(device_names, named_tensor.name) or ""] != "disk"
        )
        if file_piece is None:
            return PackedTensor(named_tensor.tensor, table_places)
        return mapped_entry(named_tensor.tensor, table_places, file_piece, to_host)

    units = make_units(unit_cuts, entry_of)
    unit_packs = list(dict.fromkeys(pack for unit in units for pack in unit.packs))
    host_pool = HostPool(compute_device.type != "cpu")
    _rest_in_pool(unit_packs, host_pool)
    streamer = Streamer(compute_device, units, options.resident)
    for index, unit in enumerate(units):
        forwarding.replace(unit.module, StreamedForward(streamer, index, options.skip))
    for model_tensor in named_tensors:
        owner_module, _ = parent_of(model, model_tensor.name)
        is_placed = any(
            forwarding.find(owner_module, tag)
            for tag in (forwarding.PLACED, forwarding.STREAMED)
        )
        if (
            is_streamed_name(model_tensor.name)
            and id(model_tensor.tensor) in resident_ids
            and not is_placed
        ):
            forwarding.replace(
                owner_module, PlacedForward(compute_device, options.skip)
            )
    log.info(
        "%s: %s in %d blocks are streamed to %s (%s page-locked); weights use %s of device memory",
        type(model).__name__,
        format_bytes(streamer.host_bytes),
        len(units),
        compute_device,
        format_bytes(host_pool.pinned_bytes),
        format_bytes(streamer.device_bytes),
    )


def cpu_offload(
    model: nn.Module,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
    *,
    resident: float | str = 0,
) -> nn.Module:
    """Return the model with all weights in host memory, streamed to `execution_device` block by block.

    Up to `resident` bytes ("8GB") of blocks stay on the device.
    """
    if state_dict:
        _fill_meta_tensors(model, state_dict)
    compute_device = _execution_device(model, execution_device)
    options = _Options(offload_buffers, preload_module_classes or (), (), resident)
    return _offload_model(model, compute_device, "cpu", {}, options)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
    *,
    resident: float | str = 0,
) -> nn.Module:
    """Return the model with all weights in files of `offload_dir`, read ahead and streamed to `execution_device`.

    Weights that a safetensors file in the folder already holds are read from it; others are written once.
    """
    compute_device = _execution_device(model, execution_device)
    tensor_names = [
        named_tensor.name for named_tensor in tensors_in(model, "", offload_buffers)
    ]
    disk_pieces = find_disk_weights(model, tensor_names, offload_dir, None)
    options = _Options(offload_buffers, preload_module_classes or (), (), resident)
    return _offload_model(model, compute_device, "disk", disk_pieces, options)


def _execution_device(model: nn.Module, device: Place | None) -> torch.device:
    if device is not None:
        return device_of(device)
    weight_device = next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta),
        torch.device("cpu"),
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if weight_device.type != "cpu" or accelerator is None:
        return weight_device
    return torch.device(accelerator.type, 0)


def _offload_model(
    model: nn.Module,
    compute_device: torch.device,
    device_name: str,
    disk_pieces: Mapping[str, Piece],
    options: _Options,
) -> nn.Module:
    end_dispatch(model)
    _refuse_empty(model, [""], disk_pieces)
    _place_tensors(
        model, {"": device_name}, [device_name], compute_device, options.buffers
    )
    forwarding.replace(model, PlacedForward(compute_device, return_to_input=True))
    keep_in_place(model)
    _start_streaming(
        model, {"": device_name}, [""], compute_device, disk_pieces, options
    )
    return model


# Any in this file: a module's arguments.


class CpuOffload(ModelHook):
    """Hook that moves a whole model to a device when it is called, after moving the previous model back to the host."""

    def __init__(
        self,
        execution_device: Place | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        if execution_device is None:
            execution_device = choose_device(0)
        self.execution_device = execution_device
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
        previous_hook = self.prev_module_hook
        device = device_of(self.execution_device)
        if previous_hook is not None and any(
            parameter.device.type != "cpu"
            for parameter in previous_hook.model.parameters()
        ):
            previous_hook.offload()
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)
        return move_tensors(args, device), move_tensors(kwargs, device)


class UserCpuOffloadHook:
    """Handle of a model offloaded with `cpu_offload_with_hook`: moves it back to the host, or removes the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the host."""
        device = next(
            (parameter.device for parameter in self.model.parameters()),
            torch.device("cpu"),
        )
        self.hook.init_hook(self.model)
        empty_cache(device)

    def remove(self) -> None:
        """Remove the hook without moving the model."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Return the model, which moves from the host to the device when it is called, and a handle that moves it back.

    Chain the models of a pipeline by passing each the handle of the previous one.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
