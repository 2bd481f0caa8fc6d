"""A settings file for this machine, without questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from accelerate._impl.settings.config_file import ClusterConfig, default_config_file, default_json_config_file

description = "Create a default config file for Accelerate with only a few flags set."


def write_basic_config(mixed_precision: str = "no", save_location: str = default_config_file) -> Path | Literal[False]:
    """Write settings that suit this machine and return the file; False if there is one already, which is kept."""
    path = Path(save_location)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        print(  # noqa: T201  this function has always told the user so
            f"Configuration already exists at {save_location}, will not override. Run `accelerate config` manually or pass a "
            "different `save_location`."
        )
        return False
    mixed_precision = mixed_precision.lower()
    if mixed_precision not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            f"`mixed_precision` should be one of 'no', 'fp16', 'bf16', or 'fp8'. Received {mixed_precision}"
        )
    _suited(mixed_precision, path)
    return path


def _suited(mixed_precision: str, path: Path) -> None:
    """Write settings for all devices of this machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None else 0
    several = (
        "NO" if count < 2 or found is None else ("MULTI_GPU" if found.type == "cuda" else f"MULTI_{found.type.upper()}")
    )
    config = ClusterConfig(
        "LOCAL_MACHINE", several, mixed_precision, use_cpu=count == 0, debug=False, num_processes=max(count, 1)
    )
    (config.to_json_file if path.suffix == ".json" else config.to_yaml_file)(str(path))


def default_command_parser(parser: Any, parents: Any) -> Any:  # Any: argparse's subparsers
    """The parser of `accelerate config default`."""
    parser = parser.add_parser("default", parents=parents, help=description)
    parser.add_argument("--config_file", default=default_json_config_file, dest="save_location")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.set_defaults(func=default_config_command)
    return parser


def default_config_command(args: Any) -> None:  # Any: argparse's namespace
    """Run `accelerate config default`."""
    file = write_basic_config(args.mixed_precision, args.save_location)
    if file:
        print(f"accelerate configuration saved at {file}")  # noqa: T201  the command answers on the terminal
