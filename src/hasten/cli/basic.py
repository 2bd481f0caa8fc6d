"""A sensible settings file for this machine, without questions."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from hasten.cli.machine import Machine, examine, recommended_precision
from hasten.config.files import default_path, write
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.runtime import env as environment

log = logging.getLogger(__name__)


def basic_config(machine: Machine, mixed_precision: str | None = None) -> Config:
    """Return settings that suit a machine: all its devices, or its CPU, and its precision unless one is given."""
    code: dict[str, Any] = {"mixed_precision": mixed_precision or recommended_precision(machine)[0]}
    if machine.device == "cpu":
        code["cpu"] = True
    elif machine.device == "tpu":
        code |= {"launch.tpu": True, "strategy": "xla"}
    elif machine.num_devices > 1:
        code |= {"launch.multi_gpu": True, "strategy": "ddp"}
    return resolve(code=code).config


def write_basic_config(
    mixed_precision: str = "no", save_location: str | PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write settings that suit this machine and return the file; False if there is one already, which is kept."""
    path = Path(save_location) if save_location is not None else default_path(environment.snapshot())
    if path.exists():
        log.warning("%s exists and is kept; write another with `hasten config`, or give save_location", path)
        return False
    return write(basic_config(examine(), mixed_precision), path)
