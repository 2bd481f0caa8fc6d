"""The run log of an Accelerator: where it goes and what is known of the run when it begins."""

from __future__ import annotations

import logging
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hasten.comm.collective_log import Trail
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.checkpoint import ProjectConfiguration
from hasten.config.masking import masked, masked_value
from hasten.config.source import Entry, shown
from hasten.config.source import Path as SettingPath
from hasten.progress.memory import MemoryGauge
from hasten.runtime.axes import Axis
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Strategy
from hasten.tracking.run_log import FOLDER, RunLog
from hasten.version import __version__

log = logging.getLogger(__name__)


def open_run_log(
    project: ProjectConfiguration, ctx: ProcessContext, entries: Mapping[SettingPath, Entry], strategy: Strategy
) -> RunLog | None:
    """The log of this rank, or None without a local project folder or with `run_log` off."""
    folder = project.project_dir
    if folder is None or not project.run_log or "://" in folder:
        return None

    def facts() -> dict[str, Any]:  # Any: JSON values
        return {
            "settings": {".".join(path): _setting(entry) for path, entry in entries.items()},
            "strategy": strategy.name,
            "world_size": ctx.world.size,
            "mesh": {str(axis): ctx.mesh.size(axis) for axis in Axis if ctx.mesh.size(axis) > 1},
            "restart": ctx.topology.restart_count,
            "host": socket.gethostname(),
            "device": _device(ctx.device),
            "command": masked(shlex.join(sys.argv)),
            "versions": {
                "hasten": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
        }

    trail = ctx.world.trail if isinstance(ctx.world, ProcessGroupComm) else Trail()
    return RunLog(
        Path(folder) / FOLDER,
        ctx.rank,
        facts,
        MemoryGauge(ctx.device).used_bytes,
        collectives_s=lambda: trail.spent_s,
        gradients_s=strategy.caps.gradients_s,
    )


class Noted:
    """A block whose end is an event of the run log, with the seconds it took or how it failed.

    The log is only a log: what goes wrong with it is logged and never changes how the block ends.
    """

    def __init__(self, run_log: RunLog | None, kind: str) -> None:
        self._run_log = run_log
        self._kind = kind
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run_log is None:
            return
        try:
            if error is None:
                self._run_log.event(self._kind, seconds=round(time.perf_counter() - self._began, 4))
            else:
                self._run_log.event(f"{self._kind}: failed", error=masked(f"{type(error).__name__}: {error}"))
            self._run_log.flush()
        except Exception as wrong:  # of any kind: other ranks have saved or loaded, and this one has, too
            log.warning("the run log could not note %r: %s", self._kind, wrong)


def _setting(entry: Entry) -> list[str]:
    return [shown(masked_value(entry.path[-1], entry.value)), str(entry.source)]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
