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
    WAYS,
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
from hasten.extensions.bigmodel.placement_plan import readable
from hasten.extensions.bigmodel.units import FoundBlocks, tensors_in

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
    places = {"": "cpu"} if device_map is None else device_map
    keep_device = device_map is None
    pieces = _stored_pieces(checkpoint, allow_pickle)
    plan = _Plan(
        as_dtype(dtype),
        tuple(keep_in_fp32_modules or ()),
        places,
        keep_device,
        offload_buffers,
        _leave_for_streaming,
    )
    groups = _groups(model)
    report = _compare(model, groups, pieces, strict, checkpoint)
    index: dict[str, dict[str, Any]] = {}
    copies: list[Copy] = []
    mapped_pieces: dict[int, Piece] = {}
    for group in groups:
        name = next((one.name for one in group if one.name in pieces), None)
        if name is None:
            continue
        path, stored, piece = pieces[name]
        wanted = plan.dtype_of(group[0])
        if path.suffix == ".safetensors" and plan.stays_in_file(
            group[0], piece.data.dtype == wanted
        ):
            info = {
                "safetensors_file": str(path.absolute()),
                "weight_name": stored,
                "dtype": _short(wanted),
            }
            index.update({one.name: dict(info) for one in group})
            _put(group, torch.empty(piece.data.shape, dtype=wanted, device="meta"))
        elif plan.stays_mapped(group[0], piece) and id(piece) not in mapped_pieces:
            _put(group, piece.data)
            # another weight of these values gets memory of its own
            mapped_pieces[id(piece)] = piece
        else:
            target = _target(plan, group, piece)
            if not target.is_meta:
                copies.append(Copy(target.detach(), piece.data, piece.file))
    started = time.perf_counter()
    run_copies(copies)
    mapped_bytes = sum(piece.data.nbytes for piece in mapped_pieces.values())
    num_bytes = mapped_bytes + sum(copy.target.nbytes for copy in copies)
    seconds = time.perf_counter() - started
    if index and offload_folder is not None and not _leave_for_streaming:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
        save_offload_index(index, offload_folder)
    if num_bytes:
        log.info(
            "loaded %s in %.2f s (%.2f GB/s)",
            readable(num_bytes),
            seconds,
            num_bytes / 1e9 / max(seconds, 1e-9),
        )
    return Loaded(report[0], report[1], num_bytes, seconds, index)


def _stored_pieces(
    checkpoint: str | Path, allow_pickle: bool
) -> dict[str, tuple[Path, str, Piece]]:
    """Return the file, the name in it and the mapped values of every weight of a checkpoint."""
    pieces: dict[str, tuple[Path, str, Piece]] = {}
    for path in weight_files(Path(checkpoint)):
        with torch.inference_mode(False):  # weights may stay views of the file
            content = read_tensors(path, allow_pickle)
        pieces.update(
            {name: (path, name, piece) for name, piece in content.pieces.items()}
        )
        pieces.update(
            {
                alias: (path, name, content.pieces[name])
                for alias, name in content.aliases.items()
            }
        )
    return pieces


@dataclass(frozen=True, slots=True)
class _Plan:
    """Target dtypes and devices of the weights."""

    dtype: torch.dtype | None
    keep_in_fp32: tuple[str, ...]
    places: Mapping[str, Place]
    keep_device: bool
    """True if no map was given, so that tensors with a device stay there."""
    offload_buffers: bool
    streams: bool
    """True if weights that the map assigns to the CPU will be streamed from there to an accelerator."""

    def stays_in_file(self, found: FoundBlocks, as_it_is: bool) -> bool:
        """Return whether a weight stays in its file, permanently or until it is read into page-locked memory."""
        place = str(self.places[owner_in(self.places, found.name) or ""])
        offloads = self.offload_buffers or isinstance(found.tensor, nn.Parameter)
        return offloads and (
            place == "disk" or (self.streams and place == "cpu" and as_it_is)
        )

    def stays_mapped(self, found: FoundBlocks, piece: Piece) -> bool:
        """Return whether a weight without memory becomes a view of its file in host memory."""
        as_stored = piece.file is not None and piece.data.dtype == self.dtype_of(found)
        return as_stored and found.tensor.is_meta and self.device(found).type == "cpu"

    def device(self, found: FoundBlocks) -> torch.device:
        """Return the target device of a weight."""
        if self.keep_device:
            return torch.device("cpu") if found.tensor.is_meta else found.tensor.device
        place = self.places[owner_in(self.places, found.name) or ""]
        return torch.device("cpu") if str(place) == "disk" else device_of(place)

    def dtype_of(self, found: FoundBlocks) -> torch.dtype:
        """Return the target dtype of a weight; only floating point weights are converted."""
        if not found.tensor.is_floating_point():
            return found.tensor.dtype
        if any(
            one == found.name or f".{one}." in f".{found.name}"
            for one in self.keep_in_fp32
        ):
            return torch.float32
        return found.tensor.dtype if self.dtype is None else self.dtype


def _groups(model: nn.Module) -> list[list[FoundBlocks]]:
    """Return the tensors of the model's state dict, each with all its names."""
    kept = set(model.state_dict(keep_vars=True))
    groups: dict[int, list[FoundBlocks]] = {}
    for found in tensors_in(model, "", buffers=True):
        if found.name in kept:
            groups.setdefault(id(found.tensor), []).append(found)
    return list(groups.values())


def _compare(
    model: nn.Module,
    groups: Sequence[Sequence[FoundBlocks]],
    pieces: Mapping[str, tuple[Path, str, Piece]],
    strict: bool,
    checkpoint: str | Path,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the missing and the unexpected names, after checking that shapes agree."""
    known = {found.name for group in groups for found in group}
    missing = tuple(
        group[0].name
        for group in groups
        if not any(found.name in pieces for found in group)
    )
    unexpected = tuple(name for name in pieces if name not in known)
    for group in groups:
        for found in group:
            if found.name in pieces and pieces[found.name][2].shape != tuple(
                found.tensor.shape
            ):
                raise CheckpointError(
                    f"{checkpoint}: {found.name} is {pieces[found.name][2].shape} in the files and "
                    f"{tuple(found.tensor.shape)} in {type(model).__name__}. Nothing was loaded. Give the files of this model."
                )
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{checkpoint}: the files lack {_few(missing)} and have {_few(unexpected)}, which {type(model).__name__} does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    if missing:
        log.warning("%s lacks %s; these keep their values", checkpoint, _few(missing))
    return missing, unexpected


def _target(plan: _Plan, group: Sequence[FoundBlocks], piece: Piece) -> Tensor:
    """Return memory for a weight: the model's tensor if it fits, else a new tensor that replaces it."""
    device, dtype, now = plan.device(group[0]), plan.dtype_of(group[0]), group[0].tensor
    if (
        now.device == device
        and now.dtype == dtype
        and now.is_contiguous()
        and not now.is_inference()
    ):
        return now
    with torch.inference_mode(False):
        fresh = torch.empty(piece.data.shape, dtype=dtype, device=device)
    return _put(group, fresh)


def _put(group: Sequence[FoundBlocks], fresh: Tensor) -> Tensor:
    now = group[0].tensor
    if isinstance(now, nn.Parameter):
        fresh = nn.Parameter(
            fresh, requires_grad=now.requires_grad and fresh.is_floating_point()
        )
        fresh.__dict__.update(now.__dict__)
    for found in group:
        found.table[found.key] = fresh
    return fresh


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
    places = work_out(
        model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
    )
    loaded = load_checkpoint_in_model(
        model,
        checkpoint,
        places,
        offload_folder,
        dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        allow_pickle=allow_pickle,
        _leave_for_streaming=places is not None
        and main_device_of(places).type != "cpu",
    )
    if places is None:
        return model
    return dispatch_model(
        model,
        places,
        offload_dir=offload_folder,
        offload_index=dict(loaded.offload_index) or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        resident=resident,
    )


def work_out(
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
    if device_map not in WAYS:
        raise ConfigError(
            f"device_map={device_map!r} is unknown; use 'auto', 'balanced', 'balanced_low_0', "
            "'sequential' or a map from names to devices."
        )
    limits: Mapping[DeviceKey, float | str] | None = max_memory
    if device_map != "sequential":
        limits = dict(
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
            model, limits, no_split, dtype, offload_buffers=offload_buffers
        )
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )
