"""Reading and writing the parts of a run's state by hand, and reading checkpoints the original package wrote."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate._impl.environment import constants
from accelerate._impl.models.other import load, save
from accelerate._impl.views.logging import get_logger
from hasten.checkpoint.export import read_model
from hasten.checkpoint.format.manifest import size_of
from hasten.errors import UnsafeCheckpointError

logger = get_logger("accelerate.checkpointing")
# Any in this file: states of the user's objects.


def _numbered(stem: str, index: int, suffix: str = "bin") -> str:
    return f"{stem}.{suffix}" if index == 0 else f"{stem}_{index}.{suffix}"


def _model_files(index: int) -> tuple[str, str]:
    """How a model's file is called, in safetensors and in torch's format."""
    return _numbered(constants.SAFE_MODEL_NAME, index, "safetensors"), _numbered(constants.MODEL_NAME, index)


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write an object's state as custom checkpoint number `index`."""
    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load an object's state from custom checkpoint number `index`."""
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
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for index, state in enumerate(model_states):
        safe, plain = _model_files(index)
        save(state, folder / (safe if safe_serialization else plain), save_on_each_node, safe_serialization)
    rest = [(_numbered(constants.OPTIMIZER_NAME, index), one) for index, one in enumerate(optimizers)]
    rest += [(_numbered(constants.SCHEDULER_NAME, index), one) for index, one in enumerate(schedulers)]
    for name, thing in [*rest, *([] if scaler is None else [(constants.SCALER_NAME, scaler)])]:
        save(thing.state_dict(), folder / name, save_on_each_node=save_on_each_node)
    return folder


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
        single = [folder / name for name in _model_files(index) if (folder / name).exists()]
        model.load_state_dict(read_model(single[0] if single else folder), **load_model_func_kwargs)
    for stem, things in ((constants.OPTIMIZER_NAME, optimizers), (constants.SCHEDULER_NAME, schedulers)):
        for index, thing in enumerate(things):
            thing.load_state_dict(load(folder / _numbered(stem, index)))
    if scaler is not None and (folder / constants.SCALER_NAME).exists():
        scaler.load_state_dict(load(folder / constants.SCALER_NAME))
    return _random_states(folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl")


def _random_states(file: Path) -> dict[str, Any]:
    """Put the random states back and give the step count; a file that only pickle can read is refused in words."""
    if not file.exists():
        logger.warning(
            f"{file.name} is not in the checkpoint, so random states were not restored", main_process_only=False
        )
        return {}
    states = _read_states(file)
    _restore(states)
    return {"step": states["step"]} if "step" in states else {}


def _read_states(file: Path) -> dict[str, Any]:
    safe: list[Any] = [np.array([0]).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    try:
        size_of(file)  # a pipe would be waited for
        with torch.serialization.safe_globals(safe):
            states: dict[str, Any] = torch.load(file, weights_only=True)
            return states
    except Exception as error:  # torch.load raises any type for a damaged or hostile file; all end in one refusal
        raise UnsafeCheckpointError(
            f"{file} is damaged or can only be read by running code from it ({error}); random states were not restored. Remove the "
            "file to go on without them."
        ) from error


def _restore(states: dict[str, Any]) -> None:
    if "random_state" in states:
        version, words, rest = states["random_state"]
        random.setstate((version, tuple(words), rest))
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
