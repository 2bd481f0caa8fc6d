"""`hasten test`: starts the self-check as a training script would be started, under the current settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from hasten.cli.flags import SettingsParser
from hasten.config.source import Entry, Source


def main(argv: Sequence[str]) -> int:
    """Run `hasten test …` and return 0 if training works here under these settings."""
    parser = SettingsParser(
        prog="hasten test",
        description="Check that training works under the current settings: collectives, a training step that equals one "
        "process, and the bandwidth of an all-reduce, told by rank.",
    )
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="a settings file, ours or Accelerate's")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the exact plan and start nothing")
    parser.add_settings()
    given = parser.parse_args(argv)
    as_module = Entry(("launch", "module"), "true", Source("flag", "hasten test"), text=True)
    job_module = import_module("hasten.launch.job")  # so that --help loads neither files nor machines
    job = job_module.prepare(
        ["hasten.launch.selfcheck"], settings=[*given.settings, as_module], config_file=given.config_file, typed=argv
    )
    if given.dry_run:
        sys.stdout.write(job.plan.render() + "\n")
        return 0
    code: int = job.run()
    return code
