"""Dispatch of a model: each module on its device, and modules that do not fit streamed from host memory or disk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
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
from hasten.extensions.bigmodel.packs import PackedTensor, Table, mapped_entry
from hasten.extensions.bigmodel.placed import (
    PlacedForward,
    StreamedForward,
    detach,
    keep_in_place,
    moved,
)
from hasten.extensions.bigmodel.placement_plan import readable
from hasten.extensions.bigmodel.stream import Streamer
from hasten.extensions.bigmodel.units import FoundBlocks, cut, make_units, tensors_in
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


def device_of(place: Place) -> torch.device:
    """Return the torch device of a map's entry; an integer is the index of an accelerator."""
    if isinstance(place, int):
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise PrepareError(
                f"device {place} was requested, but this machine has only the CPU; use 'cpu' or 'disk'."
            )
        return torch.device(kind.type, place)
    return torch.device(place)


def main_device_of(device_map: Mapping[str, Place]) -> torch.device:
    """Return the device on which offloaded modules compute: the first accelerator of the map, else the CPU."""
    places = [place for place in device_map.values() if str(place) not in OFFLOAD]
    return device_of(places[0]) if places else torch.device("cpu")


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
    detach(model)
    main = main_device_of(device_map) if main_device is None else device_of(main_device)
    away = ("disk",) if main.type == "cpu" else OFFLOAD
    skip = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
    owners = {name: str(place) for name, place in device_map.items()}
    streamed = {name for name, place in owners.items() if place in away}
    if state_dict:
        _fill(model, state_dict)
    on_disk = _under(model, owners, "disk", offload_buffers)
    disk = find_disk_weights(model, on_disk, offload_dir, offload_index)
    # the index may also list weights that are still to be read into host memory
    if offload_index is not None:
        others = _under(model, owners, "cpu", offload_buffers)
        waiting = [
            name
            for name in others
            if name in offload_index and tensor_of(model, name).is_meta
        ]
        disk |= find_disk_weights(model, waiting, None, offload_index)
    _refuse_empty(model, streamed, disk)
    _place(model, device_map, away, main, offload_buffers)
    places = {
        device_of(place).type
        for name, place in device_map.items()
        if name not in streamed
    }
    if streamed or force_hooks or places != {"cpu"}:
        _hook(model, device_map, streamed, main, skip)
    if streamed:
        _stream(
            model,
            owners,
            streamed,
            main,
            disk,
            _Options(offload_buffers, preload_module_classes or (), skip, resident),
        )
    return model


class _Options:
    """Options of weight streaming."""

    def __init__(
        self,
        buffers: bool,
        whole: Collection[str],
        skip: Collection[str],
        resident: float | str,
    ) -> None:
        self.buffers, self.whole, self.skip = buffers, whole, skip
        self.resident = parse_size(resident)


def _under(
    model: nn.Module, owners: Mapping[str, str], place: str, buffers: bool
) -> list[str]:
    """Return the names of parameters, and with `buffers` of buffers, that the map assigns to `place`."""
    names = (found.name for found in tensors_in(model, "", buffers))
    return [name for name in names if owners[owner_in(owners, name) or ""] == place]


def _fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace tensors on the meta device by their values in the state dict."""
    for module_name, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                value = state.get(f"{module_name}.{key}" if module_name else key)
                if tensor is not None and tensor.is_meta and value is not None:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[key] = (
                        nn.Parameter(value, tensor.requires_grad)
                        if is_parameter
                        else value
                    )


def _refuse_empty(
    model: nn.Module, streamed: Collection[str], disk: Mapping[str, Piece]
) -> None:
    empty = [name for name in meta_names(model) if disk.get(name) is None]
    if empty:
        raise PrepareError(
            f"{empty[0]} and {len(empty) - 1} more tensors of {type(model).__name__} are on the meta device, so there is "
            "nothing to dispatch. Use load_checkpoint_and_dispatch(model, folder, device_map), or give state_dict= or "
            "offload_dir= with the weights."
        )


def _place(
    model: nn.Module,
    device_map: Mapping[str, Place],
    away: Collection[str],
    main: torch.device,
    offload_buffers: bool,
) -> None:
    """Move resident tensors to their devices, and the buffers of streamed modules to the main one.

    A tensor that is shared by parts on several devices gets a copy on each; streamed parts use the one on the main device.
    """
    found = list(tensors_in(model, "", buffers=True))
    copies: dict[int, dict[torch.device, Tensor]] = {
        id(one.tensor): {} for one in found
    }
    waiting: list[FoundBlocks] = []
    for one in found:
        place = device_map[owner_in(device_map, one.name) or ""]
        streams = str(place) in away
        if streams and (isinstance(one.tensor, nn.Parameter) or offload_buffers):
            waiting.append(one)
            continue
        target = (
            main if streams else device_of("cpu" if str(place) == "disk" else place)
        )
        there = copies[id(one.tensor)]
        if target not in there:
            there[target] = (
                _copy(one.tensor, target) if there else _on(one.tensor, target)
            )
        one.table[one.key] = there[target]
    for one in waiting:
        there = copies[id(one.tensor)]
        if there and main not in there:
            there[main] = _copy(one.tensor, torch.device("cpu"))
        one.table[one.key] = there.get(main, one.tensor)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return another tensor with the values on a device."""
    if tensor.is_meta:
        return tensor
    copied = tensor.detach().to(device, copy=True)
    kind: Any = type(tensor)  # Any: a subclass with another constructor
    made: Tensor = (
        kind(copied, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else copied
    )
    return made


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; plain parameters stay the same objects."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        fresh = tensor.data.to(device)
        if type(tensor) is nn.Parameter and type(fresh) is Tensor:
            tensor.data = fresh
            return tensor
        return type(tensor)(fresh, requires_grad=tensor.requires_grad)
    return tensor.to(device)


def _hook(
    model: nn.Module,
    device_map: Mapping[str, Place],
    streamed: Collection[str],
    main: torch.device,
    skip: Collection[str],
) -> None:
    """Attach forwards that move the inputs of every module to its device, and the model's outputs to the device of its inputs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, place in device_map.items():
        if name and name not in streamed and name in modules:
            for part in _called(modules[name]):
                if forwarding.find(part, PlacedForward.tag) is None:
                    forwarding.replace(part, PlacedForward(device_of(place), skip))
    whole = device_map.get("")
    first = main if whole is None or "" in streamed else device_of(whole)
    if forwarding.find(model, PlacedForward.tag) is None:
        forwarding.replace(model, PlacedForward(first, skip, return_to_input=True))
    keep_in_place(model)


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the module itself, or the items of a module list, which is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for child in module.children() for part in _called(child)]
    return [module]


def _stream(
    model: nn.Module,
    owners: Mapping[str, str],
    streamed: Collection[str],
    main: torch.device,
    disk: Mapping[str, Piece],
    options: _Options,
) -> None:
    def streams(name: str) -> bool:
        return owner_in(owners, name) in streamed

    found = list(tensors_in(model, "", buffers=True))
    resident = {id(one.tensor) for one in found if not streams(one.name)}
    cuts = cut(
        model,
        lambda name: streams(name) and id(tensor_of(model, name)) not in resident,
        options.buffers,
        options.whole,
    )

    def entry_of(found: FoundBlocks, places: list[tuple[Table, str]]) -> PackedTensor:
        piece = disk.get(found.name)
        to_host = owners[owner_in(owners, found.name) or ""] != "disk"
        return (
            PackedTensor(found.tensor, places)
            if piece is None
            else mapped_entry(found.tensor, places, piece, to_host)
        )

    units = make_units(cuts, entry_of)
    packs = list(dict.fromkeys(pack for unit in units for pack in unit.packs))
    pool = HostPool(main.type != "cpu")
    moving = [
        entry
        for pack in packs
        for entry in pack.entries
        if entry.piece is None or entry.to_host
    ]
    resting = sum(
        aligned_bytes(entry.num_bytes)
        for entry in moving
        if pool.adopt(entry.rest) is None
    )
    if resting:
        pool.reserve(resting)
    for pack in packs:
        pack.settle(pool)
    streamer = Streamer(main, units, options.resident)
    for index, unit in enumerate(units):
        forwarding.replace(unit.module, StreamedForward(streamer, index, options.skip))
    for one in found:
        part, _ = parent_of(model, one.name)
        placed = any(
            forwarding.find(part, tag)
            for tag in (forwarding.PLACED, forwarding.STREAMED)
        )
        if streams(one.name) and id(one.tensor) in resident and not placed:
            forwarding.replace(part, PlacedForward(main, options.skip))
    log.info(
        "%s: %s in %d blocks are streamed to %s (%s page-locked); weights use %s of device memory",
        type(model).__name__,
        readable(streamer.host_bytes),
        len(units),
        main,
        readable(pool.pinned_bytes),
        readable(streamer.device_bytes),
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
        _fill(model, state_dict)
    main = _execution_device(model, execution_device)
    options = _Options(offload_buffers, preload_module_classes or (), (), resident)
    return _offload(model, main, "cpu", {}, options)


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
    main = _execution_device(model, execution_device)
    names = [found.name for found in tensors_in(model, "", offload_buffers)]
    disk = find_disk_weights(model, names, offload_dir, None)
    options = _Options(offload_buffers, preload_module_classes or (), (), resident)
    return _offload(model, main, "disk", disk, options)


def _execution_device(model: nn.Module, device: Place | None) -> torch.device:
    if device is not None:
        return device_of(device)
    first = next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta),
        torch.device("cpu"),
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (
        first
        if first.type != "cpu" or accelerator is None
        else torch.device(accelerator.type, 0)
    )


def _offload(
    model: nn.Module,
    main: torch.device,
    place: str,
    disk: Mapping[str, Piece],
    options: _Options,
) -> nn.Module:
    detach(model)
    _refuse_empty(model, [""], disk)
    _place(model, {"": place}, [place], main, options.buffers)
    forwarding.replace(model, PlacedForward(main, return_to_input=True))
    keep_in_place(model)
    _stream(model, {"": place}, [""], main, disk, options)
    return model


# Any in this file: a module's arguments.


class CpuOffload(ModelHook):
    """Hook that moves a whole model to a device when it is called, after moving the previous model back to the host."""

    def __init__(
        self,
        execution_device: Place | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.execution_device = (
            choose_device(0) if execution_device is None else execution_device
        )
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
        earlier, device = self.prev_module_hook, device_of(self.execution_device)
        if earlier is not None and any(
            parameter.device.type != "cpu" for parameter in earlier.model.parameters()
        ):
            earlier.offload()
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)
        return moved(args, device), moved(kwargs, device)


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
