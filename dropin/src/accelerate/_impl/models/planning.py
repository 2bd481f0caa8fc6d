"""Device maps as arithmetic: sizes of modules, limits of devices (also of those that this machine lacks), and maps from both."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from accelerate._impl.enums import CustomDtype
from accelerate._impl.environment.packages import is_mps_available
from accelerate._impl.surface.messages import message
from hasten.extensions.bigmodel import device_map as maps
from hasten.modules.names import tied_groups

# Any in this file: limits as ints and floats, dtypes that torch does not know, modules and tensors in one list.
_Part = tuple[str, Any]
logger = logging.getLogger("accelerate.utils.modeling")
_SUFFIXES = {
    "GIB": 2**30,
    "MIB": 2**20,
    "KIB": 2**10,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
}
_SPECIAL = {
    torch.bool: 1 / 8,
    CustomDtype.INT2: 1 / 4,
    CustomDtype.INT4: 1 / 2,
    CustomDtype.FP8: 1,
}
_OFFLOAD = ("cpu", "disk")
_NAMED = ("mps", "cpu", "disk")


def convert_file_size_to_int(size: float | str) -> Any:
    """Return the bytes that a size such as "5GB", "5GiB" or "5Gb" (bits) stands for; numbers stay as they are."""
    if isinstance(size, int | float) and size >= 0:
        return size
    size_match = re.fullmatch(
        r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmg]i?b)", str(size), re.IGNORECASE
    )
    if size_match is None:
        raise ValueError(message("no_size", size))
    number = int(float(size_match[1]) * _SUFFIXES[size_match[2].upper()])
    unit = size_match[2]
    if len(unit) == 2 and unit.endswith("b"):
        return number // 8
    return number


def _get_proper_dtype(dtype: Any) -> Any:
    """Return torch's dtype of a name, with or without `torch.` before it; other values as they are."""
    if isinstance(dtype, str):
        return getattr(torch, dtype.replace("torch.", ""))
    return dtype


def dtype_byte_size(dtype: Any) -> float:
    if dtype in _SPECIAL:
        return _SPECIAL[dtype]
    bits_match = re.search(r"[^\d](\d+)(_\w+)?$", str(dtype))
    if bits_match is None:
        raise ValueError(f"`dtype` is not a valid dtype: {dtype}.")
    return int(bits_match.groups()[0]) // 8


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Any = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    sizes: dict[str, Any] = defaultdict(int)
    named_tensors = list(model.named_buffers())
    if not buffers_only:
        named_tensors[:0] = model.named_parameters()
    for tensor_name, tensor in named_tensors:
        path = tensor_name.split(".")
        num_bytes = tensor.numel() * _element_width(
            tensor_name, tensor, maps.as_dtype(dtype), special_dtypes
        )
        for length in range(len(path) + 1):
            sizes[".".join(path[:length])] += num_bytes
    return sizes


def _element_width(name: str, tensor: Tensor, target_dtype: Any, special: Any) -> float:
    """Return the bytes of one element in the dtype it will have."""
    if special is not None and name in special:
        return dtype_byte_size(maps.as_dtype(special[name]))
    width = dtype_byte_size(tensor.dtype)
    if target_dtype is not None and tensor.is_floating_point():
        return min(dtype_byte_size(target_dtype), width)
    return width


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: Any = None
) -> int:
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get(
        "", 0
    )


def get_module_leaves(module_sizes: dict[str, int]) -> list[str]:
    leaf_names = []
    for module_name in module_sizes:
        if (
            not any(
                inner_name.startswith(f"{module_name}.") for inner_name in module_sizes
            )
            and module_name
        ):
            leaf_names.append(module_name)
    return leaf_names


def get_max_layer_size(
    modules: Any, module_sizes: Any, no_split_module_classes: Any
) -> tuple[int, list[str]]:
    layers: list[str] = []
    for layer_name, module in modules:
        layers.extend(
            _iterate_layers(layer_name, module, no_split_module_classes or ())
        )
    largest = max((module_sizes.get(layer_name, 0) for layer_name in layers), default=0)
    return largest, [
        layer_name
        for layer_name in layers
        if module_sizes.get(layer_name, 0) == largest
    ]


def _iterate_layers(
    name: str, module: Any, unsplit_classes: Collection[str]
) -> Iterator[str]:
    children = _named_children(module)
    if not children or type(module).__name__ in unsplit_classes:
        yield name
    for child, inner in (
        children if type(module).__name__ not in unsplit_classes else ()
    ):
        yield from _iterate_layers(f"{name}.{child}", inner, unsplit_classes)


def _named_children(module: Any) -> list[_Part]:
    if isinstance(module, nn.Module):
        return list(module.named_children())
    return []


def _split_module(
    name: str, module: Any, unsplit_classes: Collection[str]
) -> list[_Part]:
    """Return the parameters and submodules of a module that can be split, under their full names."""
    children = _named_children(module)
    if not children or type(module).__name__ in unsplit_classes:
        return []
    inner_modules = []
    for child_name, child in [*module.named_parameters(recurse=False), *children]:
        inner_modules.append((f"{name}.{child_name}", child))
    return inner_modules


def get_module_size_with_ties(
    tied_params: list[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Any,
) -> tuple[int, list[str], list[nn.Module]]:
    """Return the bytes of a module with those that share its parameters, and these modules; those placed already are left out."""
    tied_modules: list[_Part] = []
    for tied_name in tied_params:
        owner = None
        for named_module in modules_to_treat:
            if f"{tied_name}.".startswith(f"{named_module[0]}."):
                owner = named_module
                break
        if owner is not None:
            tied_modules.append(owner)
            module_size += module_sizes[owner[0]] - module_sizes[tied_name]
    return (
        module_size,
        [module_name for module_name, _ in tied_modules],
        [named_module for _, named_module in tied_modules],
    )


def _tied_outside(name: str, groups: Sequence[Sequence[str]]) -> list[str]:
    prefix = f"{name}."
    crossing = []
    for group in groups:
        if len({prefix in f"{tied_name}." for tied_name in group}) == 2:
            crossing.append(group)
    outside_names = []
    for group in crossing:
        for tied_name in group:
            if prefix not in f"{tied_name}.":
                outside_names.append(tied_name)
    return outside_names


def fallback_allocate(
    modules: list[_Part],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, Any, list[_Part]]:
    """Return the first module that fits into the limit with its name, and the other modules.

    A module that is too large is looked into, unless its class is not to be split.
    """
    limit = convert_file_size_to_int(size_limit)
    unsplit_classes = no_split_module_classes or []
    ties = tied_parameters or []
    for index, (module_name, module) in enumerate(modules):
        if (
            get_module_size_with_ties(
                _tied_outside(module_name, ties),
                module_sizes[module_name],
                module_sizes,
                modules,
            )[0]
            <= limit
        ):
            return module_name, module, [*modules[:index], *modules[index + 1 :]]
        fitting_name, fitting_module, remaining_modules = fallback_allocate(
            _split_module(module_name, module, unsplit_classes),
            module_sizes,
            limit,
            unsplit_classes,
            ties,
        )
        if fitting_name is not None:
            return (
                fitting_name,
                fitting_module,
                [*modules[:index], *remaining_modules, *modules[index + 1 :]],
            )
    return None, None, list(modules)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    sizes = compute_module_sizes(model)
    unsplit_classes = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(_whole_model(model), sizes, unsplit_classes)


def _whole_model(model: nn.Module) -> list[_Part]:
    return [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    return list(map(sorted, tied_groups(model)))


def clean_device_map(
    device_map: dict[str, Any], module_name: str = ""
) -> dict[str, Any]:
    short = maps.clean_device_map(dict(device_map), module_name)
    unchanged_entries = {}
    for name, device in device_map.items():
        if name in short:
            unchanged_entries[name] = device
    device_map.clear()
    device_map.update({**unchanged_entries, **short})
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise unless every tensor of the state dict has a device; warn about names that are no modules."""
    module_names = {tensor_name for tensor_name, _ in model.named_modules()}
    if unknown_names := [
        tensor_name for tensor_name in device_map if tensor_name not in module_names
    ]:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown_names}"
        )
    if unplaced_names := [
        tensor_name
        for tensor_name in model.state_dict()
        if maps.owner_in(device_map, tensor_name) is None
    ]:
        names = ", ".join(unplaced_names)
        raise ValueError(
            f"The device_map provided does not give any device for the following parameters: {names}"
        )


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the groups of tied names; warn if there are none although the configuration ties weights."""
    ties = find_tied_parameters(model)
    if not ties and check_tied_parameters_in_config(model):
        logger.warning(message("weights_not_tied"))
    return ties


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config, last = (
        getattr(model, "config", None),
        getattr(model, "get_output_embeddings", lambda: None),
    )
    coupled = getattr(config, "is_encoder_decoder", False) and getattr(
        config, "tie_encoder_decoder", False
    )
    return bool(
        coupled
        or (getattr(config, "tie_word_embeddings", False) and last() is not None)
    )


def check_tied_parameters_on_same_device(
    tied_params: list[list[str]], device_map: Mapping[str, Any]
) -> None:
    for group in tied_params:
        owners = {
            tied_name: maps.owner_in(device_map, tied_name) for tied_name in group
        }
        if None in owners.values():
            raise ValueError("The `device_map` does not contain the module .")
        tied_devices = {
            tied_name: device_map[owner or ""] for tied_name, owner in owners.items()
        }
        if len(set(tied_devices.values())) > 1:
            logger.warning(message("ties_apart", tied_devices))


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Return the bytes of each device in order; sizes given as text are converted in place, which transformers relies on."""
    if max_memory is None:
        return dict[Any, Any](maps.free_memory(unified=is_mps_available()))
    max_memory.update(
        {
            key: convert_file_size_to_int(size)
            for key, size in max_memory.items()
            if isinstance(size, str)
        }
    )
    numbers = sorted(key for key in max_memory if isinstance(key, int))
    present_devices = list(range(torch.accelerator.device_count()))
    for number in (number for number in numbers if number not in present_devices):
        logger.warning(
            f"Device {number} is not available, available devices are {present_devices}"
        )
    if unknown_devices := [key for key in max_memory if key not in (*numbers, *_NAMED)]:
        raise ValueError(message("unknown_devices", unknown_devices[0]))
    return {key: max_memory[key] for key in (*numbers, *_NAMED) if key in max_memory}


class _Packing:
    """Assignment of modules to devices in the model's order, one device after another."""

    def __init__(
        self,
        model: nn.Module,
        limits: Mapping[Any, Any],
        unsplit_classes: Any,
        sizes: Mapping[str, int],
    ) -> None:
        self.limits = limits
        self.sizes = sizes
        if isinstance(unsplit_classes, str):
            self.whole = [unsplit_classes]
        else:
            self.whole = unsplit_classes or []
        self.devices = [*limits, *([] if "disk" in limits else ["disk"])]
        self.gpus = [device for device in self.devices if device not in _OFFLOAD]
        if "mps" in self.gpus:
            self.reserving = ["mps"]
        else:
            self.reserving = [*self.gpus[:1], "cpu"]
        self.used: dict[Any, Any] = dict.fromkeys(self.devices, 0)
        self.least: dict[Any, Any] = {}
        self.left = dict(limits)
        self.offloaded = list[str]()
        self.places: OrderedDict[str, Any] = OrderedDict()
        self.waiting = _whole_model(model)
        self.ties = ties_of(model)
        self.fallback = self.verbose = False
        self.layer, self.largest = get_max_layer_size(self.waiting, sizes, self.whole)
        self.at = 0

    def run(self) -> None:
        while self.waiting:
            module_name, module = self.waiting.pop(0)
            self._log_line(f"\nTreating module {module_name}.")
            tied = _tied_outside(module_name, self.ties)
            if tied:
                groups = []
                for group in self.ties:
                    if not set(group).isdisjoint(tied):
                        groups.append(group)
                self._log_line(f"  Found the relevant tied param groups {groups}")
                self._log_line(
                    f"  So those parameters need to be taken into account {tied}"
                )
            joint_size, names, tied_modules = get_module_size_with_ties(
                tied, self.sizes[module_name], self.sizes, self.waiting
            )
            owners = list(zip(names, tied_modules, strict=True))
            device = self.devices[self.at]
            self.reserve = self._reserve_bytes(module_name)
            if device == "disk":
                free_bytes = None
            else:
                free_bytes = self.limits[device] - self.used[device] - self.reserve
            if free_bytes is None or joint_size <= free_bytes:
                self._put_modules(
                    [(module_name, module), *owners], joint_size, free_bytes
                )
                continue
            fits_alone = self.sizes[module_name] <= free_bytes
            subject = f"{module_name} and {names}" if fits_alone else module_name
            if fits_alone:
                size = f"needed size {joint_size}"
            else:
                size = f"module size {self.sizes[module_name]}"
            self._log_line(
                f"Not enough space on {device} to put {subject} (space available {free_bytes}, {size})."
            )
            candidates = [
                *(owners if fits_alone else ()),
                *(
                    []
                    if self.sizes[module_name] < free_bytes
                    else [(module_name, module)]
                ),
            ]
            self._split_candidate(
                (module_name, module), candidates, joint_size, free_bytes
            )

    def _log_line(self, text: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{text}\n")

    def _reserve_bytes(self, name: str) -> Any:
        """Return the bytes kept free on the current device for the largest layer that comes after the named module."""
        self.largest = [
            layer_name
            for layer_name in self.largest
            if not f"{layer_name}.".startswith(f"{name}.")
        ]
        if not self.largest:
            self._measure_layers()
        if self.devices[self.at] in self.reserving:
            return self.layer
        return 0

    def _measure_layers(self) -> None:
        modules = []
        for named_module in self.waiting:
            if isinstance(named_module[1], nn.Module):
                modules.append(named_module)
        self.layer, self.largest = get_max_layer_size(modules, self.sizes, self.whole)

    def _put_modules(
        self, named_modules: Sequence[_Part], size: Any, free_bytes: Any
    ) -> None:
        device = self.devices[self.at]
        names = [module_name for module_name, _ in named_modules]
        available = "" if free_bytes is None else f" (available={free_bytes})"
        if names[1:]:
            subject = f"{names[0]} and {names[1:]}"
        else:
            subject = f"{names[0]} (size={size})"
        self._log_line(f"Putting {subject}{available} on {device}.")
        self.used[device] += size
        if device in _OFFLOAD and isinstance(named_modules[0][1], nn.Module):
            self.offloaded.append(names[0])
        self.places.update(dict.fromkeys(names, device))
        self.waiting = [
            named_module
            for named_module in self.waiting
            if named_module[0] not in names
        ]

    def _split_candidate(
        self,
        first: _Part,
        candidates: Sequence[_Part],
        joint_size: Any,
        free_bytes: Any,
    ) -> None:
        """Replace one of the modules by what is in it; if none can be split, go to the next device."""
        queue = [first, *self.waiting]
        for candidate_name, module in candidates:
            if inside := _split_module(candidate_name, module, self.whole):
                self._log_line(f"Splitting {candidate_name}.")
                index = next(
                    number
                    for number, named_module in enumerate(queue)
                    if named_module[0] == candidate_name
                )
                self.waiting = [*queue[:index], *inside, *queue[index + 1 :]]
                self._measure_layers()
                return
        if first in candidates:
            subject = "This module cannot"
        else:
            subject = "None of the tied module can"
        self._log_line(f"{subject} be split, going to the next device.")
        self._advance_device(queue, joint_size, free_bytes)

    def _advance_device(
        self, queue: list[_Part], joint_size: Any, free_bytes: Any
    ) -> None:
        """Go to the next device, unless a later module is to be tried on this one, which is empty."""
        device = self.devices[self.at]
        self.waiting = queue
        self.least[device] = joint_size + self.reserve
        self.left[device] = free_bytes
        limit = self.limits[device] - max(
            joint_size, get_max_layer_size(queue, self.sizes, self.whole)[0]
        )
        if (
            self.fallback
            and device in self.reserving
            and not self.used[device]
            and limit >= 0
        ):
            module_name, module, remaining_modules = fallback_allocate(
                queue[1:], self.sizes, limit, self.whole, self.ties
            )
            if module_name is not None:
                self.waiting = [(module_name, module), queue[0], *remaining_modules]
                self._measure_layers()
                return
        self.at += 1

    def report(self) -> None:
        """Log the devices that got nothing, with the bytes that would have been needed."""
        empty = []
        for device, size in self.least.items():
            if not self.used[device]:
                empty.append(f"  - {device}: {size} bytes required")
        if empty:
            logger.info(message("devices_unused"), "\n".join(empty))

    def check_buffers(self, model: nn.Module, dtype: Any, special_dtypes: Any) -> None:
        """Warn if the buffers of offloaded modules, which stay on a GPU, do not fit the memory left there."""
        sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        resident_bytes = sum(
            sizes.get(buffer_name, 0) for buffer_name in self.offloaded
        )
        if self.gpus and resident_bytes > max(
            0, *(self.left[device] for device in self.gpus)
        ):
            warnings.warn(message("buffers_too_large", resident_bytes))


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: Any = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Any]:
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    packing = _Packing(
        model, get_max_memory(max_memory), no_split_module_classes, sizes
    )
    packing.fallback = fallback_allocation
    packing.verbose = verbose
    packing.run()
    packing.report()
    if not offload_buffers:
        packing.check_buffers(model, dtype, special_dtypes)
    if clean_result:
        return clean_device_map(packing.places)
    return packing.places


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: Any = None,
    low_zero: bool = False,
) -> dict[Any, Any]:
    """Return limits that spread the model evenly over the devices; `low_zero` leaves the first one to other work."""
    limits = get_max_memory(max_memory)
    gpus = [device for device in limits if device not in _OFFLOAD]
    usable_indices = [index for index, device in enumerate(gpus) if limits[device] > 0]
    if len(usable_indices) > 1:
        sizes = compute_module_sizes(model, dtype, special_dtypes)
        _spread_limits(
            limits,
            gpus,
            usable_indices,
            sizes[""],
            _device_slack(model, sizes, no_split_module_classes),
            low_zero,
        )
    elif usable_indices and max_memory is None and gpus[usable_indices[0]] != "mps":
        logger.info(message("tenth_stays_free", gpus[usable_indices[0]]))
        limits[gpus[usable_indices[0]]] *= 0.9
    return limits


def _spread_limits(
    limits: Any,
    gpus: Sequence[Any],
    usable_indices: Sequence[int],
    model_bytes: int,
    slack: int,
    leaves_first_free: bool,
) -> None:
    """Limit all devices but the last to a share; with `low`, the first to what the others leave."""
    share = model_bytes // (len(usable_indices) - leaves_first_free) + slack
    limits.update(
        {
            device: min(share, limits[device])
            for device in gpus[leaves_first_free : usable_indices[-1]]
        }
    )
    if leaves_first_free:
        limits[gpus[0]] = min(
            limits[gpus[0]],
            max(
                0,
                model_bytes
                - sum(limits[device] for device in gpus[1 : len(usable_indices)]),
            ),
        )


def _device_slack(model: nn.Module, sizes: Mapping[str, int], no_split: Any) -> int:
    """Return the bytes a device gets beyond its share, so that a module on the border fits: a quarter more than a usual one."""
    class_sizes = {}
    for layer_name in reversed(list(sizes)):
        if layer_name:
            class_sizes[type(attrgetter(layer_name)(model)).__name__] = sizes[
                layer_name
            ]
    tensors = set(get_module_leaves(dict(sizes)))
    layers = get_module_leaves(
        {
            layer_name: size
            for layer_name, size in sizes.items()
            if layer_name not in tensors
        }
    )
    mean = int(sum(sizes[layer_name] for layer_name in layers) / max(len(layers), 1))
    if isinstance(no_split, str):
        unsplit_classes = [no_split]
    else:
        unsplit_classes = no_split or []
    return int(
        1.25
        * max(
            [mean, *(class_sizes.get(layer_name, 0) for layer_name in unsplit_classes)]
        )
    )
