"""Inspection of a saved run's batch: its dataset indices from the checkpoint, its samples from the user's dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoint.reader import open_checkpoint
from hasten.cli.flags import find_named
from hasten.comm.local import LocalComm
from hasten.data import batch_plan as lookup
from hasten.data.batch_plan import FoundSample
from hasten.errors import DataError
from hasten.extensions.checkpoint_tools.inspect import find as find_checkpoint
from hasten.runtime.mesh_plan import BATCH, Axis, MeshSpec
from hasten.state.run_state import load_packed, numbered_name

_SHOWN: Final = 200


def look(
    place: str, rank: int, batch: int, epoch: int | None, loader: int
) -> FoundSample:
    """Return a batch that this rank of the saved run read.

    Raises: CheckpointError when there is no such checkpoint; DataError when there is no such loader, rank or batch.
    """
    store, name = find_checkpoint(place)
    component = numbered_name("loader", loader)
    with open_checkpoint(store, name, LocalComm(), verify=False) as checkpoint:
        manifest = checkpoint.manifest
        if component not in manifest.components:
            count = sum(
                one.partition("_")[0] == "loader" for one in manifest.components
            )
            raise DataError(
                f"{name} has {count} loaders, numbered from 0, and none has number {loader}."
            )
        if rank >= manifest.world_size:
            raise DataError(
                f"{name} was saved by ranks 0 to {manifest.world_size - 1}, and rank {rank} is not among them."
            )
        state = load_packed(checkpoint, component, rank)
        mesh = MeshSpec(
            **{Axis(axis).value: size for axis, size in manifest.mesh.items()}
        )
    return lookup.find(state, mesh.index(rank, *BATCH), batch, epoch)


def fetch(factory: str, found: FoundSample) -> list[Any]:  # Any: the user's samples
    """Return the samples of the batch, from the dataset that `module:function` returns.

    Raises: ConfigError when there is no such function.
    """
    dataset: Any = find_named(
        factory, "give --dataset module:function with the module in the current folder"
    )()
    return [dataset[index] for index in found.samples]


# Any: JSON values
def as_json(found: FoundSample, samples: list[Any] | None) -> dict[str, Any]:
    """Return the batch as JSON values; samples as text."""
    return {
        **asdict(found),
        **(
            {}
            if samples is None
            else {"shown": [list(describe(one)) for one in samples]}
        ),
    }


def in_words(found: FoundSample, rank: int, samples: list[Any] | None) -> Iterator[str]:
    """Yield the lines that describe the batch for a terminal."""
    note = "" if found.given else ", not yet given when the checkpoint was saved"
    yield f"epoch {found.epoch}, batch {found.batch} of {found.num_batches} on rank {rank}{note}"
    yield f"dataset indices: {', '.join(map(str, found.samples)) or 'none: the batch is all padding'}"
    for index, sample in zip(found.samples, samples or (), strict=False):
        yield f"sample {index}:"
        yield from (f"  {line}" for line in describe(sample))


def describe(sample: Any, name: str = "") -> Iterator[str]:
    """Yield one line for each value in a sample: shape, range and non-finite counts of tensors, the text of others."""
    label = f"{name}: " if name else ""
    if isinstance(sample, Tensor):
        yield f"{label}{_tensor(sample)}"
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from describe(value, f"{name}.{key}" if name else str(key))
    elif isinstance(sample, list | tuple) and any(
        isinstance(one, Tensor | Mapping) for one in sample
    ):
        for number, value in enumerate(sample):
            yield from describe(value, f"{name}[{number}]")
    elif isinstance(sample, np.ndarray) and sample.ndim and sample.dtype.kind in "fiub":
        yield f"{label}{_tensor(torch.as_tensor(sample))}"
    else:
        text = repr(sample)
        yield f"{label}{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"


def _tensor(value: Tensor) -> str:
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if not value.numel():
        return f"{kind}, empty"
    if value.ndim == 0:
        return f"{kind} {value.item()}"
    if value.is_complex() or value.dtype is torch.bool:
        return kind
    numbers = value.double()
    fine = numbers[torch.isfinite(numbers)]
    spread = (
        f"from {fine.min():g} to {fine.max():g}, mean {fine.mean():g}"
        if fine.numel()
        else "nothing finite"
    )
    bad = [
        f"{count} {word}"
        for word, count in (
            ("nan", int(numbers.isnan().sum())),
            ("inf", int(numbers.isinf().sum())),
        )
        if count
    ]
    return ", ".join([f"{kind} {spread}", *bad])
