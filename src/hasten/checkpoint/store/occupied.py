"""One folder, one kind: a folder holds a checkpoint or an exported model, and writing the one refuses the folder of the other."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from hasten.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    decode_manifest,
    read_outside,
)
from hasten.errors import CheckpointError, CheckpointVersionError

WEIGHT_FILE: Final = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
)
"""Weight files in the Hub layout, with the same names in a checkpoint and in an exported model."""
FOREIGN_FILE: Final = re.compile(
    r"(optimizer|scheduler|custom_checkpoint)(_\d+)?\.(bin|pt|pkl)|scaler\.pt"
)
"""Other files of a checkpoint by Hugging Face Accelerate."""


def read_file_records(folder: Path) -> Mapping[str, FileRecord]:
    """Return the files of the checkpoint in a folder by name; none when it holds no readable checkpoint.

    Raises: CheckpointVersionError when another version of hasten wrote it.
    """
    manifest_path = folder / MANIFEST_NAME
    try:
        manifest = decode_manifest(
            read_outside(manifest_path, MAX_MANIFEST_BYTES), str(manifest_path)
        )
    except CheckpointVersionError:
        raise
    except (OSError, CheckpointError):  # missing or damaged: it lists nothing
        return {}
    return {file.name: file for file in manifest.files}


def exported_weights(folder: Path) -> list[str]:
    """Return the names of the weight files in a folder, of a model or of a checkpoint."""
    weight_names = []
    for path in folder.iterdir():
        if WEIGHT_FILE.fullmatch(path.name):
            weight_names.append(path.name)
    return sorted(weight_names)


def check_unlisted(folder: Path, file_names: Collection[str]) -> None:
    """Check that no file in `names` belongs to a checkpoint in the folder.

    Raises: CheckpointError otherwise.
    """
    if checkpoint_names := sorted({*file_names} & {*read_file_records(folder)}):
        raise _holds_checkpoint(folder, checkpoint_names)


def check_no_checkpoint(folder: Path) -> None:
    """Check that a model can be written to the folder.

    Raises: CheckpointError when it holds a checkpoint, readable or not.
    """
    if os.path.lexists(folder / MANIFEST_NAME):
        raise _holds_checkpoint(folder, ["weights"])


def _holds_checkpoint(folder: Path, file_names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds a checkpoint, and writing {', '.join(file_names[:3])} there would damage it. Nothing was changed. Write to another "
        f"folder, such as {folder / 'export'}, or delete the checkpoint first."
    )
