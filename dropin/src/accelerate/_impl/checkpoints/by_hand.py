"""Reading and writing the parts of a run's state by hand, and reading checkpoints the original package wrote."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate._impl.environment import constants
from accelerate._impl.loaders.base import POSITION
from accelerate._impl.models.other import load, save
from accelerate._impl.views.logging import get_logger
from hasten.checkpoint.export import read_model
from hasten.checkpoint.format.manifest import size_of
from hasten.errors import UnsafeCheckpointError

logger = get_logger("accelerate.checkpointing")
# Any in this file: states of the user's objects.


def _numbered_name(stem: str, index: int, suffix: str = "bin") -> str:
    if index == 0:
        return f"{stem}.{suffix}"
    return f"{stem}_{index}.{suffix}"


def _model_files(index: int) -> tuple[str, str]:
    """Return the name of a model's file, in safetensors or in torch's format."""
    return _numbered_name(
        constants.SAFE_MODEL_NAME, index, "safetensors"
    ), _numbered_name(constants.MODEL_NAME, index)


def save_custom_state(
    obj: Any, path: str, index: int = 0, save_on_each_node: bool = False
) -> None:
    save(
        obj.state_dict(),
        Path(path) / f"custom_checkpoint_{index}.pkl",
        save_on_each_node=save_on_each_node,
    )


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    obj.load_state_dict(load(f"{path}/custom_checkpoint_{index}.pkl"))


def save_accelerator_state(
    output_dir: str,
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states as single files; Accelerator.save_state writes a whole checkpoint, atomically."""
    (folder := Path(output_dir)).mkdir(parents=True, exist_ok=True)
    for object_index, model_state in enumerate(model_states):
        save(
            model_state,
            folder / _model_files(object_index)[not safe_serialization],
            save_on_each_node,
            safe_serialization,
        )
    numbered_objects = []
    for object_index, stateful in enumerate(optimizers):
        numbered_objects.append(
            (_numbered_name(constants.OPTIMIZER_NAME, object_index), stateful)
        )
    for object_index, stateful in enumerate(schedulers):
        numbered_objects.append(
            (_numbered_name(constants.SCHEDULER_NAME, object_index), stateful)
        )
    for file_name, stateful_object in [
        *numbered_objects,
        *([] if scaler is None else [(constants.SCALER_NAME, scaler)]),
    ]:
        save(
            stateful_object.state_dict(),
            folder / file_name,
            save_on_each_node=save_on_each_node,
        )
    write_for_original(folder, dataloaders, process_index, step, save_on_each_node)
    return folder


def write_for_original(
    folder: Path,
    dataloaders: list[Any],
    process_index: int,
    step: int,
    save_on_each_node: bool = False,
) -> None:
    """Write the random states of this process, and the positions of stateful loaders, as the original does."""
    file = folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl"
    torch.save({"step": step, **_random_states()}, file)
    for loader_name, loader in _stateful_loaders(dataloaders):
        loader_state = {}
        for state_key, state_value in loader.state_dict().items():
            if state_key != POSITION:
                loader_state[state_key] = state_value
        save(loader_state, folder / loader_name, save_on_each_node=save_on_each_node)


def _stateful_loaders(dataloaders: list[Any]) -> list[tuple[str, Any]]:
    """Return the loaders whose positions are saved, each with the name of its file."""
    numbered_loaders = (
        (_numbered_name("dl_state_dict", loader_index), loader)
        for loader_index, loader in enumerate(dataloaders)
    )
    stateful_loaders = []
    for loader_name, loader in numbered_loaders:
        if getattr(loader, "use_stateful_dataloader", False):
            stateful_loaders.append((loader_name, loader))
    return stateful_loaders


def load_accelerator_state(
    input_dir: str,
    models: list[nn.Module],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load states from single files, as the original package writes them; what was not there is said in the log."""
    folder = Path(input_dir)
    for index, model in enumerate(models):
        model.load_state_dict(_read_weights(folder, index), **load_model_func_kwargs)
    for stem, stateful_objects in (
        (constants.OPTIMIZER_NAME, optimizers),
        (constants.SCHEDULER_NAME, schedulers),
    ):
        for index, stateful_object in enumerate(stateful_objects):
            stateful_object.load_state_dict(load(folder / _numbered_name(stem, index)))
    if scaler is not None and (folder / constants.SCALER_NAME).exists():
        scaler.load_state_dict(load(folder / constants.SCALER_NAME))
    return _load_rest(
        folder, dataloaders, folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl"
    )


def _read_weights(folder: Path, index: int) -> Any:
    single = [
        folder / file_name
        for file_name in _model_files(index)
        if (folder / file_name).exists()
    ]
    if not single and not any(folder.glob("*.index.json")):
        raise FileNotFoundError(
            errno.ENOENT,
            os.strerror(errno.ENOENT),
            str(folder / _model_files(index)[1]),
        )
    return read_model(single[0] if single else folder)


def _load_rest(folder: Path, dataloaders: list[Any], file: Path) -> dict[str, Any]:
    """Restore positions and random states and give the step count; a file that only pickle can read is refused in words."""
    for loader_name, loader in _stateful_loaders(dataloaders):
        if (folder / loader_name).exists():
            loader.load_state_dict(load(folder / loader_name))
    if not file.exists():
        logger.warning(
            "random states were not restored: there is no %s",
            file.name,
            main_process_only=False,
        )
        return {}
    states = _read_random_states(file)
    _restore_random_states(states)
    return {"step": states["step"]} if "step" in states else {}


def step_in(folder: Path, process_index: int) -> int:
    """Return the micro-steps that a process had made in its epoch; 0 where none are known."""
    file = folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl"
    if file.is_file():
        return int(_read_random_states(file).get("step", 0))
    return 0


def _random_states() -> dict[str, Any]:
    """Return the state of all generators as the original stores it in `random_states_N.pkl`."""
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
    }
    states["torch_manual_seed"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states


def _read_random_states(file: Path) -> dict[str, Any]:
    """Return the content of a `random_states_N.pkl`, read without running code.

    Raises: UnsafeCheckpointError for a damaged file, or one that only pickle can read.
    """
    safe: list[Any] = [
        np.array([0]).__reduce__()[0],
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]
    try:
        size_of(file)  # refuses pipes, whose readers would wait
        with torch.serialization.safe_globals(safe):
            states: dict[str, Any] = torch.load(file, weights_only=True)
            return states
    # torch.load raises any type for a damaged or hostile file; all end in one refusal
    except Exception as error:
        raise UnsafeCheckpointError(
            f"{file} is damaged or can only be read by running code from it ({error}); random states were not restored. Remove the "
            "file to continue without them."
        ) from error


def _restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the generators whose states the original stored."""
    if "random_state" in states:
        version, words, gauss_next = states["random_state"]
        random.setstate((version, tuple(words), gauss_next))
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
