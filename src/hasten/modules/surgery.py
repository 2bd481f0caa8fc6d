"""Functions that find and replace modules inside a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the parent module of `name`, and the attribute name in it."""
    path, _, child = name.rpartition(".")
    return model.get_submodule(path), child


def swap(model: nn.Module, name: str, new_module: nn.Module) -> nn.Module:
    """Replace the module called `name` by `fresh`; returns the old module."""
    parent, child = parent_of(model, name)
    old_module = parent.get_submodule(child)
    parent.register_module(child, new_module)
    return old_module


def swap_where(
    model: nn.Module,
    is_replaced: Callable[[str, nn.Module], bool],
    make_module: Callable[[str, nn.Module], nn.Module],
) -> list[str]:
    """Replace every wanted module by `make(name, module)`; returns the names.

    A module with several names is made once and replaced under all of them. Submodules of a replaced module are
    skipped.
    """
    replaced_names: list[str] = []
    new_modules: dict[int, nn.Module] = {}
    for module_name, module in list(model.named_modules(remove_duplicate=False)):
        if (
            not module_name
            or any(module_name.startswith(f"{outer}.") for outer in replaced_names)
            or not is_replaced(module_name, module)
        ):
            continue
        if id(module) not in new_modules:
            new_modules[id(module)] = make_module(module_name, module)
        swap(model, module_name, new_modules[id(module)])
        replaced_names.append(module_name)
    return replaced_names


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the model's linear layers, in order of registration."""
    return [
        module_name
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model: modules of one class that a ModuleList or Sequential repeats."""
    blocks_by_id: dict[int, nn.Module] = {}
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        classes = {type(child) for child in module}
        if len(classes) == 1 and any(
            True for child in module for _ in child.children()
        ):
            blocks_by_id.update((id(child), child) for child in module)
    return list(blocks_by_id.values())


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.requires_grad or not trainable_only
    )


def tensor_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of `tensor`, or its bytes in `dtype`, which applies to floating point tensors only."""
    if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel() * dtype.itemsize
    return tensor.numel() * tensor.element_size()


def named_tensors(
    model: nn.Module, persistent_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer under every name it has, shared ones repeated."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for buffer_name, buffer in own_buffers(module, persistent_only):
            yield (f"{prefix}.{buffer_name}" if prefix else buffer_name), buffer


def own_buffers(
    module: nn.Module, persistent_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers registered on the module itself; with `persistent_only`, only those in its state dict."""
    for buffer_name, buffer in module.named_buffers(
        recurse=False, remove_duplicate=False
    ):
        if not persistent_only or buffer_name not in module._non_persistent_buffers_set:
            yield buffer_name, buffer


def module_bytes(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:
    """Return the bytes of each module, parameter and buffer by name; the empty name is the whole model.

    A tensor shared by two modules counts in both, and once in every module that contains both.
    """
    dtypes_by_name = special_dtypes or {}
    sizes_by_module: dict[str, dict[int, int]] = {"": {}}
    for tensor_name, tensor in named_tensors(model):
        num_bytes = tensor_bytes(tensor, dtypes_by_name.get(tensor_name, dtype))
        name_parts = tensor_name.split(".")
        for depth in range(len(name_parts) + 1):
            sizes_by_module.setdefault(".".join(name_parts[:depth]), {}).setdefault(
                id(tensor), num_bytes
            )
    return {
        tensor_name: sum(tensor_sizes.values())
        for tensor_name, tensor_sizes in sizes_by_module.items()
    }


_DROPOUTS: Final = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def may_draw(model: nn.Module) -> bool:
    """Return whether any module has a dropout rate above zero, as a layer or as an attribute passed to attention."""
    for module in model.modules():
        dropout_rates = [
            attribute
            for attribute_name, attribute in vars(module).items()
            if "drop" in attribute_name.lower() and isinstance(attribute, float)
        ]
        if isinstance(module, _DROPOUTS):
            dropout_rates.append(module.p)
        if any(dropout_rate > 0 for dropout_rate in dropout_rates):
            return True
    return False
