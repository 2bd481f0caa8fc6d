"""Inspection and conversion of checkpoints: listing, verification, comparison, merging shards into one model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.checkpoint.base import (
    CheckpointStore,
    Component,
    StateTree,
    checkpoint_number,
)
from hasten.checkpoint.export import is_checkpoint, read_model, save_model
from hasten.checkpoint.format.formats import load_torch
from hasten.checkpoint.format.manifest import MANIFEST_NAME, Manifest
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
from hasten.checkpoint.store.locate import (
    check_local,
    find_newest,
    is_url,
    locate,
    open_store,
)
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
    TORCH_TABLE,
    is_torch_folder,
    whole_tensors,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint in a listing."""

    name: str
    complete: bool
    step: int | None = None
    world_size: int | None = None
    num_bytes: int = 0
    created_s: float = 0.0
    metrics: Mapping[str, float | None] | None = None
    problem: str = ""


def everything(place: str) -> list[tuple[CheckpointStore, str]]:
    """Return every checkpoint in a folder or URL and in `checkpoints` inside it, with its store, oldest first."""
    checkpoints: list[tuple[CheckpointStore, str]] = []
    for store in (open_store(place), open_store(f"{place.rstrip('/')}/checkpoints")):
        names = sorted(
            store.names(), key=lambda name: (checkpoint_number(name) or -1, name)
        )
        checkpoints += [(store, name) for name in names]
    if not checkpoints:
        store, name = locate(place)
        checkpoints += [(store, name)] if name in store.names() else []
    return checkpoints


def row(store: CheckpointStore, name: str) -> Row:
    """Return the entry of a checkpoint in a listing, also of a damaged one."""
    try:
        m = store.check(name)
    except CheckpointError as error:
        return Row(name, complete=False, problem=str(error))
    return Row(name, True, m.step, m.world_size, m.num_bytes, m.created_s, m.metrics)


def find(place: str) -> tuple[CheckpointStore, str]:
    """Return the checkpoint at a path: the path itself, or the newest complete one in a folder of checkpoints."""
    store, name = locate(place)
    if name in store.names():
        return store, name
    for inner in (place, f"{place.rstrip('/')}/checkpoints"):
        inside = open_store(inner)
        newest_name = find_newest(inside)
        if newest_name is not None:
            return inside, newest_name
    raise IncompleteCheckpointError(
        f"{place} is not a complete hasten checkpoint and holds none (no {MANIFEST_NAME}). Give another folder, or "
        "convert it with `hasten ckpt convert`."
    )


def verify(
    store: CheckpointStore, name: str, progress: Progress | None = None
) -> list[str]:
    """Return the problems of a checkpoint, one line each; checks the sizes, checksums and structure of every file."""
    return read_one_version(lambda: _verify(store, name, progress))


def _verify(store: CheckpointStore, name: str, progress: Progress | None) -> list[str]:
    try:
        manifest = store.manifest(name)
    except CheckpointError as error:
        return [str(error)]
    with open_checkpoint(store, name, LocalComm(), verify=False) as checkpoint:
        manifest = checkpoint.manifest
        problems = verify_files(checkpoint.folder, manifest.files, progress)
        if problems:
            checkpoint.check_current()
            return problems
        for component, record in manifest.components.items():
            for rank in manifest.ranks if record.per_rank else (None,):
                try:
                    for key, pieces in checkpoint.component(
                        component, rank
                    ).pieces.items():
                        join_pieces(pieces, key) if not record.per_rank else None
                except CheckpointReplacedError:
                    raise
                except CheckpointError as error:
                    problems.append(str(error))
    return problems


def describe(store: CheckpointStore, name: str) -> dict[str, Any]:  # Any: JSON to print
    """Return the metadata of a checkpoint and its components without reading the tensors."""
    return read_one_version(lambda: _describe_version(store, name))


# Any: JSON to print
def _describe_version(store: CheckpointStore, name: str) -> dict[str, Any]:
    with open_checkpoint(store, name, LocalComm(), verify=False) as checkpoint:
        manifest = checkpoint.manifest
        components = {
            key: _describe(checkpoint, manifest, key) for key in manifest.components
        }
    return {
        "name": name,
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


def _describe(checkpoint: Checkpoint, manifest: Manifest, name: str) -> dict[str, Any]:
    record = manifest.components[name]
    found = checkpoint.component(name, manifest.ranks[0] if record.per_rank else None)
    tensors = {key: pieces[0] for key, pieces in sorted(found.pieces.items())}
    return {
        "kind": record.kind,
        "per_rank": record.per_rank,
        "files": [file.name for file in manifest.files_of(name)],
        "num_tensors": len(tensors),
        "tensors": {
            key: f"{str(p.data.dtype).removeprefix('torch.')}{list(p.shape)}"
            for key, p in tensors.items()
        },
        "aliases": found.aliases,
    }


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs between two checkpoints."""

    name: str
    what: str
    largest: float | None = None


def diff(first: str, second: str, component: str = "model") -> list[TensorDifference]:
    """Return the tensors of a component that differ between two checkpoints or exported models; empty when equal."""
    a, b = tensors_of(first, component), tensors_of(second, component)
    found = [
        TensorDifference(name, "only in the first")
        for name in sorted(a.keys() - b.keys())
    ]
    found += [
        TensorDifference(name, "only in the second")
        for name in sorted(b.keys() - a.keys())
    ]
    for name in sorted(a.keys() & b.keys()):
        x, y = a[name], b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(
                TensorDifference(
                    name, f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
                )
            )
        elif not torch.equal(x, y):
            wide = torch.complex128 if x.is_complex() else torch.float64
            largest = float((x.to(wide) - y.to(wide)).abs().max())
            found.append(TensorDifference(name, "values differ", largest))
    return found


def tensors_of(place: str, component: str = "model") -> dict[str, Tensor]:
    """Return the unsharded tensors of a component of a checkpoint, or of an exported model, on the CPU."""
    if not is_url(place) and not is_checkpoint(Path(place)) and component == "model":
        try:
            return read_model(place)
        except IncompleteCheckpointError:  # it may be a folder of checkpoints
            pass
    return read_one_version(lambda: _tensors_of_version(place, component))


def _tensors_of_version(place: str, component: str) -> dict[str, Tensor]:
    store, name = find(place)
    with open_checkpoint(store, name, LocalComm(), verify=False) as checkpoint:
        record = checkpoint.manifest.components.get(component)
        is_per_rank = record is not None and record.per_rank
        rank = checkpoint.manifest.ranks[0] if is_per_rank else None
        found = checkpoint.component(component, rank)
        tensors = {}
        for key, pieces in found.pieces.items():
            tensors[key] = join_pieces(pieces, key)
            if store.remote:  # downloaded files are gone after the block
                tensors[key] = tensors[key].clone()
    return tensors | {alias: tensors[key] for alias, key in found.aliases.items()}


def merge(
    place: str,
    output: str | Path,
    component: str = "model",
    max_shard_size: float | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Write the unsharded model of a checkpoint in the Hub layout and return the file names.

    Folders of torch.distributed.checkpoint are accepted too; all their tensors are the model.
    Raises: CheckpointError when the output folder holds a checkpoint or a model.
    """
    target = check_local(output, "the folder for the model")
    if is_torch_folder(Path(place)):
        _refuse_occupied(target)
        weights = whole_tensors(Path(place))
        if all(key.startswith("model.") for key in weights):
            weights = {key.removeprefix("model."): weights[key] for key in weights}
        return save_model(weights, target, max_shard_size, safe_serialization)
    store, name = find(place)
    manifest = store.manifest(name)
    models = []
    for key, record in sorted(manifest.components.items()):
        if record.kind == "model":
            models.append(key)
    if component not in models:
        raise CheckpointError(
            f"{place} has no model called {component!r}; it has {models}. Choose one with --component."
        )
    _refuse_occupied(target)
    if problems := verify(store, name):
        raise CorruptCheckpointError(
            f"{place}: {problems[0]}. Nothing was written. Merge another checkpoint."
        )
    weights = tensors_of(place, component)
    return save_model(weights, target, max_shard_size, safe_serialization)


def _refuse_occupied(target: Path) -> None:
    """Raise CheckpointError if a folder holds a checkpoint of any tool, or a model."""
    for path in sorted(target.iterdir()) if target.is_dir() else ():
        name = path.name
        is_table = name in (MANIFEST_NAME, TORCH_TABLE)
        if is_table or WEIGHT_FILE.fullmatch(name) or FOREIGN_FILE.fullmatch(name):
            raise CheckpointError(
                f"{target} already holds a checkpoint or a model ({name}), which would be lost. Nothing was changed. Give another folder, or "
                "delete it first."
            )


def convert(
    source: str | Path,
    target: str | Path,
    allow_pickle: bool = False,
) -> list[str]:
    """Convert a folder of Hugging Face Accelerate (or of plain torch files) to a checkpoint of hasten; return remarks.

    Model, optimizers, schedulers, scaler and registered objects are converted; random states are not, since other
    tools pickle them: the run continues with new ones. Raises: UnsafeCheckpointError for files with pickle, unless
    allowed; CheckpointError when the source is a checkpoint of hasten, or the target holds a checkpoint or a model.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise IncompleteCheckpointError(
            f"{source} is not a folder. Give the folder that another tool saved."
        )
    if read_file_records(folder):
        raise CheckpointError(
            f"{source} is a checkpoint of hasten already, and converting it would drop its loaders, counters, random states and registered "
            "objects. Nothing was changed. Load it as it is, or copy the folder."
        )
    store, name = locate(target)
    if name in store.names():
        raise CheckpointError(
            f"{store.address}/{name} already holds a checkpoint, which would be lost. Nothing was changed. Give another place, or delete it first."
        )
    if not store.remote:
        _refuse_occupied(Path(store.address) / name)
    components: dict[str, Component] = {}
    for key, state in _models(folder, allow_pickle).items():
        components[key] = Component(state, None, "model")
    notes = []
    for path in sorted(folder.iterdir()):
        if FOREIGN_FILE.fullmatch(path.name):
            components[path.stem] = _component(path, allow_pickle)
        elif path.suffix in (".pkl", ".bin", ".pt") and not path.name.startswith(
            ("pytorch_model", "random_states")
        ):
            notes.append(f"{path.name} was left out: it is not known what it holds")
    if not components:
        raise IncompleteCheckpointError(
            f"{folder} holds nothing that can be converted: no weights, no optimizer. Give the folder that another tool saved."
        )
    notes.append(
        "random states and data positions are not converted: the run continues with new random numbers"
    )
    header = Manifest(notes={"converted_from": folder.name, "partial": True})
    save_tree(store, name, StateTree(components), header, LocalComm())
    return notes


def _models(folder: Path, allow_pickle: bool) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    # the folder may hold only an optimizer, or numbered models
    with suppress(IncompleteCheckpointError):
        found["model"] = read_model(folder, allow_pickle)
    for path in sorted(
        (
            *folder.glob("model_[0-9]*.safetensors"),
            *folder.glob("pytorch_model_[0-9]*.bin"),
        )
    ):
        found[path.stem.removeprefix("pytorch_")] = read_model(path, allow_pickle)
    return found


def _component(path: Path, allow_pickle: bool) -> Component:
    kind = (
        "object" if path.name.startswith("custom") else path.stem.rstrip("_0123456789")
    )
    value = load_torch(path, allow_pickle)
    data, tensors = pack(value)
    plain = {
        key: tensor
        for key, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    return Component(plain, data, kind, "safetensors" if kind == "object" else "torch")
