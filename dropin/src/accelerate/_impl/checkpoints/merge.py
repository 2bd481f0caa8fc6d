"""`accelerate merge-weights`: one model out of a sharded checkpoint, hasten's or torch's."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate._impl.environment.constants import FSDP_MODEL_NAME
from accelerate._impl.environment.parsers import CustomArgumentParser, exit_code_of
from hasten.checkpoint import merge as hasten_merge
from hasten.checkpoint.torch_folder import is_torch_folder

# Any in this file: argparse's subparsers and namespaces.


def merge_weights(
    source: str, output: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write a checkpoint's model as the Hub has it; the checkpoint goes afterwards only when asked."""
    hasten_merge.merge(str(_shards_in(source)), output, safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def _shards_in(source: str) -> Path:
    """The folder of shards. Raises: ValueError where there is none."""
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{source} is not a folder, so there is no checkpoint to merge.")
    inner = folder / f"{FSDP_MODEL_NAME}_0"
    places = [one for one in (folder, inner) if is_torch_folder(one) or (one / "manifest.json").is_file()]
    if not places:
        raise ValueError(
            f"{source} holds no sharded model: neither a checkpoint of hasten nor one of torch.distributed.checkpoint, and "
            f"no {inner.name} inside. Give the folder of shards."
        )
    return places[0]


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate merge-weights`."""
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser("merge-weights")
    else:
        parser = CustomArgumentParser(description="Merge the weights of a sharded checkpoint into one model.")
    parser.add_argument("checkpoint_directory", type=str, help="the sharded checkpoint")
    parser.add_argument("output_path", type=str, help="where the model goes")
    parser.add_argument(
        "--unsafe_serialization", "--unsafe-serialization", action="store_true", help="write .bin files"
    )
    parser.add_argument(
        "--remove_checkpoint_dir", "--remove-checkpoint-dir", action="store_true", help="then remove it"
    )
    if subparsers is not None:
        parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: Any) -> None:
    """Run `accelerate merge-weights`."""
    merge_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )


def run(words: Sequence[str]) -> int:
    """Run `accelerate merge-weights WORDS`."""
    args = merge_command_parser().parse_args(words)
    return exit_code_of("merge-weights", lambda: merge_command(args))


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
