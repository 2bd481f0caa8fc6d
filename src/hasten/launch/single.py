"""Launch plan for one process on one machine, without the elastic agent; the launcher does not import torch."""

from __future__ import annotations

from hasten.launch.base import Host, LaunchPlan, LaunchRequest, Proc
from hasten.launch.shape import JobShape, worker_argv
from hasten.launch.torchrun import supervision


def plan(request: LaunchRequest, host: Host, shape: JobShape) -> LaunchPlan:
    """Return a plan with one command and the settings in its environment."""
    return LaunchPlan(
        launcher="single",
        procs=(Proc(worker_argv(request.target, host), dict(shape.env)),),
        notes=shape.notes,
        supervision=supervision(request, shape),
        target=request.target,
    )
