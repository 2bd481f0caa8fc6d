"""Models in the Hub layout: one safetensors file, or shards with an index, each file replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hasten.checkpoint.base import Blob, Component, Format, Slice
from hasten.checkpoint.format.formats import (
    as_stored,
    encode_safetensors,
    load_torch,
    read_tensors,
)
from hasten.checkpoint.format.manifest import (
    FORGED,
    MANIFEST_NAME,
    open_outside,
    read_outside,
    resolve_inside,
)
from hasten.checkpoint.reshard import join_pieces
from hasten.checkpoint.save import FileLayout, encode_file, hub_index, plan_component
from hasten.checkpoint.state_dicts import LoadReport, first_names, names_of_other_stages
from hasten.checkpoint.store.disk import Disk, cannot_write, write_files
from hasten.checkpoint.store.local_store import check_local, check_path, temporary_draft
from hasten.checkpoint.store.occupied import (
    check_no_checkpoint,
    check_unlisted,
    exported_weights,
)
from hasten.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    OtherModelError,
)
from hasten.modules.names import is_dtensor, local_tensor, plain_name

_UNIT_BYTES = (
    *(("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)),
    *(("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12), ("B", 1)),
)


def parse_size(size: float | str) -> int:
    """Return a number of bytes from "10GB" (decimal), "10GiB" (binary) or a number, fractions allowed.

    Raises: ConfigError for anything else, and for a negative size.
    """
    num_bytes = float("nan")
    if isinstance(size, int | float) and not isinstance(size, bool):
        num_bytes = size
    elif isinstance(size, str):
        size_text = size.strip()
        number_text, unit_bytes = next(
            (
                (size_text.removesuffix(unit), unit_size)
                for unit, unit_size in _UNIT_BYTES
                if size_text.endswith(unit)
            ),
            ("", 1),
        )
        with suppress(ValueError):
            num_bytes = float(number_text) * unit_bytes
    if not 0 <= num_bytes < 2**63:
        raise ConfigError(
            f"{size!r} is not a file size: bytes from 0 on are counted; write it as 10GB, 500MB or 2GiB, or give a number of bytes."
        )
    return int(num_bytes)


def save_model(
    # Any: tensors, and extra state that Hub files do not hold
    state: Mapping[str, Any],
    folder: str | Path,
    max_shard_size: float | str = "10GB",
    safe_serialization: bool = True,
    disk: Disk | None = None,
) -> list[str]:
    """Write a model's weights in the Hub layout; return the file names. Ranks: main only.

    Tied weights are stored once, under their first name; the other names are stored in the file's metadata.
    Raises: CheckpointError for tensors that are not whole.
    """
    model_folder = check_local(folder, "save_model(save_directory)")
    if model_folder.exists() and not model_folder.is_dir():
        raise ConfigError(
            f"{folder} is a file, and a model is written to a folder; give the name of a folder."
        )
    max_file_bytes = parse_size(max_shard_size)
    if max_file_bytes < 1:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} leaves no room for a single byte in a file; set it to a size such as 5GB, or leave it out."
        )
    tensors = {
        tensor_name: as_stored(tensor)
        for tensor_name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }
    extra_names = sorted(
        tensor_name
        for tensor_name, tensor in state.items()
        if not isinstance(tensor, Tensor)
    )
    if extra_names:
        raise CheckpointError(
            f"the model has extra state ({', '.join(extra_names[:3])}) that the Hub layout cannot hold, and it would be lost. "
            "Use save_state, or remove these entries from the state dict."
        )
    file_format: Format = "safetensors" if safe_serialization else "torch"
    component = Component(tensors, None, "model", file_format)
    if component.sliced:
        raise CheckpointError(
            "the weights are sharded over ranks; gather them with accelerator.get_state_dict first."
        )
    file_plans = plan_component(
        "model", component, 0, (0,), FileLayout(max_file_bytes, max_file_bytes)
    )
    blobs = {
        file_plan.name: encode_file(component, file_plan) for file_plan in file_plans
    }
    if len(file_plans) > 1:
        end = "safetensors" if safe_serialization else "bin"
        stem = "model" if safe_serialization else "pytorch_model"
        blobs[f"{stem}.{end}.index.json"] = hub_index(file_plans, component)
    replace_model_files(model_folder, blobs, disk or Disk())
    return list(blobs)


def replace_model_files(folder: Path, blobs: Mapping[str, Blob], disk: Disk) -> None:
    """Replace the model in a folder: write new files into a draft, then rename each into place.

    An interruption leaves the old model, the new one, or an incomplete one, but no mixture of two: the index of shards goes
    first and comes last.
    Raises: CheckpointError when the folder holds a checkpoint, or is not writable.
    """
    check_no_checkpoint(folder)
    with (
        _explaining_errors(folder, "the model", blobs),
        temporary_draft(folder, disk) as draft_folder,
    ):
        write_files(draft_folder, blobs, disk)
        outdated_names = set(exported_weights(folder)) - blobs.keys()
        index_names = [file_name for file_name in blobs if file_name.endswith(".json")]
        for file_name in index_names:
            disk.remove_file(folder / file_name)
        for file_name in (*sorted(blobs.keys() - set(index_names)), *index_names):
            disk.rename(draft_folder / file_name, folder / file_name)
        for file_name in sorted(outdated_names):
            disk.remove_file(folder / file_name)
        disk.sync_folder(folder)


@contextmanager
def _explaining_errors(
    folder: Path, description: str, blobs: Mapping[str, Blob]
) -> Iterator[None]:
    """Context manager that raises CheckpointError in place of an OSError, and names the disk when it is full."""
    try:
        yield
    except OSError as error:
        raise cannot_write(
            description, folder, sum(blob.size for blob in blobs.values()), error
        ) from error


def read_model(folder: str | Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Return all weights of an exported folder or of a checkpoint's model, memory-mapped, under all their names.

    Raises: a subclass of CheckpointError.
    """
    check_path(folder, "load_model(directory)")
    model_folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for weight_file in weight_files(model_folder):
        tensor_file = read_tensors(weight_file, allow_pickle)
        for tensor_name, piece in tensor_file.pieces.items():
            tensors[tensor_name] = join_pieces([piece], tensor_name)
        aliases.update(tensor_file.aliases)
    for alias, tensor_name in aliases.items():
        if tensor_name not in tensors:
            raise CorruptCheckpointError(
                f"{model_folder}: {alias} is another name of {tensor_name}, which is in no file, so the model is not whole. Nothing was loaded; "
                "use another copy of the model."
            )
        tensors[alias] = tensors[tensor_name]
    return tensors


def weight_files(model_path: Path) -> list[Path]:
    """Return the files that hold a model's weights, given a folder, an index of shards, or a single file.

    Raises: IncompleteCheckpointError when there are none, CorruptCheckpointError for an invalid index.
    """
    if model_path.suffix == ".json":
        return _read_index(model_path.parent, model_path)
    if model_path.is_file():
        return [model_path]
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (model_path / f"{stem}.{suffix}").is_file():
            return [resolve_inside(model_path, f"{stem}.{suffix}")]
        index_path = model_path / f"{stem}.{suffix}.index.json"
        if index_path.is_file():
            return _read_index(model_path, index_path)
    raise IncompleteCheckpointError(
        f"{model_path} holds no model.safetensors or pytorch_model.bin, nor an index of shards. Give the folder of a model."
    )


def _read_index(model_folder: Path, index_path: Path) -> list[Path]:
    try:
        index_table = json.loads(read_outside(index_path))
        file_names = sorted(
            set(
                (
                    index_table["weight_map"]
                    if "metadata" in index_table
                    else index_table.get("weight_map", index_table)
                ).values()
            )
        )
        file_paths = [
            resolve_inside(model_folder, file_name) for file_name in file_names
        ]
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(
            f"{index_path} does not exist; give the folder or index of a model."
        ) from error
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{index_path}: not an index of weight files ({type(error).__name__}: {error}). Nothing was loaded; use another copy of the model."
        ) from error
    missing_names = [
        file_path.name for file_path in file_paths if not file_path.is_file()
    ]
    if missing_names:
        raise IncompleteCheckpointError(
            f"{model_folder}: {', '.join(missing_names[:4])} of the index are missing, so the model is not whole. Nothing was loaded; copy all its files."
        )
    return file_paths


def save_object(
    obj: Any,
    file: str | Path,
    safe_serialization: bool = False,
    disk: Disk | None = None,
) -> None:
    """Write an object with torch.save (or a flat dict of tensors as safetensors), replacing the file atomically.

    Ranks: main only (or one per machine).
    """
    target_path = check_local(file, "save(f)").absolute()
    if target_path.is_dir():
        raise ConfigError(
            f"save(f) got {target_path}, which is a folder, and an object is written to one file; add a file name."
        )
    if target_path.exists() and not target_path.is_file():
        raise ConfigError(
            f"save(f) got {target_path}, which is a device or a pipe, and saving would replace it with a file; give another name."
        )
    target_disk = disk or Disk()
    if safe_serialization:
        if not isinstance(obj, Mapping) or not all(
            isinstance(tensor, Tensor) for tensor in obj.values()
        ):
            raise ConfigError(
                "safe_serialization=True needs a flat dict of tensors; give one, or set it to False."
            )
        if (
            sharded_name := next(
                (
                    tensor_name
                    for tensor_name, tensor in obj.items()
                    if is_dtensor(tensor)
                ),
                None,
            )
        ) is not None:
            raise ConfigError(
                f"{sharded_name} is a part of a sharded tensor, which only this rank holds. Give the whole tensors: "
                "accelerator.get_state_dict(model)."
            )
        blob = encode_safetensors(
            {str(tensor_name): tensor for tensor_name, tensor in obj.items()}
        )
        replace_files_only(target_path.parent, {target_path.name: blob}, target_disk)
        return
    check_unlisted(target_path.parent, [target_path.name])
    with (
        _explaining_errors(target_path.parent, target_path.name, {}),
        temporary_draft(target_path.parent, target_disk) as draft_folder,
    ):
        with (draft_folder / target_path.name).open("wb") as draft_file:
            try:
                torch.save(obj, draft_file)
            except RuntimeError as error:
                # torch's writer hides the OSError behind a failed check
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
            draft_file.flush()
            target_disk.sync(draft_file.fileno())
        target_disk.rename(draft_folder / target_path.name, target_path)
        target_disk.sync_folder(target_path.parent)


# Any: any saved object
def load_object(file: str | Path, allow_pickle: bool = False) -> Any:
    """Load the object that `save_object` wrote, on the CPU; a safetensors file gives a dict of tensors.

    Raises: UnsafeCheckpointError for pickles that would run code, unless allowed; CorruptCheckpointError for damage.
    """
    check_path(file, "load(f)")
    object_path = Path(file).expanduser().absolute()
    try:
        with open_outside(object_path) as object_file:
            first_bytes = object_file.read(9)
    except OSError as error:
        raise CheckpointError(
            f"{object_path} cannot be opened ({error.strerror or error}), so nothing was loaded. Give a file that save() wrote."
        ) from error
    try:
        # the length of a JSON header, then the header
        if first_bytes[8:] == b"{" and not first_bytes.startswith(b"PK"):
            return load_file(object_path)
        return load_torch(object_path, allow_pickle)
    except (SafetensorError, *FORGED) as error:
        raise CorruptCheckpointError(
            f"{object_path}: not a file that save() wrote, or damaged ({type(error).__name__}: {error}). "
            "Nothing was loaded; use another copy of the file."
        ) from error


def replace_files_only(folder: Path, blobs: Mapping[str, Blob], disk: Disk) -> None:
    """Write new files, then rename each into place atomically.

    Raises: CheckpointError when one of them is part of a checkpoint in the folder, or cannot be written.
    """
    check_unlisted(folder, list(blobs))
    with (
        _explaining_errors(folder, ", ".join(blobs), blobs),
        temporary_draft(folder, disk) as draft_folder,
    ):
        write_files(draft_folder, blobs, disk)
        for file_name in blobs:
            disk.rename(draft_folder / file_name, folder / file_name)
        disk.sync_folder(folder)


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of a run rather than an exported model."""
    # a pipe of that name is refused when it is opened
    return os.path.lexists(folder / MANIFEST_NAME)


def load_weights(
    model: nn.Module,
    folder: str | Path,
    strict: bool = True,
    allow_pickle: bool = False,
) -> LoadReport:
    """Load the model from a Hub-layout folder or a single file; return the names that did not match, if not strict.

    Sharded parameters read only their slice of the mapped file, so host memory stays near model size / world size.
    Everything is checked before any tensor changes. Ranks: every rank that holds a shard of the model.
    Raises: OtherModelError naming missing and unexpected tensors and those of another shape.
    """
    check_path(folder, "load_model(directory)")
    stored_tensors = read_model(folder, allow_pickle)
    live_tensors = {
        plain_name(tensor_name): tensor
        for tensor_name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    report = LoadReport(
        missing=sorted(live_tensors.keys() - stored_tensors.keys()),
        unexpected=sorted(
            stored_tensors.keys() - live_tensors.keys() - names_of_other_stages(model)
        ),
    )
    if strict and (report.missing or report.unexpected):
        raise OtherModelError(
            f"{folder}: the files lack {first_names(report.missing)} and have {first_names(report.unexpected)}, which the model does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    common_names = sorted(live_tensors.keys() & stored_tensors.keys())
    mismatched_names = [
        tensor_name
        for tensor_name in common_names
        if live_tensors[tensor_name].shape != stored_tensors[tensor_name].shape
    ]
    if mismatched_names:
        tensor_name = mismatched_names[0]
        raise OtherModelError(
            f"{folder}: {tensor_name} is {tuple(stored_tensors[tensor_name].shape)} in the files and {tuple(live_tensors[tensor_name].shape)} in the model"
            f"{f', and {len(mismatched_names) - 1} more differ' if len(mismatched_names) > 1 else ''}. Nothing was loaded."
        )
    with torch.no_grad():
        for tensor_name in common_names:
            _fill_slice(live_tensors[tensor_name], stored_tensors[tensor_name])
    return report


def _fill_slice(target: Tensor, source: Tensor) -> None:
    """Copy a mapped tensor, or this rank's slice of it, into the target."""
    piece = as_stored(target)
    if isinstance(piece, Slice):
        for dim, (start, size) in enumerate(
            zip(piece.offset, piece.data.shape, strict=True)
        ):
            source = source.narrow(dim, start, size)
        piece.data.copy_(source)
        return
    local_tensor(target).copy_(source)
