"""The DeepSpeed plugins of an Accelerator over its life: chosen, shown, and followed where they are changed."""

from __future__ import annotations

from typing import Any

import hasten
from accelerate._impl.composed import Composed
from accelerate._impl.environment.variables import parse_flag_from_env
from accelerate._impl.settings.deepspeed_plugin import DeepSpeedPlugin


def chosen(given: Any, several: Any) -> DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None:
    """What Accelerator() was given, or the plugin that `accelerate launch --use_deepspeed` stands for; the first is selected.

    Any: what the script gave. Raises: TypeError for another class.
    """
    if given is not None and several is not None:
        raise ValueError("You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`.")
    plugins = given if given is not None else several
    if plugins is None:
        if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            return None
        plugins = DeepSpeedPlugin()
    for one in plugins.values() if isinstance(plugins, dict) else (plugins,):
        if not isinstance(one, DeepSpeedPlugin):
            raise TypeError("`deepspeed_plugin` must be a DeepSpeedPlugin object.")
    found: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] = plugins
    if isinstance(found, dict) and not any(one.selected for one in found.values()):
        next(iter(found.values())).select(_from_accelerator_state=True)
    elif isinstance(found, DeepSpeedPlugin):
        found.select(_from_accelerator_state=True)
    return found


def active(plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None) -> DeepSpeedPlugin | None:
    """The plugin in use."""
    if isinstance(plugins, dict):
        return next(one for one in plugins.values() if one.selected)
    return plugins


class FollowedEngine:
    """The settings that were last taken from the plugin in use."""

    def __init__(self, accelerator: Composed, plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None) -> None:
        self._accelerator = accelerator
        self.plugins = plugins
        self._taken: hasten.DeepSpeedPlugin | None = None if plugins is None else accelerator.config.deepspeed

    def follow(self) -> None:
        """Take over the plugin's configuration as it is now; libraries fill its "auto" values after Accelerator().

        Raises: ValueError when another plugin was selected after an engine was started.
        """
        plugin = active(self.plugins)
        if plugin is None:
            return
        now = plugin.to_hasten()
        if now == self._taken:
            return
        if self._accelerator.prepared.models:
            raise ValueError(
                "the DeepSpeed configuration changed after a model was prepared, and an engine keeps the one it was started "
                "with. Make another Accelerator for it, or change the configuration before the first prepare()."
            )
        self._taken = now
        self._accelerator.reconfigure(deepspeed=now)
