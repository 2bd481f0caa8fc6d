"""`hasten test`: runs the self-check like a training script, under the current settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hasten.cli.flags import SettingsParser, run_module
from hasten.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run `hasten test …` and return 0 if training works under these settings."""
    parser = SettingsParser(
        prog="hasten test",
        description="Check that training works under the current settings: collectives, a training step that equals one "
        "process, and the bandwidth of an all-reduce, reported per rank.",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="a settings file of hasten or of Accelerate",
    )
    parser.add_argument(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="print the plan without starting anything",
    )
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="run the check under each strategy and precision of hasten; exit code 1 if one fails",
    )
    parser.add_argument(
        "--only",
        metavar="ddp,fsdp2,bf16",
        help="with --matrix: only these strategies, precisions or cells",
    )
    parser.add_argument(
        "--links",
        metavar="FILE",
        help="also measure the links inside machines and between them, for `hasten plan --links FILE`",
    )
    parser.add_settings()
    arguments = parser.parse_args(argv)
    if arguments.matrix:
        return _run_matrix(arguments)
    if arguments.only is not None:
        parser.error("--only is an option of --matrix; add --matrix, or remove it")
    words = [
        "hasten.extensions.selfcheck.selfcheck",
        *([] if arguments.links is None else [arguments.links]),
    ]
    return run_module(words, "hasten test", arguments, argv)


def _run_matrix(arguments: argparse.Namespace) -> int:
    launch_flags = []
    for entry in arguments.settings:
        if entry.path != ("cpu",):
            launch_flags.append(entry.name)
    for name in ("config_file", "dry_run", "links"):
        if getattr(arguments, name):
            launch_flags.append(name)
    if launch_flags:
        raise ConfigError(
            f"{launch_flags[0]} was given with --matrix, whose cells use fixed settings, so it would have no effect; remove it, or choose "
            "cells with --only. (--cpu is allowed.)"
        )
    from hasten.extensions.selfcheck import matrix  # inspects the machine

    cpu = any(
        str(entry.value).lower() in ("true", "1", "yes") for entry in arguments.settings
    )
    return matrix.run_cells(arguments.only, cpu)
