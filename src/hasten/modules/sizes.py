"""How many parameters and bytes a model and each of its parts hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """The number of parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


def tensor_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """The bytes `tensor` takes, or would take in `dtype` (floating point tensors only change)."""
    if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel() * dtype.itemsize
    return tensor.numel() * tensor.element_size()


def named_tensors(model: nn.Module, persistent_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name it has, shared ones repeated."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in own_buffers(module, persistent_only):
            yield (f"{prefix}.{name}" if prefix else name), buffer


def own_buffers(module: nn.Module, persistent_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The buffers that the module itself has registered; with `persistent_only`, those that belong to its state."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if not persistent_only or name not in module._non_persistent_buffers_set:
            yield name, buffer


def module_bytes(
    model: nn.Module, dtype: torch.dtype | None = None, special_dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, int]:
    """The bytes of each module, parameter and buffer by name; the empty name is the whole model.

    A tensor shared by two modules counts in both, and once in every module that holds both.
    """
    special = special_dtypes or {}
    held: dict[str, dict[int, int]] = {"": {}}
    for name, tensor in named_tensors(model):
        size = tensor_bytes(tensor, special.get(name, dtype))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            held.setdefault(".".join(parts[:depth]), {}).setdefault(id(tensor), size)
    return {name: sum(sizes.values()) for name, sizes in held.items()}
