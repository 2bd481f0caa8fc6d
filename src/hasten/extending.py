"""Public types for extending hasten: extensions, launch targets, strategies, transforms, trackers, module hooks, and what they work with."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.checkpoint.state_dicts import LoadReport as LoadReport
    from hasten.config.root import Config as Config
    from hasten.config.sections.launch import LaunchConfig as LaunchConfig
    from hasten.extension import Extension as Extension
    from hasten.launch.base import Host as Host
    from hasten.launch.base import LaunchPlan as LaunchPlan
    from hasten.launch.base import LaunchRequest as LaunchRequest
    from hasten.launch.base import LaunchTarget as LaunchTarget
    from hasten.launch.base import PlannedFile as PlannedFile
    from hasten.launch.base import Proc as Proc
    from hasten.launch.base import Submitter as Submitter
    from hasten.modules.hooks import ModelHook as ModelHook
    from hasten.modules.hooks import SequentialHook as SequentialHook
    from hasten.modules.hooks import add_hook_to_module as add_hook_to_module
    from hasten.modules.hooks import remove_hook_from_module as remove_hook_from_module
    from hasten.optim.optimizer import PreparedOptimizer as PreparedOptimizer
    from hasten.optim.run_part import RunPart as RunPart
    from hasten.optim.scheduler import PreparedScheduler as PreparedScheduler
    from hasten.precision.base import StepResult as StepResult
    from hasten.progress.bar import Progress as Progress
    from hasten.progress.throughput import Throughput as Throughput
    from hasten.runtime.context import ProcessContext as ProcessContext
    from hasten.runtime.mesh_plan import Axis as Axis
    from hasten.strategies.base import Caps as Caps
    from hasten.strategies.base import OfferedStrategy as OfferedStrategy
    from hasten.strategies.base import PrepareRequest as PrepareRequest
    from hasten.strategies.base import Stage as Stage
    from hasten.strategies.base import Strategy as Strategy
    from hasten.strategies.base import Transform as Transform
    from hasten.strategies.choose import choose_strategy as choose_strategy
    from hasten.tracking.base import Entry as Entry
    from hasten.tracking.base import Run as Run
    from hasten.tracking.base import Tracker as Tracker

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "LoadReport": "hasten.checkpoint.state_dicts",
        "Config": "hasten.config.root",
        "LaunchConfig": "hasten.config.sections.launch",
        "Extension": "hasten.extension",
        "Host": "hasten.launch.base",
        "LaunchPlan": "hasten.launch.base",
        "LaunchRequest": "hasten.launch.base",
        "LaunchTarget": "hasten.launch.base",
        "PlannedFile": "hasten.launch.base",
        "Proc": "hasten.launch.base",
        "Submitter": "hasten.launch.base",
        "ModelHook": "hasten.modules.hooks",
        "SequentialHook": "hasten.modules.hooks",
        "add_hook_to_module": "hasten.modules.hooks",
        "remove_hook_from_module": "hasten.modules.hooks",
        "PreparedOptimizer": "hasten.optim.optimizer",
        "RunPart": "hasten.optim.run_part",
        "PreparedScheduler": "hasten.optim.scheduler",
        "StepResult": "hasten.precision.base",
        "Progress": "hasten.progress.bar",
        "Throughput": "hasten.progress.throughput",
        "ProcessContext": "hasten.runtime.context",
        "Axis": "hasten.runtime.mesh_plan",
        "Caps": "hasten.strategies.base",
        "OfferedStrategy": "hasten.strategies.base",
        "PrepareRequest": "hasten.strategies.base",
        "Stage": "hasten.strategies.base",
        "Strategy": "hasten.strategies.base",
        "Transform": "hasten.strategies.base",
        "choose_strategy": "hasten.strategies.choose",
        "Entry": "hasten.tracking.base",
        "Run": "hasten.tracking.base",
        "Tracker": "hasten.tracking.base",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC)
