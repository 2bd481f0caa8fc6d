"""`accelerate merge-weights`: one model out of a sharded checkpoint, hasten's or torch's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate._impl.environment.constants import FSDP_MODEL_NAME
from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message

inspect = Deferred("hasten.extensions.checkpoint_tools.inspect")
torch_folder = Deferred("hasten.extensions.checkpoint_tools.torch_folder")
# Any in this file: argparse's subparsers and namespaces.


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write a checkpoint's model as the Hub has it; the checkpoint goes afterwards only when asked. Ranks: any one process."""
    inspect.merge_shards(
        str(_shards_in(checkpoint_dir)),
        output_path,
        safe_serialization=safe_serialization,
    )
    if remove_checkpoint_dir:
        shutil.rmtree(checkpoint_dir)


def _shards_in(source: str) -> Path:
    """Return the folder of shards. Raises: ValueError where there is none."""
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(message("no_folder_to_merge", source))
    inner = folder / f"{FSDP_MODEL_NAME}_0"
    shard_folders = []
    for candidate in (folder, inner):
        if (
            torch_folder.is_torch_folder(candidate)
            or (candidate / "manifest.json").is_file()
        ):
            shard_folders.append(candidate)
    if not shard_folders:
        raise ValueError(message("no_shards", source, inner.name))
    return shard_folders[0]


def merge_command(args: Any) -> None:
    merge_fsdp_weights(
        args.checkpoint_directory,
        args.output_path,
        not args.unsafe_serialization,
        args.remove_checkpoint_dir,
    )


merge_command_parser = parser_of("merge-weights", merge_command)
run, main = runner("merge-weights", merge_command_parser)
