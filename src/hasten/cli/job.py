"""Starting a program of hasten's own as `hasten launch` starts a script: for `hasten test` and `hasten predict`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from hasten.config.source import Entry, Source


def run_module(words: Sequence[str], command: str, given: argparse.Namespace, typed: Sequence[str]) -> int:
    """Run the module with its arguments under the settings of the command line, or print its plan; returns the exit code."""
    as_module = Entry(("launch", "module"), "true", Source("flag", command), text=True)
    job_module = import_module("hasten.launch.job")  # so that --help loads neither files nor machines
    job = job_module.prepare(words, settings=[*given.settings, as_module], config_file=given.config_file, typed=typed)
    if given.dry_run:
        sys.stdout.write(job.plan.render() + "\n")
        return 0
    code: int = job.run()
    return code
