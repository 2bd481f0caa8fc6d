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

from hasten.checkpoint.base import Blob, Component, Format, Slice, as_stored
from hasten.checkpoint.format.formats import (
    encode_safetensors,
    load_torch,
    read_tensors,
)
from hasten.checkpoint.format.manifest import (
    FORGED,
    MANIFEST_NAME,
    inside,
    open_outside,
    read_outside,
)
from hasten.checkpoint.reshard import whole
from hasten.checkpoint.state_dicts import LoadReport, few, names_of_other_stages
from hasten.checkpoint.store.disk import Disk, cannot_write, write_files
from hasten.checkpoint.store.drafts import temporary_draft
from hasten.checkpoint.store.locate import check_local, check_path
from hasten.checkpoint.store.occupied import (
    check_no_checkpoint,
    check_unlisted,
    exported_weights,
)
from hasten.checkpoint.writer import FileLayout, encode, hub_index, plan_component
from hasten.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    OtherModelError,
)
from hasten.modules.names import is_dtensor, local_tensor, plain_name

_UNITS = (
    *(("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)),
    *(("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12), ("B", 1)),
)


def parse_size(size: float | str) -> int:
    """Return a number of bytes from "10GB" (decimal), "10GiB" (binary) or a number, fractions allowed.

    Raises: ConfigError for anything else, and for a negative size.
    """
    found = float("nan")
    if isinstance(size, int | float) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str):
        text = size.strip()
        head, factor = next(
            ((text.removesuffix(unit), n) for unit, n in _UNITS if text.endswith(unit)),
            ("", 1),
        )
        with suppress(ValueError):
            found = float(head) * factor
    if not 0 <= found < 2**63:
        raise ConfigError(
            f"{size!r} is not a file size: bytes from 0 on are counted; write it as 10GB, 500MB or 2GiB, or give a number of bytes."
        )
    return int(found)


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
    target = check_local(folder, "save_model(save_directory)")
    if target.exists() and not target.is_dir():
        raise ConfigError(
            f"{folder} is a file, and a model is written to a folder; give the name of a folder."
        )
    limit = parse_size(max_shard_size)
    if limit < 1:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} leaves no room for a single byte in a file; set it to a size such as 5GB, or leave it out."
        )
    tensors = {
        key: as_stored(value)
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    extra = sorted(key for key, value in state.items() if not isinstance(value, Tensor))
    if extra:
        raise CheckpointError(
            f"the model has extra state ({', '.join(extra[:3])}) that the Hub layout cannot hold, and it would be lost. "
            "Use save_state, or remove these entries from the state dict."
        )
    fmt: Format = "safetensors" if safe_serialization else "torch"
    component = Component(tensors, None, "model", fmt)
    if component.sliced:
        raise CheckpointError(
            "the weights are sharded over ranks; gather them with accelerator.get_state_dict first."
        )
    plans = plan_component("model", component, 0, (0,), FileLayout(limit, limit))
    blobs = {plan.name: encode(component, plan) for plan in plans}
    if len(plans) > 1:
        end = "safetensors" if safe_serialization else "bin"
        stem = "model" if safe_serialization else "pytorch_model"
        blobs[f"{stem}.{end}.index.json"] = hub_index(plans, component)
    replace_model_files(target, blobs, disk or Disk())
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
        temporary_draft(folder, disk) as draft,
    ):
        write_files(draft, blobs, disk)
        outdated = set(exported_weights(folder)) - blobs.keys()
        indexes = [name for name in blobs if name.endswith(".json")]
        for name in indexes:
            disk.remove_file(folder / name)
        for name in (*sorted(blobs.keys() - set(indexes)), *indexes):
            disk.rename(draft / name, folder / name)
        for name in sorted(outdated):
            disk.remove_file(folder / name)
        disk.sync_folder(folder)


@contextmanager
def _explaining_errors(
    folder: Path, what: str, blobs: Mapping[str, Blob]
) -> Iterator[None]:
    """Context manager that raises CheckpointError in place of an OSError, and names the disk when it is full."""
    try:
        yield
    except OSError as error:
        raise cannot_write(
            what, folder, sum(blob.size for blob in blobs.values()), error
        ) from error


def read_model(folder: str | Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Return all weights of an exported folder or of a checkpoint's model, memory-mapped, under all their names.

    Raises: a subclass of CheckpointError.
    """
    check_path(folder, "load_model(directory)")
    root = Path(folder)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path in weight_files(root):
        content = read_tensors(path, allow_pickle)
        for key, piece in content.pieces.items():
            tensors[key] = whole([piece], key)
        aliases.update(content.aliases)
    for alias, key in aliases.items():
        if key not in tensors:
            raise CorruptCheckpointError(
                f"{root}: {alias} is another name of {key}, which is in no file, so the model is not whole. Nothing was loaded; "
                "use another copy of the model."
            )
        tensors[alias] = tensors[key]
    return tensors


def weight_files(root: Path) -> list[Path]:
    """Return the files that hold a model's weights, given a folder, an index of shards, or a single file.

    Raises: IncompleteCheckpointError when there are none, CorruptCheckpointError for an invalid index.
    """
    if root.suffix == ".json":
        return _indexed(root.parent, root)
    if root.is_file():
        return [root]
    for stem, end in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (root / f"{stem}.{end}").is_file():
            return [inside(root, f"{stem}.{end}")]
        index = root / f"{stem}.{end}.index.json"
        if index.is_file():
            return _indexed(root, index)
    raise IncompleteCheckpointError(
        f"{root} holds no model.safetensors or pytorch_model.bin, nor an index of shards. Give the folder of a model."
    )


def _indexed(root: Path, index: Path) -> list[Path]:
    try:
        table = json.loads(read_outside(index))
        names = sorted(
            set(
                (
                    table["weight_map"]
                    if "metadata" in table
                    else table.get("weight_map", table)
                ).values()
            )
        )
        paths = [inside(root, name) for name in names]
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(
            f"{index} does not exist; give the folder or index of a model."
        ) from error
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{index}: not an index of weight files ({type(error).__name__}: {error}). Nothing was loaded; use another copy of the model."
        ) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise IncompleteCheckpointError(
            f"{root}: {', '.join(missing[:4])} of the index are missing, so the model is not whole. Nothing was loaded; copy all its files."
        )
    return paths


def save_object(
    obj: Any,
    file: str | Path,
    safe_serialization: bool = False,
    disk: Disk | None = None,
) -> None:
    """Write an object with torch.save (or a flat dict of tensors as safetensors), replacing the file atomically.

    Ranks: main only (or one per machine).
    """
    target = check_local(file, "save(f)").absolute()
    if target.is_dir():
        raise ConfigError(
            f"save(f) got {target}, which is a folder, and an object is written to one file; add a file name."
        )
    if target.exists() and not target.is_file():
        raise ConfigError(
            f"save(f) got {target}, which is a device or a pipe, and saving would replace it with a file; give another name."
        )
    device = disk or Disk()
    if safe_serialization:
        if not isinstance(obj, Mapping) or not all(
            isinstance(value, Tensor) for value in obj.values()
        ):
            raise ConfigError(
                "safe_serialization=True needs a flat dict of tensors; give one, or set it to False."
            )
        if (
            sharded := next(
                (key for key, value in obj.items() if is_dtensor(value)), None
            )
        ) is not None:
            raise ConfigError(
                f"{sharded} is a part of a sharded tensor, which only this rank holds. Give the whole tensors: "
                "accelerator.get_state_dict(model)."
            )
        blob = encode_safetensors({str(key): value for key, value in obj.items()})
        replace_files_only(target.parent, {target.name: blob}, device)
        return
    check_unlisted(target.parent, [target.name])
    with (
        _explaining_errors(target.parent, target.name, {}),
        temporary_draft(target.parent, device) as draft,
    ):
        with (draft / target.name).open("wb") as written:
            try:
                torch.save(obj, written)
            except RuntimeError as error:
                # torch's writer hides the OSError behind a failed check
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
            written.flush()
            device.sync(written.fileno())
        device.rename(draft / target.name, target)
        device.sync_folder(target.parent)


# Any: any saved object
def load_object(file: str | Path, allow_pickle: bool = False) -> Any:
    """Load the object that `save_object` wrote, on the CPU; a safetensors file gives a dict of tensors.

    Raises: UnsafeCheckpointError for pickles that would run code, unless allowed; CorruptCheckpointError for damage.
    """
    check_path(file, "load(f)")
    path = Path(file).expanduser().absolute()
    try:
        with open_outside(path) as opened:
            begins = opened.read(9)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error.strerror or error}), so nothing was loaded. Give a file that save() wrote."
        ) from error
    try:
        # the length of a JSON header, then the header
        if begins[8:] == b"{" and not begins.startswith(b"PK"):
            return load_file(path)
        return load_torch(path, allow_pickle)
    except (SafetensorError, *FORGED) as error:
        raise CorruptCheckpointError(
            f"{path}: not a file that save() wrote, or damaged ({type(error).__name__}: {error}). "
            "Nothing was loaded; use another copy of the file."
        ) from error


def replace_files_only(folder: Path, blobs: Mapping[str, Blob], disk: Disk) -> None:
    """Write new files, then rename each into place atomically.

    Raises: CheckpointError when one of them is part of a checkpoint in the folder, or cannot be written.
    """
    check_unlisted(folder, list(blobs))
    with (
        _explaining_errors(folder, ", ".join(blobs), blobs),
        temporary_draft(folder, disk) as draft,
    ):
        write_files(draft, blobs, disk)
        for name in blobs:
            disk.rename(draft / name, folder / name)
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
    stored = read_model(folder, allow_pickle)
    live = {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    report = LoadReport(
        missing=sorted(live.keys() - stored.keys()),
        unexpected=sorted(stored.keys() - live.keys() - names_of_other_stages(model)),
    )
    if strict and (report.missing or report.unexpected):
        raise OtherModelError(
            f"{folder}: the files lack {few(report.missing)} and have {few(report.unexpected)}, which the model does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    both = sorted(live.keys() & stored.keys())
    wrong = [name for name in both if live[name].shape != stored[name].shape]
    if wrong:
        name = wrong[0]
        raise OtherModelError(
            f"{folder}: {name} is {tuple(stored[name].shape)} in the files and {tuple(live[name].shape)} in the model"
            f"{f', and {len(wrong) - 1} more differ' if len(wrong) > 1 else ''}. Nothing was loaded."
        )
    with torch.no_grad():
        for name in both:
            _fill(live[name], stored[name])
    return report


def _fill(target: Tensor, source: Tensor) -> None:
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
