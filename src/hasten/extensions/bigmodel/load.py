"""Loading of a checkpoint into a model: each weight goes directly to its device, many files in parallel."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.export import weight_files
from hasten.checkpoint.format.formats import Piece, read_tensors
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.errors import CheckpointError, ConfigError
from hasten.extensions.bigmodel.device_map import (
    MAP_METHODS,
    DeviceKey,
    DType,
    as_dtype,
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
    owner_in,
)
from hasten.extensions.bigmodel.dispatch import (
    Place,
    device_of,
    dispatch_model,
    main_device_of,
)
from hasten.extensions.bigmodel.offload_files import save_offload_index
from hasten.extensions.bigmodel.placement_plan import format_bytes
from hasten.extensions.bigmodel.units import NamedTensor, tensors_in

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load: mismatched names, bytes, seconds, and an index of the weights that stay on the disk."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0
    offload_index: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, Place] | None = None,
    offload_folder: str | Path | None = None,
    dtype: DType = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    strict: bool = False,
    *,
    allow_pickle: bool = False,
    _leave_for_streaming: bool = False,
) -> Loaded:
    """Fill the model from a file, a folder in the Hub layout or an index of shards.

    Weights are copied directly to their device in the map, and converted to `dtype` (except modules that stay in
    fp32). Those of a model on the meta device that go to the CPU as they are become views of the mapped safetensors file, which is
    read at their first use; writing to them changes only this process's memory. Those on "disk" stay in the checkpoint's safetensors
    files; an index of them is written to `offload_folder`. Host memory holds only a few more buffers.
    Raises: CheckpointError for missing weights or other shapes; with `strict`, also for unexpected weights.
    """
    module_devices = {"": "cpu"} if device_map is None else device_map
    keep_device = device_map is None
    stored_pieces = _stored_pieces(checkpoint, allow_pickle)
    load_plan = _LoadPlan(
        as_dtype(dtype),
        tuple(keep_in_fp32_modules or ()),
        module_devices,
        keep_device,
        offload_buffers,
        _leave_for_streaming,
    )
    tensor_groups = _group_tied_tensors(model)
    mismatched_names = _compare_names(
        model, tensor_groups, stored_pieces, strict, checkpoint
    )
    offload_index: dict[str, dict[str, Any]] = {}
    file_copies: list[Copy] = []
    mapped_pieces: dict[int, Piece] = {}
    for tied_tensors in tensor_groups:
        weight_name = next(
            (
                named_tensor.name
                for named_tensor in tied_tensors
                if named_tensor.name in stored_pieces
            ),
            None,
        )
        if weight_name is None:
            continue
        path, stored_name, file_piece = stored_pieces[weight_name]
        target_dtype = load_plan.dtype_of(tied_tensors[0])
        if path.suffix == ".safetensors" and load_plan.stays_in_file(
            tied_tensors[0], file_piece.data.dtype == target_dtype
        ):
            index_entry = {
                "safetensors_file": str(path.absolute()),
                "weight_name": stored_name,
                "dtype": _dtype_name(target_dtype),
            }
            offload_index.update(
                {named_tensor.name: dict(index_entry) for named_tensor in tied_tensors}
            )
            _replace_tensors(
                tied_tensors,
                torch.empty(file_piece.data.shape, dtype=target_dtype, device="meta"),
            )
        elif (
            load_plan.stays_mapped(tied_tensors[0], file_piece)
            and id(file_piece) not in mapped_pieces
        ):
            _replace_tensors(tied_tensors, file_piece.data)
            # another weight of these values gets memory of its own
            mapped_pieces[id(file_piece)] = file_piece
        else:
            target_tensor = _target_tensor(load_plan, tied_tensors, file_piece)
            if not target_tensor.is_meta:
                file_copies.append(
                    Copy(target_tensor.detach(), file_piece.data, file_piece.file)
                )
    start_time = time.perf_counter()
    run_copies(file_copies)
    mapped_bytes = sum(file_piece.data.nbytes for file_piece in mapped_pieces.values())
    num_bytes = mapped_bytes + sum(copy.target.nbytes for copy in file_copies)
    seconds = time.perf_counter() - start_time
    if offload_index and offload_folder is not None and not _leave_for_streaming:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
        save_offload_index(offload_index, offload_folder)
    if num_bytes:
        log.info(
            "loaded %s in %.2f s (%.2f GB/s)",
            format_bytes(num_bytes),
            seconds,
            num_bytes / 1e9 / max(seconds, 1e-9),
        )
    return Loaded(
        mismatched_names[0], mismatched_names[1], num_bytes, seconds, offload_index
    )


def _stored_pieces(
    checkpoint: str | Path, allow_pickle: bool
) -> dict[str, tuple[Path, str, Piece]]:
    """Return the file, the name in it and the mapped values of every weight of a checkpoint."""
    stored_pieces: dict[str, tuple[Path, str, Piece]] = {}
    for path in weight_files(Path(checkpoint)):
        with torch.inference_mode(False):  # weights may stay views of the file
            file_content = read_tensors(path, allow_pickle)
        stored_pieces.update(
            {
                weight_name: (path, weight_name, file_piece)
                for weight_name, file_piece in file_content.pieces.items()
            }
        )
        stored_pieces.update(
            {
                alias: (path, weight_name, file_content.pieces[weight_name])
                for alias, weight_name in file_content.aliases.items()
            }
        )
    return stored_pieces


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    """Target dtypes and devices of the weights."""

    dtype: torch.dtype | None
    keep_in_fp32: tuple[str, ...]
    places: Mapping[str, Place]
    keep_device: bool
    """True if no map was given, so that tensors with a device stay there."""
    offload_buffers: bool
    streams: bool
    """True if weights that the map assigns to the CPU will be streamed from there to an accelerator."""

    def stays_in_file(self, named_tensor: NamedTensor, as_it_is: bool) -> bool:
        """Return whether a weight stays in its file, permanently or until it is read into page-locked memory."""
        device_name = str(self.places[owner_in(self.places, named_tensor.name) or ""])
        is_offloadable = self.offload_buffers or isinstance(
            named_tensor.tensor, nn.Parameter
        )
        return is_offloadable and (
            device_name == "disk"
            or (self.streams and device_name == "cpu" and as_it_is)
        )

    def stays_mapped(self, named_tensor: NamedTensor, file_piece: Piece) -> bool:
        """Return whether a weight without memory becomes a view of its file in host memory."""
        as_stored = (
            file_piece.file is not None
            and file_piece.data.dtype == self.dtype_of(named_tensor)
        )
        return (
            as_stored
            and named_tensor.tensor.is_meta
            and self.choose_device(named_tensor).type == "cpu"
        )

    def choose_device(self, named_tensor: NamedTensor) -> torch.device:
        """Return the target device of a weight."""
        if self.keep_device:
            if named_tensor.tensor.is_meta:
                return torch.device("cpu")
            return named_tensor.tensor.device
        device_key = self.places[owner_in(self.places, named_tensor.name) or ""]
        if str(device_key) == "disk":
            return torch.device("cpu")
        return device_of(device_key)

    def dtype_of(self, named_tensor: NamedTensor) -> torch.dtype:
        """Return the target dtype of a weight; only floating point weights are converted."""
        if not named_tensor.tensor.is_floating_point():
            return named_tensor.tensor.dtype
        if any(
            module_name == named_tensor.name
            or f".{module_name}." in f".{named_tensor.name}"
            for module_name in self.keep_in_fp32
        ):
            return torch.float32
        return named_tensor.tensor.dtype if self.dtype is None else self.dtype


def _group_tied_tensors(model: nn.Module) -> list[list[NamedTensor]]:
    """Return the tensors of the model's state dict, each with all its names."""
    state_keys = set(model.state_dict(keep_vars=True))
    tensor_groups: dict[int, list[NamedTensor]] = {}
    for named_tensor in tensors_in(model, "", buffers=True):
        if named_tensor.name in state_keys:
            tensor_groups.setdefault(id(named_tensor.tensor), []).append(named_tensor)
    return list(tensor_groups.values())


def _compare_names(
    model: nn.Module,
    tensor_groups: Sequence[Sequence[NamedTensor]],
    stored_pieces: Mapping[str, tuple[Path, str, Piece]],
    strict: bool,
    checkpoint: str | Path,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the missing and the unexpected names, after checking that shapes agree."""
    model_names = set()
    for tied_tensors in tensor_groups:
        for named_tensor in tied_tensors:
            model_names.add(named_tensor.name)
    missing_names = []
    for tied_tensors in tensor_groups:
        if not any(named_tensor.name in stored_pieces for named_tensor in tied_tensors):
            missing_names.append(tied_tensors[0].name)

    unexpected_names = tuple(name for name in stored_pieces if name not in model_names)
    for tied_tensors in tensor_groups:
        for named_tensor in tied_tensors:
            if named_tensor.name in stored_pieces and stored_pieces[named_tensor.name][
                2
            ].shape != tuple(named_tensor.tensor.shape):
                raise CheckpointError(
                    f"{checkpoint}: {named_tensor.name} is {stored_pieces[named_tensor.name][2].shape} in the files and "
                    f"{tuple(named_tensor.tensor.shape)} in {type(model).__name__}. Nothing was loaded. Give the files of this model."
                )
    if strict and (missing_names or unexpected_names):
        raise CheckpointError(
            f"{checkpoint}: the files lack {_list_names(missing_names)} and have {_list_names(unexpected_names)}, which {type(model).__name__} does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    if missing_names:
        log.warning(
            "%s lacks %s; these keep their values",
            checkpoint,
            _list_names(missing_names),
        )
    return tuple(missing_names), unexpected_names


def _target_tensor(
    load_plan: _LoadPlan, tied_tensors: Sequence[NamedTensor], file_piece: Piece
) -> Tensor:
    """Return memory for a weight: the model's tensor if it fits, else a new tensor that replaces it."""
    device = load_plan.choose_device(tied_tensors[0])
    dtype = load_plan.dtype_of(tied_tensors[0])
    current_tensor = tied_tensors[0].tensor
    if (
        current_tensor.device == device
        and current_tensor.dtype == dtype
        and current_tensor.is_contiguous()
        and not current_tensor.is_inference()
    ):
        return current_tensor
    with torch.inference_mode(False):
        new_tensor = torch.empty(file_piece.data.shape, dtype=dtype, device=device)
    return _replace_tensors(tied_tensors, new_tensor)


def _replace_tensors(tied_tensors: Sequence[NamedTensor], new_tensor: Tensor) -> Tensor:
    current_tensor = tied_tensors[0].tensor
    if isinstance(current_tensor, nn.Parameter):
        new_tensor = nn.Parameter(
            new_tensor,
            requires_grad=current_tensor.requires_grad
            and new_tensor.is_floating_point(),
        )
        new_tensor.__dict__.update(current_tensor.__dict__)
    for named_tensor in tied_tensors:
        named_tensor.table[named_tensor.key] = new_tensor
    return new_tensor


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, Place] | None = None,
    max_memory: Mapping[DeviceKey, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: DType = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    *,
    resident: float | str = 0,
    allow_pickle: bool = False,
) -> nn.Module:
    """Return the model with the weights of a checkpoint, every module on its device in the map.

    `device_map` is a map, or a method: "auto" and "balanced" spread the model evenly over all accelerators,
    "balanced_low_0" uses the first as little as possible, "sequential" fills one after the other. Modules that do not fit are streamed
    from host memory, then from the checkpoint's files.
    """
    module_devices = resolve_device_map(
        model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
    )
    loaded_weights = load_checkpoint_in_model(
        model,
        checkpoint,
        module_devices,
        offload_folder,
        dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        allow_pickle=allow_pickle,
        _leave_for_streaming=module_devices is not None
        and main_device_of(module_devices).type != "cpu",
    )
    if module_devices is None:
        return model
    return dispatch_model(
        model,
        module_devices,
        offload_dir=offload_folder,
        offload_index=dict(loaded_weights.offload_index) or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        resident=resident,
    )


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Place] | None,
    max_memory: Mapping[DeviceKey, float | str] | None,
    no_split: Collection[str] | str | None,
    dtype: DType,
    offload_buffers: bool,
) -> Mapping[str, Place] | None:
    """Return the given device map after checking it, or compute one by the named method."""
    if not isinstance(device_map, str):
        if device_map is not None:
            check_device_map(model, device_map)
        return device_map
    if device_map not in MAP_METHODS:
        raise ConfigError(
            f"device_map={device_map!r} is unknown; use 'auto', 'balanced', 'balanced_low_0', "
            "'sequential' or a map from names to devices."
        )
    memory_limits: Mapping[DeviceKey, float | str] | None = max_memory
    if device_map != "sequential":
        memory_limits = dict(
            get_balanced_memory(
                model,
                max_memory,
                no_split,
                dtype,
                low_zero=device_map == "balanced_low_0",
            )
        )
    return dict(
        infer_auto_device_map(
            model, memory_limits, no_split, dtype, offload_buffers=offload_buffers
        )
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list_names(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    remainder = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + remainder
