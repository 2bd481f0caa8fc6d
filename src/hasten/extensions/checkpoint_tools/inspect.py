"""Inspection and conversion of checkpoints: listing, verification, comparison, merging shards into one model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoint.base import CheckpointStore, Component, StateTree
from hasten.checkpoint.export import is_checkpoint, read_model, save_model
from hasten.checkpoint.format.formats import load_torch
from hasten.checkpoint.format.manifest import MANIFEST_NAME, Manifest, checkpoint_number
from hasten.checkpoint.format.packing import pack
from hasten.checkpoint.reader import (
    Checkpoint,
    Progress,
    open_checkpoint,
    read_one_version,
    verify_files,
)
from hasten.checkpoint.reshard import join_pieces
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.local_store import check_local, is_url, locate, open_store
from hasten.checkpoint.store.occupied import (
    FOREIGN_FILE,
    WEIGHT_FILE,
    read_file_records,
)
from hasten.comm.local import LocalComm
from hasten.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from hasten.extensions.checkpoint_tools.torch_folder import (
    TORCH_TABLE_NAME,
    is_torch_folder,
    whole_tensors,
)
from hasten.state.load_source import find_newest


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint in a listing."""

    name: str
    complete: bool
    step: int | None = None
    world_size: int | None = None
    num_bytes: int = 0
    created_s: float = 0.0
    metrics: Mapping[str, float | None] | None = None
    problem: str = ""


def find_all(location: str) -> list[tuple[CheckpointStore, str]]:
    """Return every checkpoint in a folder or URL and in `checkpoints` inside it, with its store, oldest first."""
    checkpoints: list[tuple[CheckpointStore, str]] = []
    for store in (
        open_store(location),
        open_store(f"{location.rstrip('/')}/checkpoints"),
    ):
        checkpoint_names = sorted(
            store.names(),
            key=lambda checkpoint_name: (
                checkpoint_number(checkpoint_name) or -1,
                checkpoint_name,
            ),
        )
        checkpoints += zip(repeat(store), checkpoint_names)
    if not checkpoints:
        store, checkpoint_name = locate(location)
        if checkpoint_name in store.names():
            checkpoints.append((store, checkpoint_name))
    return checkpoints


def make_row(store: CheckpointStore, checkpoint_name: str) -> CheckpointRow:
    """Return the entry of a checkpoint in a listing, also of a damaged one."""
    try:
        manifest = store.check(checkpoint_name)
    except CheckpointError as error:
        return CheckpointRow(checkpoint_name, complete=False, problem=str(error))
    return CheckpointRow(
        checkpoint_name,
        True,
        manifest.step,
        manifest.world_size,
        manifest.num_bytes,
        manifest.created_s,
        manifest.metrics,
    )


def find_checkpoint(location: str) -> tuple[CheckpointStore, str]:
    """Return the checkpoint at a path: the path itself, or the newest complete one in a folder of checkpoints."""
    store, checkpoint_name = locate(location)
    if checkpoint_name in store.names():
        return store, checkpoint_name
    for inner_location in (location, f"{location.rstrip('/')}/checkpoints"):
        inner_store = open_store(inner_location)
        newest_name = find_newest(inner_store)
        if newest_name is not None:
            return inner_store, newest_name
    raise IncompleteCheckpointError(
        f"{location} is not a complete hasten checkpoint and holds none (no {MANIFEST_NAME}). Give another folder, or "
        "convert it with `hasten ckpt convert`."
    )


def verify_checkpoint(
    store: CheckpointStore, name: str, progress: Progress | None = None
) -> list[str]:
    """Return the problems of a checkpoint, one line each; checks the sizes, checksums and structure of every file."""
    return read_one_version(lambda: _verify_version(store, name, progress))


def _verify_version(
    store: CheckpointStore, checkpoint_name: str, progress: Progress | None
) -> list[str]:
    try:
        manifest = store.manifest(checkpoint_name)
    except CheckpointError as error:
        return [str(error)]
    with open_checkpoint(
        store, checkpoint_name, LocalComm(), verify=False
    ) as checkpoint:
        manifest = checkpoint.manifest
        problems = verify_files(checkpoint.folder, manifest.files, progress)
        if problems:
            checkpoint.check_current()
            return problems
        for component_name, record in manifest.components.items():
            for rank in manifest.ranks if record.per_rank else (None,):
                try:
                    stored_component = checkpoint.component(component_name, rank)
                    if record.per_rank:
                        continue
                    for tensor_name, pieces in stored_component.pieces.items():
                        join_pieces(pieces, tensor_name)
                except CheckpointReplacedError:
                    raise
                except CheckpointError as error:
                    problems.append(str(error))
    return problems


def describe_checkpoint(
    store: CheckpointStore, name: str
) -> dict[str, Any]:  # Any: JSON to print
    """Return the metadata of a checkpoint and its components without reading the tensors."""
    return read_one_version(lambda: _describe_version(store, name))


# Any: JSON to print
def _describe_version(store: CheckpointStore, checkpoint_name: str) -> dict[str, Any]:
    with open_checkpoint(
        store, checkpoint_name, LocalComm(), verify=False
    ) as checkpoint:
        manifest = checkpoint.manifest
        components = {}
        for component_name in manifest.components:
            components[component_name] = _describe_component(
                checkpoint, manifest, component_name
            )
    return {
        "name": checkpoint_name,
        "where": store.address,
        "step": manifest.step,
        "created_s": manifest.created_s,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "versions": manifest.versions,
        "metrics": manifest.metrics,
        "notes": manifest.notes,
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "components": components,
    }


def _describe_component(
    checkpoint: Checkpoint, manifest: Manifest, component_name: str
) -> dict[str, Any]:
    component_record = manifest.components[component_name]
    stored_component = checkpoint.component(
        component_name, manifest.ranks[0] if component_record.per_rank else None
    )
    first_pieces = {}
    for tensor_name, pieces in sorted(stored_component.pieces.items()):
        first_pieces[tensor_name] = pieces[0]
    return {
        "kind": component_record.kind,
        "per_rank": component_record.per_rank,
        "files": [file.name for file in manifest.files_of(component_name)],
        "num_tensors": len(first_pieces),
        "tensors": {
            tensor_name: f"{str(piece.data.dtype).removeprefix('torch.')}{list(piece.shape)}"
            for tensor_name, piece in first_pieces.items()
        },
        "aliases": stored_component.aliases,
    }


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs between two checkpoints."""

    name: str
    what: str
    largest: float | None = None


def compare_checkpoints(
    first: str, second: str, component: str = "model"
) -> list[TensorDifference]:
    """Return the tensors of a component that differ between two checkpoints or exported models; empty when equal."""
    first_tensors = tensors_of(first, component)
    second_tensors = tensors_of(second, component)
    differences = []
    for tensor_name in sorted(first_tensors.keys() - second_tensors.keys()):
        differences.append(TensorDifference(tensor_name, "only in the first"))
    for tensor_name in sorted(second_tensors.keys() - first_tensors.keys()):
        differences.append(TensorDifference(tensor_name, "only in the second"))
    for tensor_name in sorted(first_tensors.keys() & second_tensors.keys()):
        first_tensor = first_tensors[tensor_name]
        second_tensor = second_tensors[tensor_name]
        if (
            first_tensor.shape != second_tensor.shape
            or first_tensor.dtype != second_tensor.dtype
        ):
            differences.append(
                TensorDifference(
                    tensor_name,
                    f"{first_tensor.dtype}{list(first_tensor.shape)} and {second_tensor.dtype}{list(second_tensor.shape)}",
                )
            )
        elif not torch.equal(first_tensor, second_tensor):
            if first_tensor.is_complex():
                wide_dtype = torch.complex128
            else:
                wide_dtype = torch.float64
            largest_difference = float(
                (first_tensor.to(wide_dtype) - second_tensor.to(wide_dtype)).abs().max()
            )
            differences.append(
                TensorDifference(tensor_name, "values differ", largest_difference)
            )
    return differences


def tensors_of(location: str, component: str = "model") -> dict[str, Tensor]:
    """Return the unsharded tensors of a component of a checkpoint, or of an exported model, on the CPU."""
    if (
        not is_url(location)
        and not is_checkpoint(Path(location))
        and component == "model"
    ):
        try:
            return read_model(location)
        except IncompleteCheckpointError:  # it may be a folder of checkpoints
            pass
    return read_one_version(lambda: _tensors_of_version(location, component))


def _tensors_of_version(location: str, component: str) -> dict[str, Tensor]:
    store, checkpoint_name = find_checkpoint(location)
    with open_checkpoint(
        store, checkpoint_name, LocalComm(), verify=False
    ) as checkpoint:
        record = checkpoint.manifest.components.get(component)
        is_per_rank = record is not None and record.per_rank
        rank = checkpoint.manifest.ranks[0] if is_per_rank else None
        stored_component = checkpoint.component(component, rank)
        tensors = {}
        for tensor_name, pieces in stored_component.pieces.items():
            tensors[tensor_name] = join_pieces(pieces, tensor_name)
            if store.remote:  # downloaded files are gone after the block
                tensors[tensor_name] = tensors[tensor_name].clone()
    return tensors | {
        alias: tensors[tensor_name]
        for alias, tensor_name in stored_component.aliases.items()
    }


def merge_shards(
    location: str,
    output: str | Path,
    component: str = "model",
    max_shard_size: float | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Write the unsharded model of a checkpoint in the Hub layout and return the file names.

    Folders of torch.distributed.checkpoint are accepted too; all their tensors are the model.
    Raises: CheckpointError when the output folder holds a checkpoint or a model.
    """
    model_folder = check_local(output, "the folder for the model")
    if is_torch_folder(Path(location)):
        _refuse_occupied(model_folder)
        weights = whole_tensors(Path(location))
        if all(tensor_name.startswith("model.") for tensor_name in weights):
            bare_names = [name.removeprefix("model.") for name in weights]
            weights = dict(zip(bare_names, weights.values(), strict=True))
        return save_model(weights, model_folder, max_shard_size, safe_serialization)
    store, checkpoint_name = find_checkpoint(location)
    manifest = store.manifest(checkpoint_name)
    model_components = []
    for tensor_name, record in sorted(manifest.components.items()):
        if record.kind == "model":
            model_components.append(tensor_name)
    if component not in model_components:
        raise CheckpointError(
            f"{location} has no model called {component!r}; it has {model_components}. Choose one with --component."
        )
    _refuse_occupied(model_folder)
    if problems := verify_checkpoint(store, checkpoint_name):
        raise CorruptCheckpointError(
            f"{location}: {problems[0]}. Nothing was written. Merge another checkpoint."
        )
    weights = tensors_of(location, component)
    return save_model(weights, model_folder, max_shard_size, safe_serialization)


def _refuse_occupied(target: Path) -> None:
    """Raise CheckpointError if a folder holds a checkpoint of any tool, or a model."""
    for file_path in sorted(target.iterdir()) if target.is_dir() else ():
        file_name = file_path.name
        is_table = file_name in (MANIFEST_NAME, TORCH_TABLE_NAME)
        if (
            is_table
            or WEIGHT_FILE.fullmatch(file_name)
            or FOREIGN_FILE.fullmatch(file_name)
        ):
            raise CheckpointError(
                f"{target} already holds a checkpoint or a model ({file_name}), which would be lost. Nothing was changed. Give another folder, or "
                "delete it first."
            )


def convert_folder(
    source: str | Path,
    target: str | Path,
    allow_pickle: bool = False,
) -> list[str]:
    """Convert a folder of Hugging Face Accelerate (or of plain torch files) to a checkpoint of hasten; return remarks.

    Model, optimizers, schedulers, scaler and registered objects are converted; random states are not, since other
    tools pickle them: the run continues with new ones. Raises: UnsafeCheckpointError for files with pickle, unless
    allowed; CheckpointError when the source is a checkpoint of hasten, or the target holds a checkpoint or a model.
    """
    source_folder = Path(source)
    if not source_folder.is_dir():
        raise IncompleteCheckpointError(
            f"{source} is not a folder. Give the folder that another tool saved."
        )
    if read_file_records(source_folder):
        raise CheckpointError(
            f"{source} is a checkpoint of hasten already, and converting it would drop its loaders, counters, random states and registered "
            "objects. Nothing was changed. Load it as it is, or copy the folder."
        )
    store, checkpoint_name = locate(target)
    if checkpoint_name in store.names():
        raise CheckpointError(
            f"{store.address}/{checkpoint_name} already holds a checkpoint, which would be lost. Nothing was changed. Give another place, or delete it first."
        )
    if not store.remote:
        _refuse_occupied(Path(store.address) / checkpoint_name)
    components: dict[str, Component] = {}
    for model_name, model_state in _read_models(source_folder, allow_pickle).items():
        components[model_name] = Component(model_state, None, "model")
    remarks = []
    for source_file in sorted(source_folder.iterdir()):
        if FOREIGN_FILE.fullmatch(source_file.name):
            components[source_file.stem] = _read_component(source_file, allow_pickle)
        elif source_file.suffix in (
            ".pkl",
            ".bin",
            ".pt",
        ) and not source_file.name.startswith(("pytorch_model", "random_states")):
            remarks.append(
                f"{source_file.name} was left out: it is not known what it holds"
            )
    if not components:
        raise IncompleteCheckpointError(
            f"{source_folder} holds nothing that can be converted: no weights, no optimizer. Give the folder that another tool saved."
        )
    remarks.append(
        "random states and data positions are not converted: the run continues with new random numbers"
    )
    header = Manifest(notes={"converted_from": source_folder.name, "partial": True})
    save_tree(store, checkpoint_name, StateTree(components), header, LocalComm())
    return remarks


def _read_models(folder: Path, allow_pickle: bool) -> dict[str, Mapping[str, Any]]:
    states_by_name: dict[str, Mapping[str, Any]] = {}
    # the folder may hold only an optimizer, or numbered models
    with suppress(IncompleteCheckpointError):
        states_by_name["model"] = read_model(folder, allow_pickle)
    for weight_file in sorted(
        (
            *folder.glob("model_[0-9]*.safetensors"),
            *folder.glob("pytorch_model_[0-9]*.bin"),
        )
    ):
        states_by_name[weight_file.stem.removeprefix("pytorch_")] = read_model(
            weight_file, allow_pickle
        )
    return states_by_name


def _read_component(path: Path, allow_pickle: bool) -> Component:
    if path.name.startswith("custom"):
        component_kind = "object"
    else:
        component_kind = path.stem.rstrip("_0123456789")
    loaded_state = load_torch(path, allow_pickle)
    packed_state, tensors = pack(loaded_state)
    plain_tensors = {}
    for tensor_name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            plain_tensors[tensor_name] = tensor
    return Component(
        plain_tensors,
        packed_state,
        component_kind,
        "safetensors" if component_kind == "object" else "torch",
    )
