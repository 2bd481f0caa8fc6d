"""Methods of the established Accelerator that save and load runs; what hooks raise reaches the script as it was raised."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate._impl.composed import Composed
from accelerate._impl.environment.constants import FSDP_MODEL_NAME
from accelerate._impl.models.other import save, tell_shared
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.views.logging import get_logger
from hasten.errors import CheckpointError, HookError, OtherModelError

# Any in this file: the user's objects, hooks and keywords.
logger = get_logger("accelerate.accelerator")
by_hand = Deferred("accelerate._impl.checkpoints.by_hand")
fsdp = Deferred("accelerate._impl.checkpoints.fsdp")
modeling = Deferred("accelerate._impl.models.modeling")
manifests = Deferred("accelerate._impl.checkpoints.manifests")
writer = Deferred("hasten.checkpoint.save")
# the original has no such files
_HIDDEN = frozenset({"loader", "object", "progress", "random"})


@contextmanager
def _errors_of_hooks_as_raised() -> Iterator[None]:
    """A block that raises a hook's own error on its rank; the others get the HookError that names it."""
    try:
        yield
    except HookError as error:
        hook_cause: BaseException | None = error
        while isinstance(hook_cause, HookError):
            hook_cause = hook_cause.__cause__
        raise hook_cause or error from None


class SavingFace(Composed):
    """save_state, load_state and what takes part in them."""

    def save_state(  # type: ignore[override]  # the established keywords
        self,
        output_dir: Any = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything the run needs to go on; where it lies. Ranks: every rank."""
        self._saving.project = self.project_configuration.over(
            partial(replace, self._saving.project)
        )
        automatic = self.project_configuration.automatic_checkpoint_naming
        number = self.project_configuration.iteration
        if automatic:
            self._saving.iteration = number
            output_dir = Path(
                self.project_dir or "", "checkpoints", f"checkpoint_{number}"
            )
        if output_dir is None:  # quirk: AUTOMATIC_NAMING_OPT_IN
            raise TypeError(message("save_without_folder"))
        if automatic:
            if output_dir.exists():
                raise ValueError(message("checkpoint_exists", output_dir, number))
            self._log_deletions(output_dir.parent)
        logger.info(f"Saving current state to {output_dir}")
        if safe_serialization:
            for model in self._prepared.models:
                tell_shared(self.unwrap_model(model).state_dict())
        self._saving.extra_files = self._write_for_original
        # it may have changed
        self._saving.whole = saves_whole = getattr(
            self._sharding.plugin, "whole_checkpoints", False
        )
        layout = writer.FileLayout(hidden=_HIDDEN)
        if saves_whole:
            layout = replace(layout, torch_model=FSDP_MODEL_NAME)
        self._saving.layout = layout
        self._saving.keeps_exports = False
        if automatic:
            folders_of_ranks = [None]
        else:
            folders_of_ranks = self.ctx.world.all_gather_object(os.fspath(output_dir))
        with _errors_of_hooks_as_raised():
            checkpoint_folder = super().save_state(
                folders_of_ranks[0], safe_serialization and not saves_whole
            )
        if len(set(folders_of_ranks)) > 1:  # quirk: FOLDER_OF_EACH_PROCESS
            if os.fspath(output_dir) != folders_of_ranks[0]:
                shutil.copytree(checkpoint_folder, output_dir, dirs_exist_ok=True)
            self.wait_for_everyone()
        self.project_configuration.iteration = self._saving.iteration
        if automatic:
            return Path(output_dir).with_name(Path(checkpoint_folder).name)
        return Path(output_dir).expanduser()

    def _log_deletions(self, folder: Path) -> None:
        limit = self.project_configuration.total_limit
        num_checkpoints = len(list(folder.glob("checkpoint_*"))) + 1
        if limit is not None and num_checkpoints > limit:
            logger.warning(
                f"Deleting {num_checkpoints - limit} checkpoints to make room for new checkpoint."
            )

    def _write_for_original(self, folder: Path) -> None:
        each_node = self.project_configuration.save_on_each_node
        by_hand.write_for_original(
            folder, self._prepared.loaders, self.process_index, self.step, each_node
        )
        for index, custom_object in enumerate(self._saving.registered):
            by_hand.save_custom_state(custom_object, str(folder), index, each_node)

    def save_model(
        self, model: Any, save_directory: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Write the weights of a prepared model in the Hub's layout, also where a checkpoint lies. Ranks: every rank."""
        if Path(save_directory).is_file():
            logger.error(
                f"Provided path ({save_directory}) should be a directory, not a file"
            )
            return
        is_offloaded = any(map(modeling.has_offloaded_params, model.modules()))
        if (
            any(parameter.is_meta for parameter in model.parameters())
            and not is_offloaded
        ):
            raise RuntimeError(
                "You can't save the model since some parameters are on the meta device."
            )
        if is_offloaded:
            model_state = modeling.get_state_dict_offloaded_model(model)
        else:
            model_state = self.get_state_dict(model)
        if self._writes and (args[1:2] or (kwargs.get("safe_serialization", True),))[0]:
            tell_shared(
                model_state if is_offloaded else self.unwrap_model(model).state_dict()
            )
        with (
            manifests.hide_manifest(Path(save_directory))
            if self._writes
            else nullcontext()
        ):
            self._export_weights(model_state, save_directory, *args, **kwargs)

    def load_state(  # type: ignore[override]  # the established keywords
        self,
        input_dir: Any = None,
        load_kwargs: Any = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Put the run back to where a checkpoint was saved. Ranks: every rank."""
        input_dir = _given_folder(
            input_dir, self.project_configuration.automatic_checkpoint_naming
        )
        if load_model_func_kwargs.pop("map_location", None) not in (
            None,
            "cpu",
            "on_device",
        ):
            raise TypeError(message("map_location"))
        if input_dir is not None and not (input_dir / "manifest.json").exists():
            self._load_original(str(input_dir), load_model_func_kwargs)
            return
        if input_dir is None:
            self._saving.project = self.project_configuration.over(
                partial(replace, self._saving.project)
            )
            # raises where there is no such folder
            next(Path(self.project_dir or "", "checkpoints").iterdir(), None)
        folder = input_dir or Path(self._saving.newest() or "")
        logger.info(f"Loading states from {folder}")
        num_stored = len(list(folder.glob("custom_checkpoint_*.pkl")))
        registered = len(self._saving.registered)
        if num_stored != registered:
            raise RuntimeError(message("other_objects", folder, num_stored, registered))
        with _errors_of_hooks_as_raised():
            try:
                super().load_state(
                    input_dir, strict=load_model_func_kwargs.get("strict", True)
                )
            # torch casts to another dtype, and has its own words for another model
            except CheckpointError as error:
                is_other_model = (
                    isinstance(error, OtherModelError)
                    and not self._strategy.caps.sharded_state
                )
                if input_dir is None or not (
                    is_other_model or manifests.was_rewritten(input_dir)
                ):
                    raise
                self._load_original(str(input_dir), load_model_func_kwargs)
                return
        self.step = self._counted = by_hand.step_in(folder, self.process_index)
        self.project_configuration.iteration = self._saving.iteration

    def _load_original(self, folder: str, kwargs: dict[str, Any]) -> None:
        """Read a checkpoint that the original package wrote."""
        models = list(map(self.unwrap_model, self._prepared.models))
        for hook in list(self._saving.load_hooks.values()):
            hook(models, folder)
        done = self._prepared
        sharded = self._strategy.caps.sharded_state
        if sharded:
            fsdp.load_original_parts(self, Path(folder), models)
        if sharded:
            models_and_optimizers: tuple[Any, Any] = ([], [])
        else:
            models_and_optimizers = (models, done.optimizers)
        remaining_arguments: tuple[Any, ...] = (
            done.schedulers,
            done.loaders,
            self.process_index,
            self._precision.scaler,
        )
        self.step = by_hand.load_accelerator_state(
            folder, *models_and_optimizers, *remaining_arguments, **kwargs
        ).get("step", 0)
        for index, custom_object in enumerate(self._saving.registered):
            by_hand.load_custom_state(custom_object, folder, index)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file on the main process, also where a checkpoint lies. Ranks: any."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        needed = ("state_dict", "load_state_dict")
        bad_indices = []
        for object_index, candidate in enumerate(objects):
            if not all(hasattr(candidate, method_name) for method_name in needed):
                bad_indices.append(object_index)
        if bad_indices:
            lines = "".join(
                f"\n\t- Item at index {object_index}, `{type(objects[object_index]).__name__}`"
                for object_index in bad_indices
            )
            raise ValueError(message("objects_without_state", lines))
        super().register_for_checkpointing(*objects)


def _given_folder(input_dir: Any, automatic: bool) -> Path | None:
    """Return the folder that was given, None for the newest. Raises: ValueError where there is nothing to load from."""
    if input_dir is None and not automatic:
        raise ValueError(
            "No input_dir provided and automatic checkpoint naming is disabled."
        )
    if input_dir is not None and not Path(input_dir).expanduser().is_dir():
        raise ValueError(f"Tried to find {input_dir} but folder does not exist")
    if input_dir is None:
        return None
    return Path(input_dir).expanduser()
