"""`accelerate tpu-config`: run commands on every machine of a TPU pod, by gcloud."""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.settings.config_file import (
    default_config_file,
    load_config_from_file,
)

_SOURCES = "git+https://github.com/huggingface/accelerate.git"


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands, or print how. Raises: ValueError without a command or a TPU's name."""
    words = gcloud_words(args)
    if args.debug:
        sys.stdout.write(f"Running {' '.join(words)}\n")
        return
    subprocess.run(words, check=True)
    sys.stdout.write("Successfully setup pod.\n")


def gcloud_words(args: argparse.Namespace) -> list[str]:
    has_config = args.config_file or Path(default_config_file).is_file()
    if has_config:
        saved = load_config_from_file(args.config_file)
    else:
        saved = None
    commands = _command_lines(args, saved)
    tpu_name = args.tpu_name or getattr(saved, "tpu_name", None)
    zone = args.tpu_zone or getattr(saved, "tpu_zone", None)
    if not tpu_name:
        raise ValueError(
            "no TPU is named, so there is no machine to run commands on. Give --tpu_name."
        )
    requirement = {"latest": "accelerate -U", "dev": _SOURCES}.get(
        args.accelerate_version
    )
    if args.install_accelerate:
        install = [
            f"pip install {requirement or f'accelerate=={args.accelerate_version}'}"
        ]
    else:
        install = []
    line = "; ".join(["cd /usr/share", *install, *commands])
    where = ["--zone", zone] if zone else []
    alpha = ["alpha"] if args.use_alpha else []
    ssh = ["compute", "tpus", "tpu-vm", "ssh", tpu_name]
    return ["gcloud", *alpha, *ssh, *where, "--command", line, "--worker", "all"]


# Any: a settings file of either kind, or none
def _command_lines(args: argparse.Namespace, saved: Any) -> list[str]:
    given_words = list(chain.from_iterable(args.command or ()))
    file = args.command_file or (
        None if given_words else getattr(saved, "command_file", None)
    )
    if file:
        command_lines = Path(file).read_text().splitlines()
    else:
        command_lines = given_words or list(getattr(saved, "commands", None) or ())
    if not command_lines:
        raise ValueError(
            "You must specify either a command file or a command to run on the pod."
        )
    return command_lines


tpu_command = tpu_command_launcher
tpu_command_parser = parser_of("tpu-config", tpu_command_launcher)
run, main = runner("tpu-config", tpu_command_parser)
