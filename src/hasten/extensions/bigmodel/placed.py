"""Forwards of dispatched modules, which move inputs to the module's device and fetch streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hasten.errors import DeviceError
from hasten.extensions.bigmodel.packs import Pack
from hasten.extensions.bigmodel.stream import Streamer
from hasten.modules import forwarding
from hasten.trees import map_tensors, tensors


@dataclass(frozen=True, slots=True)
class _WeightReference:
    """Reference to a weight that backward will need: its pack, and its layout there."""

    pack: Pack
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedWeights:
    """Saved-tensor hooks that fetch streamed weights again for backward, when their memory holds other weights."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def saved_tensor_hooks(self) -> saved_tensors_hooks:
        """Context manager for a forward whose weights leave the device afterwards."""
        return saved_tensors_hooks(self._pack_tensor, self._unpack_value)

    def _pack_tensor(self, tensor: Tensor) -> Any:  # Any: the value that autograd saves
        if not self._streamer.holds_tensor(tensor):
            return tensor
        pack_and_offset = self._streamer.locate_tensor(tensor)
        if pack_and_offset is None:
            return tensor.clone()
        return _WeightReference(
            pack_and_offset[0],
            pack_and_offset[1],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _unpack_value(
        self, saved_value: Any
    ) -> Tensor:  # Any: the value that autograd saved
        if not isinstance(saved_value, _WeightReference):
            saved_tensor: Tensor = saved_value
            return saved_tensor
        with (
            torch.no_grad(),
            self._streamer.looking_into(saved_value.pack) as pack_memory,
        ):
            element_bytes = saved_value.dtype.itemsize
            pack_bytes = pack_memory[saved_value.offset :]
            typed_elements = pack_bytes[
                : pack_bytes.numel() // element_bytes * element_bytes
            ].view(saved_value.dtype)
            return torch.as_strided(
                typed_elements,
                saved_value.shape,
                saved_value.stride,
                typed_elements.storage_offset(),
            ).data


# Any in this file: a module's arguments and outputs.
_MOVES: Final = ("to", "cuda")


def move_tensors(
    tree: Any, device: torch.device, skip_keys: Collection[str] = ()
) -> Any:
    """Return the tree with its tensors on `device`, or the tree itself if they are there already.

    Values under `skip_keys`, at any depth of nested dicts, are left where they are.
    """
    if all(tensor.device == device for tensor in tensors(tree)):
        return tree
    if skip_keys and isinstance(tree, dict):
        moved_tree = copy(tree)
        for key in moved_tree.keys() - set(skip_keys):
            moved_tree[key] = move_tensors(tree[key], device, skip_keys)
        return moved_tree
    # an asynchronous copy to the host could be read before it is complete
    non_blocking = device.type != "cpu"
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=non_blocking), tree
    )


class PlacedForward(forwarding.Forward):
    """Forward on one device: its inputs are moved there, and its outputs back if requested."""

    tag = forwarding.PLACED

    def __init__(
        self,
        device: torch.device,
        skip_keys: Collection[str] = (),
        return_to_input: bool = False,
    ) -> None:
        self.device = device
        self.skip_keys = frozenset(skip_keys)
        self.return_to_input = return_to_input

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on the device."""
        return move_tensors(args, self.device), move_tensors(
            kwargs, self.device, self.skip_keys
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first_input = None
        if self.return_to_input:
            first_input = next(iter(tensors((args, kwargs))), None)
        args, kwargs = self.inputs(args, kwargs)
        forward_output = self.inner(*args, **kwargs)
        if first_input is not None and not first_input.is_meta:
            forward_output = move_tensors(
                forward_output, first_input.device, self.skip_keys
            )
        return forward_output


class StreamedForward(PlacedForward):
    """Forward whose weights are copied to the device just before, while earlier modules compute."""

    tag = forwarding.STREAMED

    def __init__(
        self, streamer: Streamer, index: int, skip_keys: Collection[str] = ()
    ) -> None:
        super().__init__(streamer.device, skip_keys)
        self.streamer = streamer
        self.index = index
        # compilers skip this call; the module's forward inside may be compiled
        disable: Callable[..., Any] = torch.compiler.disable  # torch leaves it untyped
        self._run = disable(self._fetch_weights, recursive=False)
        self._acquire = disable(streamer.acquire_unit)
        self._release = disable(streamer.release_unit)
        self._owned = disable(self._copy_views)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _fetch_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._acquire(self.index)
        try:
            args, kwargs = self.inputs(args, kwargs)
            records_gradients = torch.is_grad_enabled()
            saved_weights = SavedWeights(self.streamer)
            with (
                saved_weights.saved_tensor_hooks()
                if records_gradients
                else nullcontext()
            ):
                forward_output = self.inner(*args, **kwargs)
            return self._owned(forward_output)
        finally:
            self._release(self.index)

    def _copy_views(self, forward_output: Any) -> Any:
        """Return the output, with copies of views of weights that are about to be overwritten."""
        if not any(map(self.streamer.holds_tensor, tensors(forward_output))):
            return forward_output
        return map_tensors(
            lambda tensor: (
                tensor.clone() if self.streamer.holds_tensor(tensor) else tensor
            ),
            forward_output,
        )


def streamers_of(model: nn.Module) -> list[Streamer]:
    """Return every streamer in a model or its submodules."""
    streamers_by_id: dict[int, Streamer] = {}
    for module in model.modules():
        forward = forwarding.find(module, StreamedForward.tag)
        if isinstance(forward, StreamedForward):
            streamers_by_id.setdefault(id(forward.streamer), forward.streamer)
    return list(streamers_by_id.values())


def end_dispatch(model: nn.Module) -> bool:
    """Remove placement and streaming from a model and its submodules; weights stay at rest. Returns True if there was any."""
    streamers = streamers_of(model)
    was_dispatched = bool(streamers)
    for streamer in streamers:
        streamer.close()
        for unit in streamer.units:
            forwarding.restore(unit.module, StreamedForward.tag)
    for module in model.modules():
        was_dispatched = forwarding.restore(module, PlacedForward.tag) or was_dispatched
        for name in _MOVES:
            if isinstance(module.__dict__.get(name), Immovable):
                del module.__dict__[name]
    return was_dispatched


class Immovable:
    """Replacement for `to` and `cuda` of a dispatched model, which cannot be moved as a whole."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a copy of the model, or one that was dispatched again
        if not forwarding.is_dispatched(self.model):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        raise DeviceError(
            f"You can't move a model that was dispatched by a device map (.{self.name}()); its inputs would still be moved to the devices "
            "of the map. Take the hooks off first: remove_hook_from_submodules(model)."
        )


def keep_in_place(model: nn.Module) -> None:
    """Make `to` and `cuda` of the model raise until it is detached."""
    for name in _MOVES:
        model.__dict__[name] = Immovable(model, name)
