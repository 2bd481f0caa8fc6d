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
        found = list(self.module.parameters())
        if len(found) == self.num_parameters or self.resident:
            return
        self.num_parameters = len(found)
        known = {
            id(entry.rest)
            for pack in self.packs
            for entry in (*pack.entries, *pack.loose)
        }
        for parameter in found:
            if (
                id(parameter) not in known
                and parameter.device != device
                and not parameter.is_meta
            ):
                parameter.data = parameter.data.to(device)


def put_loose(entry: PackedTensor, device: torch.device) -> None:
    """Make the model use a copy of a tensor that is not plain memory, moved with `Tensor.to`."""
    moved: Any = entry.rest.detach().to(device)
    entry.put(
        nn.Parameter(moved, requires_grad=False)
        if isinstance(entry.rest, nn.Parameter)
        else moved
    )


def relist(recurrent: Sequence[nn.RNNBase]) -> None:
    """Refresh the weight lists of recurrent modules with their current weights."""
    for module in recurrent:
        module._flat_weights = [
            getattr(module, name, None) for name in module._flat_weights_names
        ]


def window(units: Sequence[Unit], streamed: Sequence[Pack], count: int) -> int:
    """Return the bytes that hold any `count` consecutive units."""
    wanted = set(streamed)
    rows = [[pack for pack in unit.packs if pack in wanted] for unit in units]
    rows = [row for row in rows if row]
    most = 0
    for start in range(len(rows)):
        near = {
            pack
            for step in range(min(count, len(rows)))
            for pack in rows[(start + step) % len(rows)]
        }
        most = max(most, sum(pack.num_bytes for pack in near))
    return most


_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
_WHOLE = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)
"""Torch modules whose forward uses the weights of submodules without calling them."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
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
    tensors: list[FoundBlocks] = field(default_factory=list)
    outer: bool = False


def tensors_in(
    module: nn.Module, prefix: str, buffers: bool, recurse: bool = True
) -> Iterator[FoundBlocks]:
    """Yield the parameters, and with `buffers` also buffers, of a module and its submodules, shared ones under every name."""
    parts = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    for path, part in parts:
        dot = ".".join(word for word in (prefix, path) if word)
        dot = f"{dot}." if dot else ""
        tables: list[Table] = (
            [part._parameters, part._buffers] if buffers else [part._parameters]  # type: ignore[list-item]
        )
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    yield FoundBlocks(dot + key, tensor, table, key)


def cut(
    model: nn.Module,
    offloaded: Callable[[str], bool],
    buffers: bool,
    whole: Collection[str] = (),
) -> list[UnitCut]:
    """Return the units of the offloaded tensors.

    Repeated blocks and modules of the classes in `whole` form one unit each; others are divided into the modules that own weights.
    """
    blocks = {id(block) for block in repeated_blocks(model)}
    seen: set[int] = set()
    found: list[UnitCut] = []

    def visit(module: nn.Module, name: str, parent: UnitCut | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        together = (
            id(module) in blocks
            or type(module).__name__ in whole
            or isinstance(module, _WHOLE)
        )
        entire = together or not any(True for _ in module.children())
        wanted = [
            one
            for one in tensors_in(module, name, buffers, recurse=entire)
            if offloaded(one.name)
        ]
        if isinstance(module, _NEVER_CALLED) and parent is not None:
            parent.tensors += wanted
            mine = parent
        else:
            mine = UnitCut(module, name, wanted, outer=not entire)
            found.append(mine)
        if not entire:
            for child_name, child in module.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name, mine)

    visit(model, "", None)
    quantized = next(
        (
            tensor.name
            for one in found
            for tensor in one.tensors
            if is_bitsandbytes(tensor.tensor)
        ),
        None,
    )
    if quantized is not None:
        raise PrepareError(
            f"{quantized} was quantized by bitsandbytes, whose weights cannot be offloaded, because their scales would not be moved. "
            "Keep them on the device, or quantize to int8 or int4 with torchao, whose weights can be offloaded."
        )
    return [one for one in found if one.tensors]


def make_units(
    cuts: list[UnitCut],
    entry_of: Callable[[FoundBlocks, list[tuple[Table, str]]], PackedTensor],
) -> list[Unit]:
    """Return the units with their packs; tensors shared by the same units form a separate pack, fetched once for all."""
    places: dict[int, list[tuple[Table, str]]] = {}
    users: dict[int, list[int]] = {}
    for number, one in enumerate(cuts):
        for tensor in one.tensors:
            where = places.setdefault(id(tensor.tensor), [])
            if not any(
                table is tensor.table and key == tensor.key for table, key in where
            ):
                where.append((tensor.table, tensor.key))
            if number not in users.setdefault(id(tensor.tensor), []):
                users[id(tensor.tensor)].append(number)
    shared: dict[tuple[int, ...], Pack] = {}
    made: dict[int, PackedTensor] = {}
    units = []
    for number, one in enumerate(cuts):
        packs: list[Pack] = []
        for tensor in one.tensors:
            group = tuple(users[id(tensor.tensor)])
            pack = shared.get(group)
            if pack is None:
                pack = shared[group] = Pack(
                    one.name if len(group) == 1 else f"shared by {len(group)} blocks"
                )
            if id(tensor.tensor) not in made:
                made[id(tensor.tensor)] = entry = entry_of(
                    tensor, places[id(tensor.tensor)]
                )
                pack.add(entry)
            if pack not in packs:
                packs.append(pack)
        recurrent = [
            part for part in one.module.modules() if isinstance(part, nn.RNNBase)
        ]
        units.append(
            Unit(
                one.module,
                one.name,
                packs,
                recurrent,
                resident=one.outer and _holds_units(one, cuts, number),
            )
        )
    return units


def _holds_units(one: UnitCut, cuts: list[UnitCut], number: int) -> bool:
    inside = {id(part) for part in one.module.modules()}
    return any(
        id(other.module) in inside
        for index, other in enumerate(cuts)
        if index != number
    )
