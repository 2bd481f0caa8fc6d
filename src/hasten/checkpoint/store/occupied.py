"""Protection of checkpoints and exported models in a folder from being overwritten by the other kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    decode,
    read_outside,
    size_of,
)
from hasten.checkpoint.store.disk import file_checksum
from hasten.errors import CheckpointError, CheckpointVersionError

WEIGHTS: Final = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
)
"""Weight files in the Hub layout, with the same names in a checkpoint and in an exported model."""
FOREIGN: Final = re.compile(
    r"(optimizer|scheduler|custom_checkpoint)(_\d+)?\.(bin|pt|pkl)|scaler\.pt"
)
"""Other files of a checkpoint by Hugging Face Accelerate."""
TORCH_TABLE: Final = ".metadata"


@dataclass(frozen=True, slots=True)
class Holding:
    """Description of a folder's content, and its files, starting with the one that makes the content complete."""

    what: str
    names: tuple[str, ...]


def _manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST_NAME
    try:
        return decode(read_outside(path, MAX_MANIFEST_BYTES), str(path))
    except CheckpointVersionError:
        raise
    except (OSError, CheckpointError):  # missing or damaged: it lists nothing
        return None


def listed(folder: Path) -> Mapping[str, FileRecord]:
    """Return the files of the checkpoint in a folder by name; none when it holds no checkpoint.

    Raises: CheckpointVersionError when another version of hasten wrote it.
    """
    found = _manifest(folder)
    return {} if found is None else {file.name: file for file in found.files}


def check_unlisted(folder: Path, names: Sequence[str]) -> None:
    """Check that no file in `names` belongs to a checkpoint in the folder.

    Raises: CheckpointError otherwise.
    """
    if taken := sorted({*names} & {*listed(folder)}):
        raise part_of_checkpoint(folder, taken)


def check_no_weights(folder: Path) -> None:
    """Check that the folder holds no checkpoint with weights in the Hub layout.

    Raises: CheckpointError otherwise.
    """
    if taken := sorted(name for name in listed(folder) if WEIGHTS.fullmatch(name)):
        raise part_of_checkpoint(folder, taken)


def part_of_checkpoint(folder: Path, names: Sequence[str]) -> CheckpointError:
    """Return the error for a write that would replace files of a checkpoint."""
    return CheckpointError(
        f"{folder} holds a checkpoint, and {', '.join(names[:3])} {'is a part' if len(names) == 1 else 'are parts'} of it: with other "
        "content there, load_state would find the checkpoint damaged. Nothing was changed. Write to another folder, such as "
        f"{folder / 'export'}, or delete the checkpoint first."
    )


def unchanged(folder: Path, records: Mapping[str, FileRecord]) -> set[str]:
    """Return the names of the files that belong to the checkpoint in the folder with identical content.

    Raises: CheckpointError when the checkpoint has weights in the Hub layout that differ from `records`.
    """
    theirs = {
        name: file
        for name, file in listed(folder).items()
        if WEIGHTS.fullmatch(name) or name in records
    }
    same = {
        n
        for n, f in theirs.items()
        if n in records and (records[n].size, records[n].sums) == (f.size, f.sums)
    }
    if other := sorted(theirs.keys() - same):
        raise part_of_checkpoint(folder, other)
    return same


def check_export(
    folder: Path, manifest: Manifest, replaced: Collection[str] = ()
) -> None:
    """Check that a checkpoint to be saved into the folder leaves a model exported there unchanged and readable.

    Raises: CheckpointError when the checkpoint's weights would replace or hide the model's, or be hidden by them.
    """
    if "model" not in {component.kind for component in manifest.components.values()}:
        return
    weights = {
        file.name: file for file in manifest.files if WEIGHTS.fullmatch(file.name)
    }
    others = []
    for path in sorted(folder.iterdir()):
        if not WEIGHTS.fullmatch(path.name) or path.name in replaced:
            continue
        if path.name not in weights or not is_same(path, weights[path.name]):
            others.append(path.name)
    if others:
        raise CheckpointError(
            f"{folder} holds an exported model ({', '.join(others[:3])}) whose weights are not those of this checkpoint: load_model would read the "
            "one or the other. Nothing was changed. Save the checkpoint into another folder, or delete the model first."
        )


def is_same(path: Path, file: FileRecord) -> bool:
    """Return True if a file has the size and checksums of its record."""
    if size_of(path) != file.size:
        return False
    spans = (
        (at, min(at + CHUNK_BYTES, file.size))
        for at in range(0, file.size, CHUNK_BYTES)
    )
    return all(
        file_checksum(path, *span) == known
        for span, known in zip(spans, file.sums, strict=True)
    )


def holding(folder: Path) -> Holding | None:
    """Return the content of a folder: a checkpoint of any tool, an exported model, or several; None for neither."""
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    found: dict[str, list[str]] = {}
    if MANIFEST_NAME in names:
        try:
            manifest = _manifest(folder)
            parts = [] if manifest is None else [file.name for file in manifest.files]
        except CheckpointVersionError:
            parts = []
        found["a checkpoint"] = [MANIFEST_NAME, *parts]
    if TORCH_TABLE in names:
        shards = [name for name in names if name.endswith(".distcp")]
        found["a checkpoint of torch.distributed.checkpoint"] = [TORCH_TABLE, *shards]
    taken = {name for parts in found.values() for name in parts}
    weights = [name for name in names if WEIGHTS.fullmatch(name) and name not in taken]
    foreign = [name for name in names if FOREIGN.fullmatch(name) and name not in taken]
    found |= {"an exported model": weights} if weights else {}
    found |= {"states of another tool": foreign} if foreign else {}
    if not found:
        return None
    return Holding(
        " and ".join(found), tuple(name for parts in found.values() for name in parts)
    )
