"""Hooks that move a module to a device, permanently or only during its forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hasten.extensions.bigmodel.dispatch import Place, device_of
from hasten.extensions.bigmodel.placed import move_tensors
from hasten.extensions.bigmodel.tensors import TiedMap, set_tensor
from hasten.extensions.bigmodel.units import tensors_in
from hasten.modules.hooks import (
    Args,
    Kwargs,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
)
from hasten.modules.surgery import named_tensors, own_buffers
from hasten.trees import tensors

# Any in this file: a module's arguments and outputs.


def _own_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype that the module has now, which `half()` may have changed; None for tensors that pack their values."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor.dtype
    return None


class AlignDevicesHook(ModelHook):
    """Hook that moves a module's inputs, and with `offload` also its weights, to a device for its forward.

    Offloaded weights are read from `weights_map`, by their names in the module; without one they are stored in host memory.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Collection[str] | None = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.original_devices: dict[str, torch.device] = {}
        self.input_device: torch.device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.tied_pointers_to_remove: set[tuple[int, torch.device]] = set()

    def __repr__(self) -> str:
        shown_settings = (
            "offload",
            "io_same_device",
            "offload_buffers",
            "place_submodules",
            "skip_keys",
        )
        settings_text = ", ".join(
            f"{setting_name}={getattr(self, setting_name)!r}"
            for setting_name in shown_settings
        )
        return f"AlignDevicesHook(execution_device={self.execution_device}, {settings_text})"

    def _execution_device(self) -> torch.device | None:
        if self.execution_device is None:
            return None
        return device_of(self.execution_device)

    def _is_skipped(self) -> Collection[str]:
        if isinstance(self.skip_keys, str):
            return [self.skip_keys]
        return self.skip_keys or ()

    def _offloaded_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that are offloaded; buffers that no state dict holds stay in place."""
        deep = self.place_submodules
        offloaded_tensors: dict[str, Tensor] = dict(
            module.named_parameters(recurse=deep, remove_duplicate=False)
        )
        if self.offload_buffers:
            offloaded_tensors.update(
                named_tensors(module, True) if deep else own_buffers(module, True)
            )
        return offloaded_tensors

    def init_hook(self, module: nn.Module) -> nn.Module:
        execution_device = self._execution_device()
        module_tensors = list(
            tensors_in(module, "", buffers=True, recurse=self.place_submodules)
        )
        if not self.offload:
            for named_tensor in module_tensors:
                if (
                    execution_device is not None
                    and named_tensor.tensor.device != execution_device
                ):
                    set_tensor(
                        module,
                        named_tensor.name,
                        execution_device,
                        tied=self.tied_params_map,
                    )
            return module
        weights = self._offloaded_weights(module)
        self.original_devices = {
            named_tensor.name: named_tensor.tensor.device
            for named_tensor in module_tensors
        }
        if self.weights_map is None:
            self.weights_map = {
                weight_name: weight.detach().to("cpu")
                for weight_name, weight in weights.items()
            }
        for weight_name, weight in weights.items():
            if not weight.is_meta and weight.data_ptr() in (self.tied_params_map or ()):
                self.tied_params_names.add(weight_name)
            set_tensor(module, weight_name, torch.device("meta"))
        for named_tensor in module_tensors:
            if execution_device is not None and named_tensor.name not in weights:
                set_tensor(module, named_tensor.name, execution_device)
        return module

    def bring_weights(
        self, module: nn.Module, device: torch.device | None = None
    ) -> None:
        """Move the offloaded weights to the device."""
        assert self.weights_map is not None, "the hook was attached"
        target_device = device or self._execution_device() or torch.device("cpu")
        for weight_name, current_weight in self._offloaded_weights(module).items():
            stored_weight = self.weights_map[weight_name]
            if (
                self.tied_params_map is not None
                and target_device
                not in self.tied_params_map.get(
                    stored_weight.data_ptr(), {target_device: stored_weight}
                )
            ):
                self.tied_pointers_to_remove.add(
                    (stored_weight.data_ptr(), target_device)
                )
            set_tensor(
                module,
                weight_name,
                target_device,
                stored_weight,
                _own_dtype(current_weight),
                tied=self.tied_params_map,
            )

    def take_away(self, module: nn.Module) -> None:
        """Release the device memory of offloaded weights."""
        for weight_name in self._offloaded_weights(module):
            set_tensor(module, weight_name, torch.device("meta"))
        for memory, device in self.tied_pointers_to_remove:
            assert self.tied_params_map is not None, "pointers come from this map"
            self.tied_params_map[memory].pop(device, None)
        self.tied_pointers_to_remove.clear()

    @contextmanager
    def brought_weights(
        self, module: nn.Module, device: torch.device | None = None
    ) -> Iterator[None]:
        """Context manager in which the weights are on the device; changes are stored if `weights_map` is writable."""
        self.bring_weights(module, device)
        try:
            yield
        finally:
            if isinstance(self.weights_map, dict):
                for weight_name, weight in self._offloaded_weights(module).items():
                    if not weight.is_meta:
                        self.weights_map[weight_name] = weight.detach().to("cpu")
            self.take_away(module)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Args, Kwargs]:
        if self.io_same_device:
            self.input_device = next(
                (tensor.device for tensor in tensors((args, kwargs))), None
            )
        if self.offload:
            self.bring_weights(module)
        execution_device = self._execution_device()
        if execution_device is None:
            return args, kwargs
        return move_tensors(args, execution_device), move_tensors(
            kwargs, execution_device, self._is_skipped()
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self.take_away(module)
        if self.io_same_device and self.input_device is not None:
            output = move_tensors(output, self.input_device, self._is_skipped())
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload and self.weights_map is not None:
            weights = self._offloaded_weights(module)
            for weight_name, device in self.original_devices.items():
                current_tensor = attrgetter(weight_name)(module)
                if weight_name in weights or current_tensor.is_meta:
                    stored_weight = self.weights_map.get(weight_name)
                else:
                    stored_weight = None
                if device.type != "meta" or stored_weight is not None:
                    if device.type != "meta":
                        original_device = device
                    else:
                        original_device = torch.device("cpu")
                    set_tensor(
                        module,
                        weight_name,
                        original_device,
                        stored_weight,
                        _own_dtype(current_tensor),
                    )
        return module


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that brings the module's weights to a device for its forward, or None."""
    hook = hook_of(module)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    for module_hook in hooks:
        if isinstance(module_hook, AlignDevicesHook) and module_hook.offload:
            return module_hook
    return None


class PrefixedDataset(Mapping[str, Tensor]):
    """Entries of a mapping whose names begin with a prefix, accessed without the prefix."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach an AlignDevicesHook to every submodule that directly owns weights.

    Submodules of `preload_module_classes` get a single hook for all weights they contain.
    """
    is_one_unit = offload and type(module).__name__ in (preload_module_classes or ())
    if is_one_unit or any(
        True for _ in tensors_in(module, "", buffers=True, recurse=False)
    ):
        weights = None
        if weights_map is not None:
            weights = PrefixedDataset(
                weights_map, f"{module_name}." if module_name else ""
            )
        hook = AlignDevicesHook(
            execution_device,
            offload,
            False,
            weights,
            offload_buffers,
            is_one_unit,
            skip_keys,
            tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    hook_options = (skip_keys, preload_module_classes, tied_params_map)
    for child_name, child in () if is_one_unit else module.named_children():
        path = f"{module_name}.{child_name}" if module_name else child_name
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            path,
            *hook_options,
        )


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks that move a module, its submodules and their inputs to a device; modules that have a hook keep it."""
    if hook_of(module) is None and module.state_dict():
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook, append=True)
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(
                child,
                execution_device,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks to the submodules named in the maps, which give their devices and whether their weights are offloaded."""
    hook_options = (skip_keys, preload_module_classes, tied_params_map)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        _attach_by_map(
            module,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            module_name,
            *hook_options,
        )
    elif offload:
        attach_align_device_hook(
            module,
            execution_device,
            True,
            weights_map,
            offload_buffers,
            module_name,
            *hook_options,
        )
    else:
        hook = AlignDevicesHook(
            execution_device,
            io_same_device=True,
            skip_keys=skip_keys,
            place_submodules=True,
        )
        add_hook_to_module(module, hook)


def _attach_by_map(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None,
    offload: bool | Mapping[str, bool],
    weights_map: Mapping[str, Tensor] | None,
    offload_buffers: bool,
    module_name: str,
    skip_keys: str | Collection[str] | None,
    preload_module_classes: Collection[str] | None,
    tied_params_map: TiedMap | None,
) -> None:
    hook_options = (skip_keys, preload_module_classes, tied_params_map)
    devices = (
        execution_device
        if isinstance(execution_device, Mapping)
        else dict.fromkeys(offload, execution_device)  # type: ignore[arg-type]
    )
    if isinstance(offload, Mapping):
        offloaded_modules = offload
    else:
        offloaded_modules = dict.fromkeys(devices, offload)
    for submodule_name, submodule in list(module.named_modules()):
        if submodule_name not in devices or submodule_name not in offloaded_modules:
            continue
        module_device = devices[submodule_name]
        if offloaded_modules[submodule_name]:
            full_name = ".".join(word for word in (module_name, submodule_name) if word)
            attach_align_device_hook(
                submodule,
                module_device,
                True,
                weights_map,
                offload_buffers,
                full_name,
                *hook_options,
            )
        if hook_of(submodule) is None or not offloaded_modules[submodule_name]:
            hook = AlignDevicesHook(
                module_device,
                io_same_device=submodule_name == "",
                offload_buffers=offload_buffers
                and not offloaded_modules[submodule_name],
                place_submodules=not offloaded_modules[submodule_name],
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(
                submodule,
                hook,
                append=not isinstance(hook_of(submodule), AlignDevicesHook),
            )
        if module_device is not None:
            if offloaded_modules[submodule_name]:
                preloaded_classes = preload_module_classes
            else:
                preloaded_classes = None
            attach_execution_device_hook(
                submodule, module_device, skip_keys, preloaded_classes, tied_params_map
            )
    if "" not in devices or "" not in offloaded_modules:
        hook = AlignDevicesHook(
            devices.get(""),
            io_same_device=True,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
