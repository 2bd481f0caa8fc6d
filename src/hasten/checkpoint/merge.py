"""Turning checkpoints into other things: one model out of many shards, and other tools' folders into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint.base import CheckpointStore, Component, StateTree
from hasten.checkpoint.export import read_model, save_model
from hasten.checkpoint.format.formats import load_torch
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.format.packing import pack
from hasten.checkpoint.format.torch_folder import is_torch_folder, whole_tensors
from hasten.checkpoint.inspect import find, tensors_of
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.store.locate import locate
from hasten.checkpoint.store.occupied import FOREIGN, free_target, listed
from hasten.checkpoint.store.paths import check_local
from hasten.checkpoint.writer import finish, prepare, start
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointError, IncompleteCheckpointError


def merge(
    place: str,
    output: str | Path,
    component: str = "model",
    max_shard_size: float | str = "10GB",
    safe_serialization: bool = True,
    overwrite: bool = False,
) -> list[str]:
    """Write the whole model of a (sharded) checkpoint in the Hub layout; the names of the files.

    A folder of torch.distributed.checkpoint is taken too; its tensors are the model.
    Raises: CheckpointError when the output folder holds a checkpoint or a model, unless `overwrite`.
    """
    target = check_local(output, "the folder for the model")
    if is_torch_folder(Path(place)):
        with free_target(target, [Path(place)], overwrite):
            return save_model(_unprefixed(whole_tensors(Path(place))), target, max_shard_size, safe_serialization)
    store, name = find(place)
    with open_checkpoint(store, name, LocalComm()) as checkpoint:
        kinds = {key: record.kind for key, record in checkpoint.manifest.components.items()}
    if kinds.get(component) != "model":
        models = sorted(key for key, kind in kinds.items() if kind == "model")
        raise CheckpointError(
            f"{place} has no model called {component!r}; it has {models}. Choose one with --component."
        )
    sources = [] if store.remote else [Path(store.address) / name]
    with free_target(target, sources, overwrite):
        return save_model(tensors_of(place, component), target, max_shard_size, safe_serialization)


def _unprefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "model." if all(name.startswith("model.") for name in state) else ""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def convert(source: str | Path, target: str | Path, allow_pickle: bool = False, overwrite: bool = False) -> list[str]:
    """Make a checkpoint of hasten from a folder of Hugging Face Accelerate (or of plain torch files); notes on it.

    Model, optimizers, schedulers, scaler and registered objects are converted; random states are drawn anew, since other
    tools pickle them. Raises: UnsafeCheckpointError for files that need pickle, unless it is allowed; CheckpointError when
    the source is a checkpoint of hasten, and when the target holds something, unless `overwrite`.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise IncompleteCheckpointError(f"{source} is not a folder. Give the folder that another tool saved.")
    if listed(folder):
        raise CheckpointError(
            f"{source} is a checkpoint of hasten already, and converting it would drop its loaders, counters, random states and registered "
            "objects. Nothing was changed. Load it as it is, or copy the folder."
        )
    store, name = locate(target)
    if store.remote:
        _check_free(store, name, overwrite)
        return _convert(folder, store, name, allow_pickle)
    with free_target(Path(store.address) / name, [folder], overwrite):
        return _convert(folder, store, name, allow_pickle)


def _check_free(store: CheckpointStore, name: str, overwrite: bool) -> None:
    if not overwrite and name in store.names():
        raise CheckpointError(
            f"{store.address}/{name} already holds a checkpoint, which would be lost. Nothing was changed. Give another URL, or --overwrite "
            "to replace it."
        )


def _convert(folder: Path, store: CheckpointStore, name: str, allow_pickle: bool) -> list[str]:
    components: dict[str, Component] = {}
    for key, state in _models(folder, allow_pickle).items():
        components[key] = Component(state, None, "model")
    notes = []
    for path in sorted(folder.iterdir()):
        if FOREIGN.fullmatch(path.name):
            components[path.stem] = _component(path, allow_pickle)
        elif path.suffix in (".pkl", ".bin", ".pt") and not path.name.startswith(("pytorch_model", "random_states")):
            notes.append(f"{path.name} was left out: it is not known what it holds")
    if not components:
        raise IncompleteCheckpointError(
            f"{folder} holds nothing that can be converted: no weights, no optimizer. Give the folder that another tool saved."
        )
    notes.append("random states and data positions are not converted: the run continues with new random numbers")
    comm = LocalComm()
    group = start(store, comm, name)
    header = Manifest(notes={"converted_from": folder.name, "partial": True})
    finish(prepare(StateTree(components), group, comm), group, comm, header)
    return notes


def _models(folder: Path, allow_pickle: bool) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    with suppress(IncompleteCheckpointError):  # a folder with an optimizer alone, or with numbered models
        found["model"] = read_model(folder, allow_pickle)
    for path in sorted((*folder.glob("model_[0-9]*.safetensors"), *folder.glob("pytorch_model_[0-9]*.bin"))):
        found[path.stem.removeprefix("pytorch_")] = read_model(path, allow_pickle)
    return found


def _component(path: Path, allow_pickle: bool) -> Component:
    kind = "object" if path.name.startswith("custom") else path.stem.rstrip("_0123456789")
    value = load_torch(path, allow_pickle)
    data, tensors = pack(value)
    plain = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return Component(plain, data, kind, "safetensors" if kind == "object" else "torch")
