"""Planner of one process on one machine: no agent, no torch in the launcher."""

from __future__ import annotations

from hasten.launch.base import Host, LaunchPlan, Proc, Request
from hasten.launch.shape import Shape, worker_argv
from hasten.launch.torchrun import supervision


def plan(request: Request, host: Host, shape: Shape) -> LaunchPlan:
    """Return one command with the settings in its environment."""
    return LaunchPlan(
        launcher="single",
        procs=(Proc(worker_argv(request.target, host), dict(shape.env)),),
        notes=shape.notes,
        supervision=supervision(request, shape),
        target=request.target,
    )
