"""Commands that hasten answers: `accelerate env` and `accelerate test`."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerate import __implementation__, __version__
from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.settings.config_file import (
    default_config_file,
    load_config_from_file,
)
from hasten.cli.main import main as hasten

# Any in this file: argparse's namespaces.


def chosen_file(args: Any) -> list[str]:
    if args.config_file:
        return ["--config_file", args.config_file]
    return []


def env_command(args: Any) -> dict[str, Any]:
    """Run `accelerate env`: print a report to copy into an issue, and return it."""
    report = _collect_report()
    has_config = args.config_file or Path(default_config_file).is_file()
    if has_config:
        saved: dict[str, Any] = load_config_from_file(args.config_file).to_dict()
    else:
        saved = {}
    lines = [f"- {line_name}: {line_value}" for line_name, line_value in report.items()]
    shown = [
        f"\t- {line_name}: {line_value}" for line_name, line_value in saved.items()
    ] or ["\tNot found"]
    if args.config_file:
        whose = "config passed"
    else:
        whose = "default config"
    heading = "\nCopy-and-paste the text below in your GitHub issue\n"
    print("\n".join([heading, *lines, f"- `Accelerate` {whose}:", *shown]))  # noqa: T201  the command answers on the terminal
    return {**report, "`Accelerate` configs": saved or "Not found"}


def _collect_report() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    device = torch.accelerator.current_accelerator(check_available=True)
    report = {
        "`Accelerate` version": f"{__version__}+{__implementation__}",
        "Platform": platform.platform(),
        "`accelerate` bash location": shutil.which("accelerate") or "Not found",
        "Python version": platform.python_version(),
        "Numpy version": np.__version__,
        "PyTorch version": str(torch.__version__),
        "PyTorch accelerator": "N/A" if device is None else device.type.upper(),
        "System RAM": f"{memory:.2f} GB",
    }
    if torch.cuda.is_available():
        report["GPU type"] = torch.cuda.get_device_name()
    return report


def test_command(args: Any) -> int:
    code = hasten(["test", *chosen_file(args)])
    if code == 0:
        print("Test is a success! You are ready for your distributed training!")  # noqa: T201  as the original says it
    return code


env_command_parser = parser_of("env", env_command)
test_command_parser = parser_of("test", test_command)
run_env, main_env = runner("env", env_command_parser)
run_test, main_test = runner("test", test_command_parser)
