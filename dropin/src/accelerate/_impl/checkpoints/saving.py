"""Methods of the established Accelerator that save and load runs; what hooks raise reaches the script as it was raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate._impl.checkpoints import by_hand as checkpointing
from accelerate._impl.checkpoints.fsdp import load_original_parts
from accelerate._impl.composed import Composed
from hasten.errors import HookError

# Any in this file: the user's objects, hooks and keywords.


@contextmanager
def _errors_of_hooks_as_raised() -> Iterator[None]:
    """A block that raises a hook's own error on its rank; the others get the HookError that names it."""
    try:
        yield
    except HookError as error:
        found: BaseException | None = error
        while isinstance(found, HookError):
            found = found.__cause__
        raise found or error from None


class SavingFace(Composed):
    """save_state, load_state and what takes part in them."""

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:  # type: ignore[override]  # the established keywords
        """Save everything the run needs to go on; where it lies. Ranks: every rank."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not automatic:  # quirk: AUTOMATIC_NAMING_OPT_IN
            _refuse_no_folder()
        self._sharding.follow_form()
        with _errors_of_hooks_as_raised():
            place = super().save_state(None if automatic else output_dir, safe_serialization)
        self.project_configuration.iteration = self._saving.iteration
        return place

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:  # type: ignore[override]  # the established keywords
        """Put the run back to where a checkpoint was saved. Ranks: every rank."""
        _check_folder(input_dir, self.project_configuration.automatic_checkpoint_naming)
        if input_dir is not None and not (Path(input_dir) / "manifest.json").exists():
            self._load_original(str(input_dir), load_model_func_kwargs)
            return
        with _errors_of_hooks_as_raised():
            super().load_state(input_dir, strict=load_model_func_kwargs.get("strict", True))
        self.project_configuration.iteration = self._saving.iteration

    def _load_original(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Read a checkpoint that the original package wrote."""
        models = [self.unwrap_model(model) for model in self._prepared.models]
        for hook in list(self._saving.load_hooks.values()):
            hook(models, folder)
        done, sharded = self._prepared, self._strategy.caps.sharded_state
        if sharded:
            load_original_parts(self, Path(folder), models)
        own: tuple[Any, Any] = ([], []) if sharded else (models, done.optimizers)
        rest: tuple[Any, ...] = (done.schedulers, done.loaders, self.process_index, self._precision.scaler)
        checkpointing.load_accelerator_state(folder, *own, *rest, **kwargs)
        for index, thing in enumerate(self._saving.registered):
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
