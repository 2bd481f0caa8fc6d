"""The established constructor's arguments, checked as they always were, in hasten's terms."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hasten
from accelerate._impl.ambient import AMBIENT, stands_in
from accelerate._impl.enums import PrecisionType
from accelerate._impl.environment.variables import environment, parse_flag_from_env
from accelerate._impl.settings import kwargs_handlers as kinds
from accelerate._impl.settings.deepspeed_plugin import Plugins, active_plugin
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate._impl.settings.general import (
    DataLoaderConfiguration,
    ProjectConfiguration,
)
from accelerate._impl.sharding.followed import chosen_plugins
from accelerate._impl.surface.messages import message
from accelerate._impl.views.state import AcceleratorState
from hasten.runtime.env import assigned_device

# Any in this file: arguments of every type.
_SHOWN: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text())
HANDLERS: dict[type, str] = {
    getattr(kinds, kind): name for kind, name in _SHOWN.items()
}
UNSET: Any = object()


@dataclass(slots=True)
class Arguments:
    """The given arguments, sorted: settings for hasten, and objects the Accelerator shows as they came."""

    settings: dict[str, Any] = field(default_factory=dict)
    handlers: dict[str, Any] = field(default_factory=dict)
    data: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    accumulation: kinds.GradientAccumulationPlugin = field(
        default_factory=kinds.GradientAccumulationPlugin
    )
    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: Plugins = None
    dynamo: kinds.TorchDynamoPlugin = field(default_factory=kinds.TorchDynamoPlugin)


def sort_arguments(arguments: dict[str, Any]) -> Arguments:
    """Return the arguments of Accelerator(), checked. Raises: ValueError as callers match it."""
    sorted_arguments = Arguments()
    settings = sorted_arguments.settings
    if arguments["torch_tp_plugin"] is not None:
        warnings.warn(message("tp_plugin_deprecated"), FutureWarning, stacklevel=3)
    _sort_precision(settings, arguments["mixed_precision"], arguments["cpu"])
    _sort_handlers(sorted_arguments, arguments["kwargs_handlers"])
    _sort_project(
        sorted_arguments, arguments["project_dir"], arguments["project_config"]
    )
    _sort_accumulation(
        sorted_arguments,
        arguments["gradient_accumulation_steps"],
        arguments["gradient_accumulation_plugin"],
    )
    if arguments["dataloader_config"] is not None:
        sorted_arguments.data = arguments["dataloader_config"]
    if arguments["split_batches"] is not UNSET:
        sorted_arguments.data.split_batches = bool(arguments["split_batches"])
    explicit = arguments["gradient_accumulation_plugin"] is not None
    _sort_engine(
        sorted_arguments,
        arguments["deepspeed_plugin"],
        arguments["deepspeed_plugins"],
        explicit,
    )
    if (megatron := arguments["megatron_lm_plugin"]) is not None:
        if not hasattr(megatron, "to_hasten"):
            raise TypeError("`megatron_lm_plugin` must be a MegatronLMPlugin object.")
        settings["strategy"], settings["megatron_lm_plugin"] = (
            "megatron",
            megatron.to_hasten(),
        )
    _sort_sharding(sorted_arguments, arguments["fsdp_plugin"])
    _sort_compilation(
        sorted_arguments, arguments["dynamo_plugin"], arguments["dynamo_backend"]
    )
    if arguments["parallelism_config"] is not None:
        settings["parallelism_config"] = arguments["parallelism_config"].to_hasten()
    settings["device_placement"] = bool(arguments["device_placement"])
    _master_weights(sorted_arguments, arguments["parallelism_config"])
    return sorted_arguments


def _master_weights(sorted_arguments: Arguments, parallelism: Any) -> None:
    """float32 masters where the model is sharded, the model's own weights elsewhere: as scripts expect them here."""
    launched_with_fsdp = environment().get("ACCELERATE_USE_FSDP", "false").lower() in (
        "true",
        "1",
        "yes",
    )
    sharded = (
        sorted_arguments.fsdp is not None
        or launched_with_fsdp
        or getattr(parallelism, "dp_shard_size", 1) != 1
    )
    if not sharded:
        sorted_arguments.settings["master_weights"] = "keep"


def _sort_precision(settings: dict[str, Any], mixed_precision: Any, cpu: bool) -> None:
    if mixed_precision is None:
        precision = None
    else:
        precision = str(mixed_precision)
    if precision is not None and precision not in PrecisionType:
        raise ValueError(
            f"Unknown mixed_precision mode: {precision}. Choose between {PrecisionType.list()}"
        )
    if AMBIENT.whole:  # quirk: PRECISION_IS_FIXED
        AcceleratorState()._check_initialized(precision, cpu)
        precision = AMBIENT.whole["_mixed_precision"]
    if precision is not None:
        settings["mixed_precision"] = precision
    if cpu or AMBIENT.partial.get("_cpu") or stands_in(assigned_device(environment())):
        settings["cpu"] = True


def _sort_handlers(sorted_arguments: Arguments, handlers: Any) -> None:
    hasten_handlers = []
    for handler in handlers or ():
        assert isinstance(handler, kinds.KwargsHandler), message(
            "unsupported_handler", handler
        )
        handler_name = HANDLERS[type(handler)]
        if handler_name in sorted_arguments.handlers:
            raise ValueError(
                f"You can only pass one {type(handler)} in `kwargs_handlers`."
            )
        sorted_arguments.handlers[handler_name] = handler
        hasten_handlers.append(handler.to_hasten())
    if hasten_handlers:
        sorted_arguments.settings["kwargs_handlers"] = hasten_handlers


def _sort_project(
    sorted_arguments: Arguments, project_dir: Any, config: ProjectConfiguration | None
) -> None:
    project = sorted_arguments.project = (
        config if config is not None else ProjectConfiguration(project_dir=project_dir)
    )
    if project_dir is not None and project.project_dir is None:
        project.set_directories(str(project_dir))
    # else the folder is the script's alone
    run_log = parse_flag_from_env("HASTEN_PROJECT_RUN_LOG")
    sorted_arguments.settings["project_config"] = project.over(
        partial(hasten.ProjectConfiguration, run_log=run_log)
    )


def _sort_accumulation(
    sorted_arguments: Arguments,
    steps: int,
    plugin: kinds.GradientAccumulationPlugin | None,
) -> None:
    if plugin is not None and steps != 1:
        raise ValueError(message("steps_and_plugin"))
    num_steps = int(
        environment().get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(steps))
    )
    if plugin is None:
        sorted_arguments.accumulation = kinds.GradientAccumulationPlugin(
            num_steps=num_steps
        )
    else:
        sorted_arguments.accumulation = plugin
    if (
        sorted_arguments.accumulation.num_steps is not None
        or sorted_arguments.accumulation != kinds.GradientAccumulationPlugin()
    ):
        sorted_arguments.settings["gradient_accumulation_plugin"] = (
            sorted_arguments.accumulation.to_hasten()
        )


def _sort_sharding(
    sorted_arguments: Arguments, plugin: FullyShardedDataParallelPlugin | None
) -> None:
    if plugin is None:
        plugin = AMBIENT.whole.get("fsdp_plugin")
    else:
        plugin = plugin
    if plugin is not None:
        if not isinstance(plugin, FullyShardedDataParallelPlugin):
            raise TypeError(
                "`fsdp_plugin` must be a FullyShardedDataParallelPlugin object."
            )
        sorted_arguments.fsdp = plugin
        sorted_arguments.settings["fsdp_plugin"] = plugin.to_hasten()


def _sort_engine(
    sorted_arguments: Arguments, plugin: Any, plugins: Any, explicit: bool
) -> None:
    if plugins is plugin is None:
        earlier = AMBIENT.whole.get("deepspeed_plugins")
    else:
        earlier = plugins
    sorted_arguments.deepspeed = chosen_plugins(plugin, earlier)
    active = active_plugin(sorted_arguments.deepspeed)
    if active is None:
        return
    sorted_arguments.settings["strategy"] = "deepspeed"
    # else the settings of the launch hold until the first prepare()
    if plugin is not None or plugins is not None:
        sorted_arguments.settings["deepspeed_plugin"] = active.to_hasten()
    steps = active.accumulation
    if steps is None or explicit:  # libraries that accumulate themselves give a plugin
        return
    if sorted_arguments.accumulation.num_steps not in (1, steps):
        raise ValueError(
            message("steps_contradict", sorted_arguments.accumulation.num_steps, steps)
        )
    sorted_arguments.accumulation = kinds.GradientAccumulationPlugin(num_steps=steps)
    sorted_arguments.settings["gradient_accumulation_plugin"] = (
        sorted_arguments.accumulation.to_hasten()
    )


def _sort_compilation(
    sorted_arguments: Arguments, plugin: kinds.TorchDynamoPlugin | None, backend: Any
) -> None:
    if plugin is not None and backend is not None:
        raise ValueError(
            "You cannot pass in both `dynamo_plugin` and `dynamo_backend`, please only pass in one."
        )
    if backend is not None:
        plugin = kinds.TorchDynamoPlugin(backend=backend)
    sorted_arguments.dynamo = (
        plugin or AMBIENT.whole.get("dynamo_plugin") or kinds.TorchDynamoPlugin()
    )
    if str(sorted_arguments.dynamo.backend).lower() != "no":
        sorted_arguments.settings["dynamo_plugin"] = sorted_arguments.dynamo.to_hasten()
