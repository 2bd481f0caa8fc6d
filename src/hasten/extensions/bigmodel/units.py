"""Division of a model into units: modules whose offloaded weights are fetched together, just before their forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.extensions.bigmodel.packs import Pack, PackedTensor, Table
from hasten.modules.quantized import is_bitsandbytes
from hasten.modules.surgery import repeated_blocks


@dataclass(slots=True, eq=False)
class Unit:
    """Module whose forward needs packs, with its recurrent submodules, which store lists of their weights."""

    module: nn.Module
    name: str
    packs: list[Pack]
    recurrent: list[nn.RNNBase] = field(default_factory=list)
    resident: bool = False
    """True if it contains other units, so that its tensors are in use while they stream."""
    num_parameters: int = -1
    """Number of parameters at the last check for parameters outside the packs."""

    def move_others(self, device: torch.device) -> None:
        """Move parameters that are in no pack, such as adapters added later, to the device permanently."""
        module_parameters = list(self.module.parameters())
        if len(module_parameters) == self.num_parameters or self.resident:
            return
        self.num_parameters = len(module_parameters)
        packed_ids = set()
        for pack in self.packs:
            for entry in (*pack.entries, *pack.loose):
                packed_ids.add(id(entry.resting_tensor))
        for parameter in module_parameters:
            if (
                id(parameter) not in packed_ids
                and parameter.device != device
                and not parameter.is_meta
            ):
                parameter.data = parameter.data.to(device)


def put_loose(entry: PackedTensor, device: torch.device) -> None:
    """Make the model use a copy of a tensor that is not plain memory, moved with `Tensor.to`."""
    moved: Any = entry.resting_tensor.detach().to(device)
    if isinstance(entry.resting_tensor, nn.Parameter):
        moved = nn.Parameter(moved, requires_grad=False)
    entry.replace_in_model(moved)


def refresh_weight_lists(recurrent: Sequence[nn.RNNBase]) -> None:
    """Refresh the weight lists of recurrent modules with their current weights."""
    for module in recurrent:
        flat_weights = []
        for name in module._flat_weights_names:
            flat_weights.append(getattr(module, name, None))
        module._flat_weights = flat_weights


def largest_window_bytes(
    units: Sequence[Unit], ring_packs: Sequence[Pack], count: int
) -> int:
    """Return the bytes that hold any `count` consecutive units."""
    streamed_packs = set(ring_packs)
    packs_by_unit = [
        [pack for pack in unit.packs if pack in streamed_packs] for unit in units
    ]
    packs_by_unit = [unit_packs for unit_packs in packs_by_unit if unit_packs]
    largest_bytes = 0
    for start_unit in range(len(packs_by_unit)):
        window_packs: set[Pack] = set()
        for step in range(min(count, len(packs_by_unit))):
            window_packs.update(packs_by_unit[(start_unit + step) % len(packs_by_unit)])
        largest_bytes = max(largest_bytes, sum(pack.num_bytes for pack in window_packs))
    return largest_bytes


_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
_UNDIVIDED_CLASSES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)
"""Torch modules whose forward uses the weights of submodules without calling them."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """Tensor of the model under one of its names."""

    name: str
    tensor: Tensor
    table: Table
    key: str


@dataclass(slots=True)
class UnitCut:
    """Module with the tensors that its forward needs, without those of units inside it."""

    module: nn.Module
    name: str
    tensors: list[NamedTensor] = field(default_factory=list)
    outer: bool = False


def tensors_in(
    module: nn.Module, prefix: str, buffers: bool, recurse: bool = True
) -> Iterator[NamedTensor]:
    """Yield the parameters, and with `buffers` also buffers, of a module and its submodules, shared ones under every name."""
    named_modules = (
        module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    )
    for module_path, submodule in named_modules:
        name_prefix = ".".join(word for word in (prefix, module_path) if word)
        if name_prefix:
            name_prefix = f"{name_prefix}."
        else:
            name_prefix = ""
        tables: list[Table] = [submodule._parameters]  # type: ignore[list-item]
        if buffers:
            tables.append(submodule._buffers)
        for tensor_table in tables:
            for tensor_key, tensor in tensor_table.items():
                if tensor is not None:
                    yield NamedTensor(
                        name_prefix + tensor_key, tensor, tensor_table, tensor_key
                    )


def cut_into_units(
    model: nn.Module,
    offloaded: Callable[[str], bool],
    buffers: bool,
    undivided_classes: Collection[str] = (),
) -> list[UnitCut]:
    """Return the units of the offloaded tensors.

    Repeated blocks and modules of the classes in `whole` form one unit each; others are divided into the modules that own weights.
    """
    block_ids = set(map(id, repeated_blocks(model)))
    visited_ids: set[int] = set()
    unit_cuts: list[UnitCut] = []

    def visit_module(module: nn.Module, name: str, parent_cut: UnitCut | None) -> None:
        if id(module) in visited_ids:
            return
        visited_ids.add(id(module))
        is_one_unit = (
            id(module) in block_ids
            or type(module).__name__ in undivided_classes
            or isinstance(module, _UNDIVIDED_CLASSES)
        )
        is_undivided = is_one_unit or not any(True for _ in module.children())
        offloaded_tensors = []
        for named_tensor in tensors_in(module, name, buffers, recurse=is_undivided):
            if offloaded(named_tensor.name):
                offloaded_tensors.append(named_tensor)
        if isinstance(module, _NEVER_CALLED) and parent_cut is not None:
            parent_cut.tensors += offloaded_tensors
            module_cut = parent_cut
        else:
            module_cut = UnitCut(
                module, name, offloaded_tensors, outer=not is_undivided
            )
            unit_cuts.append(module_cut)
        if not is_undivided:
            for child_name, child in module.named_children():
                visit_module(
                    child, f"{name}.{child_name}" if name else child_name, module_cut
                )

    visit_module(model, "", None)
    quantized_name = None
    for unit_cut in unit_cuts:
        for tensor in unit_cut.tensors:
            if is_bitsandbytes(tensor.tensor):
                quantized_name = quantized_name or tensor.name
    if quantized_name is not None:
        raise PrepareError(
            f"{quantized_name} was quantized by bitsandbytes, whose weights cannot be offloaded, because their scales would not be moved. "
            "Keep them on the device, or quantize to int8 or int4 with torchao, whose weights can be offloaded."
        )
    return [unit_cut for unit_cut in unit_cuts if unit_cut.tensors]


def make_units(
    unit_cuts: list[UnitCut],
    entry_of: Callable[[NamedTensor, list[tuple[Table, str]]], PackedTensor],
) -> list[Unit]:
    """Return the units with their packs; tensors shared by the same units form a separate pack, fetched once for all."""
    places_by_tensor: dict[int, list[tuple[Table, str]]] = {}
    table_keys: set[tuple[int, str]] = set()
    users_by_tensor: dict[int, list[int]] = {}
    for cut_index, unit_cut in enumerate(unit_cuts):
        for tensor in unit_cut.tensors:
            tensor_places = places_by_tensor.setdefault(id(tensor.tensor), [])
            # by identity: tables compare their tensors
            if (id(tensor.table), tensor.key) not in table_keys:
                table_keys.add((id(tensor.table), tensor.key))
                tensor_places.append((tensor.table, tensor.key))
            if cut_index not in users_by_tensor.setdefault(id(tensor.tensor), []):
                users_by_tensor[id(tensor.tensor)].append(cut_index)
    shared_packs: dict[tuple[int, ...], Pack] = {}
    entries_by_tensor: dict[int, PackedTensor] = {}
    units = []
    for cut_index, unit_cut in enumerate(unit_cuts):
        unit_packs: list[Pack] = []
        for tensor in unit_cut.tensors:
            user_indices = tuple(users_by_tensor[id(tensor.tensor)])
            pack = shared_packs.get(user_indices)
            if pack is None:
                num_users = len(user_indices)
                shared_name = f"shared by {num_users} blocks"
                pack_name = unit_cut.name if num_users == 1 else shared_name
                pack = shared_packs[user_indices] = Pack(pack_name)
            if id(tensor.tensor) not in entries_by_tensor:
                entries_by_tensor[id(tensor.tensor)] = entry = entry_of(
                    tensor, places_by_tensor[id(tensor.tensor)]
                )
                pack.add(entry)
            if pack not in unit_packs:
                unit_packs.append(pack)
        submodules = unit_cut.module.modules()
        recurrent = [module for module in submodules if isinstance(module, nn.RNNBase)]
        units.append(
            Unit(
                unit_cut.module,
                unit_cut.name,
                unit_packs,
                recurrent,
                resident=unit_cut.outer
                and _holds_units(unit_cut, unit_cuts, cut_index),
            )
        )
    return units


def _holds_units(unit_cut: UnitCut, unit_cuts: list[UnitCut], cut_index: int) -> bool:
    submodule_ids = set(map(id, unit_cut.module.modules()))
    return any(
        id(other_cut.module) in submodule_ids
        for index, other_cut in enumerate(unit_cuts)
        if index != cut_index
    )
