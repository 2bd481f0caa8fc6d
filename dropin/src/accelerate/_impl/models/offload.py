"""Weights kept on disk."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from accelerate._impl.surface.homes import settle
from hasten.bigmodel import offload_files

# Any in this file: entries of an index.


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | PathLike[str],
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write one weight to a folder."""
    return offload_files.offload_weight(weight, weight_name, Path(offload_folder), index)


def load_offloaded_weight(weight_file: str | PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Read one weight."""
    return offload_files.load_offloaded_weight(Path(weight_file), weight_info)


def save_offload_index(index: Mapping[str, Any], offload_folder: str | PathLike[str]) -> None:
    """Add entries to a folder's index."""
    offload_files.save_offload_index(index, Path(offload_folder))


def offload_state_dict(save_dir: str | PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write the weights of a state dict to a folder."""
    offload_files.offload_state_dict(Path(save_dir), state_dict)


def extract_submodules_state_dict(state_dict: Mapping[str, Tensor], submodule_names: list[str]) -> dict[str, Tensor]:
    """The entries that belong to some modules."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in submodule_names)
    }


settle(__name__, "accelerate.utils.offload")
