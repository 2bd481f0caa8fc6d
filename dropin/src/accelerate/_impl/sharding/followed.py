"""The plugins of an Accelerator over its life: chosen, shown, and followed where they are changed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from accelerate._impl.composed import Composed
from accelerate._impl.environment.variables import parse_flag_from_env
from accelerate._impl.settings.deepspeed_plugin import (
    DeepSpeedPlugin,
    Plugins,
    active_plugin,
)
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate._impl.settings.kwargs_handlers import DistributedDataParallelKwargs
from accelerate._impl.surface.messages import message
from hasten.accelerator.components import components
from hasten.extensions.deepspeed import settings as deepspeed_settings


class FollowedPlugin:
    """The FSDP plugin an Accelerator shows, and the settings that were last taken from it."""

    def __init__(
        self, accelerator: Composed, fsdp_plugin: FullyShardedDataParallelPlugin | None
    ) -> None:
        # which owns this object
        self._accelerator: Composed = weakref.proxy(accelerator)
        self.plugin = fsdp_plugin
        caps = components(accelerator).strategy.caps
        # engines shard without FSDP
        if fsdp_plugin is None and caps.sharded_state and not caps.owns_precision:
            self.plugin = FullyShardedDataParallelPlugin.of(accelerator.config.fsdp)
        if self.plugin is not None:
            self.plugin.fsdp_version = 2  # which the model is sharded by: libraries ask
        if self.plugin is None:
            self._taken = None
        else:
            self._taken = self.plugin.to_hasten(say=False)

    def follow_changes(self) -> None:
        """Take over what was changed in the plugin; libraries set wrap policies after they have made the Accelerator.

        Raises: ValueError when a model has been sharded already, or for the layout of processes, which is settled.
        """
        if self.plugin is None:
            return
        current_settings = self.plugin.to_hasten(say=False)
        # that may change freely
        field_names = []
        for field_name in current_settings.__dataclass_fields__:
            if field_name != "state_dict_type":
                field_names.append(field_name)
        changed = {}
        for field_name in field_names:
            if getattr(self._taken, field_name) != getattr(
                current_settings, field_name
            ):
                changed[field_name] = getattr(current_settings, field_name)
        if "hybrid_shard" in changed:
            raise ValueError(message("strategy_too_late"))
        if changed:
            fsdp = replace(self._accelerator.config.fsdp, **changed)
            self._accelerator._reconfigure(fsdp=fsdp)
            self._taken = current_settings


class FollowedSections:
    """The settings that were last taken from the DeepSpeed plugin in use and from the options of DistributedDataParallel."""

    def __init__(self, accelerator: Composed, plugins: Plugins) -> None:
        # which owns this object
        self._accelerator: Composed = weakref.proxy(accelerator)
        self.plugins = plugins
        self._taken = {
            **self._current_sections(),
            "deepspeed": None
            if plugins is None
            else accelerator.config.section(deepspeed_settings.DeepSpeedPlugin),
        }

    def _current_sections(self) -> dict[str, Any]:
        plugin = active_plugin(self.plugins)
        handler = self._accelerator.ddp_handler
        ddp = (handler or DistributedDataParallelKwargs()).to_hasten()
        return {"ddp": ddp, "deepspeed": None if plugin is None else plugin.to_hasten()}

    def follow_changes(self) -> None:
        """Take over what is set now; libraries replace options and fill "auto" values after Accelerator().

        Raises: ValueError when a model has been prepared already.
        """
        for section_name, current_value in self._current_sections().items():
            if current_value != self._taken[section_name]:
                self._accelerator._reconfigure(**{section_name: current_value})
                self._taken[section_name] = current_value


def chosen_plugins(plugin: Any, several: Any) -> Plugins:  # Any: what the script gave
    """Return the given plugin, or the one that `accelerate launch --use_deepspeed` stands for; the first is selected.

    Raises: TypeError for another class.
    """
    if plugin is not None and several is not None:
        raise ValueError(
            "You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`."
        )
    if plugin is not None:
        plugin_or_plugins = plugin
    else:
        plugin_or_plugins = several
    if plugin_or_plugins is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        plugin_or_plugins = DeepSpeedPlugin()
    if isinstance(plugin_or_plugins, dict):
        plugins = list(plugin_or_plugins.values())
    elif plugin_or_plugins is None:
        plugins = []
    else:
        plugins = [plugin_or_plugins]
    if not all(isinstance(candidate, DeepSpeedPlugin) for candidate in plugins):
        raise TypeError("`deepspeed_plugin` must be a DeepSpeedPlugin object.")
    if plugins and not any(candidate.selected for candidate in plugins):
        plugins[0].select(_from_accelerator_state=True)
    checked_plugins: Plugins = plugin_or_plugins
    return checked_plugins
