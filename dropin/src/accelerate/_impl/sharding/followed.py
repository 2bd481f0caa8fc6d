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
        self, accelerator: Composed, given: FullyShardedDataParallelPlugin | None
    ) -> None:
        # which owns this object
        self._accelerator: Composed = weakref.proxy(accelerator)
        self.plugin = given
        caps = components(accelerator).strategy.caps
        # engines shard without FSDP
        if given is None and caps.sharded_state and not caps.owns_precision:
            self.plugin = FullyShardedDataParallelPlugin.of(accelerator.config.fsdp)
        if self.plugin is not None:
            self.plugin.fsdp_version = 2  # which the model is sharded by: libraries ask
        self._taken = None if self.plugin is None else self.plugin.to_hasten(say=False)

    def follow(self) -> None:
        """Take over what was changed in the plugin; libraries set wrap policies after they have made the Accelerator.

        Raises: ValueError when a model has been sharded already, or for the layout of processes, which is settled.
        """
        if self.plugin is None:
            return
        now = self.plugin.to_hasten(say=False)
        # that may change freely
        names = [name for name in now.__dataclass_fields__ if name != "state_dict_type"]
        changed = {
            name: getattr(now, name)
            for name in names
            if getattr(self._taken, name) != getattr(now, name)
        }
        if "hybrid_shard" in changed:
            raise ValueError(message("strategy_too_late"))
        if changed:
            self._accelerator._reconfigure(
                fsdp=replace(self._accelerator.config.fsdp, **changed)
            )
            self._taken = now


class FollowedSections:
    """The settings that were last taken from the DeepSpeed plugin in use and from the options of DistributedDataParallel."""

    def __init__(self, accelerator: Composed, plugins: Plugins) -> None:
        # which owns this object
        self._accelerator: Composed = weakref.proxy(accelerator)
        self.plugins = plugins
        self._taken = {
            **self._now(),
            "deepspeed": None
            if plugins is None
            else accelerator.config.section(deepspeed_settings.DeepSpeedPlugin),
        }

    def _now(self) -> dict[str, Any]:
        plugin, handler = active_plugin(self.plugins), self._accelerator.ddp_handler
        ddp = (handler or DistributedDataParallelKwargs()).to_hasten()
        return {"ddp": ddp, "deepspeed": None if plugin is None else plugin.to_hasten()}

    def follow(self) -> None:
        """Take over what is set now; libraries replace options and fill "auto" values after Accelerator().

        Raises: ValueError when a model has been prepared already.
        """
        for name, now in self._now().items():
            if now != self._taken[name]:
                self._accelerator._reconfigure(**{name: now})
                self._taken[name] = now


def chosen_plugins(given: Any, several: Any) -> Plugins:  # Any: what the script gave
    """Return the given plugin, or the one that `accelerate launch --use_deepspeed` stands for; the first is selected.

    Raises: TypeError for another class.
    """
    if given is not None and several is not None:
        raise ValueError(
            "You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`."
        )
    found = given if given is not None else several
    if found is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        found = DeepSpeedPlugin()
    plugins = (
        list(found.values())
        if isinstance(found, dict)
        else []
        if found is None
        else [found]
    )
    if not all(isinstance(one, DeepSpeedPlugin) for one in plugins):
        raise TypeError("`deepspeed_plugin` must be a DeepSpeedPlugin object.")
    if plugins and not any(one.selected for one in plugins):
        plugins[0].select(_from_accelerator_state=True)
    made: Plugins = found
    return made
