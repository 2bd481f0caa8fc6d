"""The FSDP plugin of an Accelerator over its life: shown where flags asked for sharding, followed where it is changed."""

from __future__ import annotations

from dataclasses import replace

import hasten
from accelerate._impl.composed import Composed
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin


class FollowedPlugin:
    """The plugin an Accelerator shows, and the settings that were last taken from it."""

    def __init__(self, accelerator: Composed, given: FullyShardedDataParallelPlugin | None) -> None:
        self._accelerator = accelerator
        self.plugin = given
        caps = accelerator.strategy.caps
        if given is None and caps.sharded_state and not caps.owns_precision:  # engines shard without FSDP
            self.plugin = FullyShardedDataParallelPlugin.of(accelerator.config.fsdp)
        self._taken = None if self.plugin is None else self.plugin.to_hasten(say=False)

    def follow_form(self) -> None:
        """Write checkpoints in the form the plugin says now."""
        if self.plugin is not None:
            self._accelerator.saving.whole = self.plugin.whole_checkpoints

    def follow(self) -> None:
        """Take over what was changed in the plugin; libraries set wrap policies after they have made the Accelerator.

        Raises: ValueError when a model has been sharded already, or for the layout of processes, which is settled.
        """
        if self.plugin is None:
            return
        now = self.plugin.to_hasten(say=False)
        if (changed := _changed(self._taken, now)) == []:
            return
        if "hybrid_shard" in changed:
            raise ValueError(
                "sharding_strategy of the FSDP plugin changed between HYBRID and another after Accelerator() had laid the "
                "processes out. Give the plugin its strategy when it is made."
            )
        if self._accelerator.prepared.models:
            raise ValueError(
                f"{', '.join(changed)} of the FSDP plugin changed after a model was prepared, so models would be sharded "
                "differently. Change the plugin before the first prepare()."
            )
        self._taken = now
        fsdp = replace(self._accelerator.config.fsdp, **{name: getattr(now, name) for name in changed})
        self._accelerator.reconfigure(fsdp=fsdp)


def _changed(
    before: hasten.FullyShardedDataParallelPlugin | None, now: hasten.FullyShardedDataParallelPlugin
) -> list[str]:
    """The settings that shape a sharded model and are not what they were; the form of checkpoints may change freely."""
    names = [name for name in now.__dataclass_fields__ if name != "state_dict_type"]
    return [name for name in names if getattr(before, name) != getattr(now, name)]
