"""GradientState: a process-wide view on the latest Accelerator's window and the loaders being read."""

from typing import Any

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.surface.shown import shown

# Any in this file: loaders, and options as they were given.


class GradientState:
    """Where the latest Accelerator's accumulation window and loaders stand."""

    _shared_state: dict[str, Any] = AMBIENT.gradient
    plugin_kwargs: dict[str, Any]  # shown to type checkers; it lives in the shared dictionary

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        self.__dict__.setdefault("plugin_kwargs", {})
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    initialized = shown(lambda self: bool(GradientState._shared_state), "Whether this has been made.")

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        ambient.clock().force(sync_gradients)

    sync_gradients = shown(lambda self: ambient.clock().boundary, "Whether the window ends now.", _set_sync_gradients)
    num_steps = shown(lambda self: int(self.plugin_kwargs.get("num_steps", 1)), "Micro-steps per update.")
    adjust_scheduler = shown(lambda self: self.plugin_kwargs.get("adjust_scheduler", False), "Count every micro-step.")
    sync_with_dataloader = shown(lambda self: self.plugin_kwargs.get("sync_with_dataloader", True), "End with loaders.")
    active_dataloader = shown(lambda self: [None, *AMBIENT.loaders][-1], "The innermost loader being read, or None.")
    dataloader_references = shown(lambda self: [None, *AMBIENT.loaders], "The loaders being iterated, after a None.")
    in_dataloader = shown(lambda self: self.active_dataloader is not None, "Whether a loader is being iterated.")

    end_of_dataloader = shown(lambda self: getattr(self.active_dataloader, "end_of_dataloader", False), "At the end.")
    remainder = shown(
        lambda self: getattr(self.active_dataloader, "remainder", -1), "Samples of the last batch, or -1."
    )
    is_xla_gradients_synced = shown(lambda self: False, "Whether XLA has reduced gradients: it is not in use.")

    def _add_dataloader(self, dataloader: Any) -> None:
        AMBIENT.loaders.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        ambient.forget_loader(dataloader)

    @staticmethod
    def _reset_state() -> None:
        AMBIENT.clock = None
        AMBIENT.gradient.clear()
        AMBIENT.loaders.clear()

    def __repr__(self) -> str:
        return f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\nExtra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
