"""Methods of the established Accelerator that save and load runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._impl.checkpoints import by_hand as checkpointing
from accelerate._impl.checkpoints.fsdp_files import load_original_parts
from accelerate._impl.checkpoints.hooks import StateHooks
from accelerate._impl.sharding.followed import FollowedPlugin
from hasten.accelerator.state_hooks import HookHandle

if TYPE_CHECKING:
    import hasten
    from accelerate._impl.settings.general import ProjectConfiguration

    Base = hasten.Accelerator
else:
    Base = object

# Any in this file: the user's objects, hooks and keywords.


class SavingFace(Base):
    """save_state, load_state and what takes part in them."""

    if TYPE_CHECKING:
        project_configuration: ProjectConfiguration
        _hooks: StateHooks
        _sharding: FollowedPlugin

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:  # type: ignore[override]  # the established keywords
        """Save everything the run needs to go on; where it lies. Ranks: every rank."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not automatic:  # quirk: AUTOMATIC_NAMING_OPT_IN
            _refuse_no_folder()
        self._sharding.follow_form()
        with self._hooks.errors_as_raised():
            place = super().save_state(None if automatic else output_dir, safe_serialization)
        self.project_configuration.iteration = self.saving.iteration
        return place

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:  # type: ignore[override]  # the established keywords
        """Put the run back to where a checkpoint was saved. Ranks: every rank."""
        _check_folder(input_dir, self.project_configuration.automatic_checkpoint_naming)
        if input_dir is not None and not (Path(input_dir) / "manifest.json").exists():
            self._load_original(str(input_dir), load_model_func_kwargs)
            return
        with self._hooks.errors_as_raised():
            super().load_state(input_dir, strict=load_model_func_kwargs.get("strict", True))
        self.project_configuration.iteration = self.saving.iteration

    def register_save_state_pre_hook(self, hook: Any) -> HookHandle:
        """Call `hook(models, weights, folder)` before each save; what it raises is what save_state raises."""
        return super().register_save_state_pre_hook(self._hooks.watched(hook))

    def register_load_state_pre_hook(self, hook: Any) -> HookHandle:
        """Call `hook(models, folder)` before each load; what it raises is what load_state raises."""
        return super().register_load_state_pre_hook(self._hooks.watched(hook))

    def _load_original(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Read a checkpoint that the original package wrote."""
        models = [self.unwrap_model(model) for model in self.prepared.models]
        for hook in list(self.saving.load_hooks.values()):
            hook(models, folder)
        done, sharded = self.prepared, self.strategy.caps.sharded_state
        if sharded:
            load_original_parts(self, Path(folder), models)
        optimizers: list[Any] = [] if sharded else list(done.optimizers)
        checkpointing.load_accelerator_state(
            folder,
            [] if sharded else models,
            optimizers,
            done.schedulers,
            done.loaders,
            self.process_index,
            self.precision.scaler,
            **kwargs,
        )
        for index, thing in enumerate(self.saving.registered):
            checkpointing.load_custom_state(thing, folder, index)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects with the run."""
        needed = ("state_dict", "load_state_dict")
        wrong = [at for at, one in enumerate(objects) if not all(hasattr(one, name) for name in needed)]
        if wrong:
            lines = "".join(f"\n\t- Item at index {at}, `{type(objects[at]).__name__}`" for at in wrong)
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. "
                f"The following inputs are invalid:{lines}"
            )
        super().register_for_checkpointing(*objects)


def _refuse_no_folder() -> None:
    raise TypeError(
        "expected str, bytes or os.PathLike object, not NoneType: save_state() needs a folder, or "
        "ProjectConfiguration(automatic_checkpoint_naming=True)"
    )


def _check_folder(given: Any, automatic: bool) -> None:
    """Raise a ValueError where there is nothing to load from."""
    if given is None and not automatic:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    if given is not None and not Path(given).expanduser().is_dir():
        raise ValueError(f"Tried to find {given} but folder does not exist")
