"""GradientState: a process-wide view on the latest Accelerator's window and the loaders being read."""

from __future__ import annotations

from typing import Any

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.surface.shown import shown

# Any in this file: loaders, and options as they were given.


class GradientState:
    """Where the latest Accelerator's accumulation window and loaders stand."""

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        if gradient_accumulation_plugin is not None:
            AMBIENT.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    _shared_state = shown(
        lambda self: {name: getattr(self, name) for name in ("sync_gradients", "plugin_kwargs")},
        "As the original has it.",
    )
    plugin_kwargs = shown(lambda self: AMBIENT.plugin_kwargs, "The options of accumulation that were given.")
    initialized = shown(lambda self: True, "Always: the view needs no start.")

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        ambient.clock().force(sync_gradients)

    sync_gradients = shown(
        lambda self: ambient.clock().boundary, "Whether the current micro-step ends its window.", _set_sync_gradients
    )
    num_steps = shown(lambda self: int(self.plugin_kwargs.get("num_steps", 1)), "Micro-steps per update.")
    adjust_scheduler = shown(
        lambda self: bool(self.plugin_kwargs.get("adjust_scheduler", False)), "Whether schedulers count updates."
    )
    sync_with_dataloader = shown(
        lambda self: bool(self.plugin_kwargs.get("sync_with_dataloader", True)),
        "Whether a window ends with its loader.",
    )
    active_dataloader = shown(
        lambda self: AMBIENT.loaders[-1] if AMBIENT.loaders else None, "The innermost loader being iterated, or None."
    )
    dataloader_references = shown(lambda self: [None, *AMBIENT.loaders], "The loaders being iterated, after a None.")
    in_dataloader = shown(lambda self: self.active_dataloader is not None, "Whether a loader is being iterated.")

    end_of_dataloader = shown(
        lambda self: bool(self.in_dataloader and self.active_dataloader.end_of_dataloader),
        "Whether the batch in hand is the loader's last.",
    )
    remainder = shown(
        lambda self: int(self.active_dataloader.remainder) if self.in_dataloader else -1,
        "Samples of the last global batch; -1 where that is not known.",
    )
    is_xla_gradients_synced = shown(lambda self: False, "Whether XLA has reduced gradients: it is not in use.")

    def _add_dataloader(self, dataloader: Any) -> None:
        AMBIENT.loaders.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        ambient.forget_loader(dataloader)

    @staticmethod
    def _reset_state() -> None:
        AMBIENT.clock = None
        AMBIENT.plugin_kwargs = {}
        AMBIENT.loaders.clear()

    def __repr__(self) -> str:
        return f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\nExtra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
