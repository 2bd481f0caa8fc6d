"""Loading exported weights into a live model: every rank maps the files and reads only what it holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Slice
from hasten.checkpoint.export import read_model
from hasten.checkpoint.model_state import LoadReport, names_of_other_stages
from hasten.checkpoint.reshard import as_stored, local_tensor
from hasten.checkpoint.store.paths import check_path
from hasten.errors import CheckpointError
from hasten.modules.names import plain_name


def load_weights(model: nn.Module, folder: str | Path, strict: bool = True, allow_pickle: bool = False) -> LoadReport:
    """Fill the model from a Hub-layout folder or a single file; names that did not match, when not strict.

    Sharded parameters read their own slice of the mapped file only, so host memory stays near model / world.
    Everything is checked before anything changes. Ranks: every rank that holds a part of the model.
    Raises: CheckpointError naming what is missing, unexpected or of another shape.
    """
    check_path(folder, "load_model(directory)")
    stored = read_model(folder, allow_pickle)
    live = {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    report = LoadReport(
        missing=sorted(live.keys() - stored.keys()),
        unexpected=sorted(stored.keys() - live.keys() - names_of_other_stages(model)),
    )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"{folder}: the files lack {_few(report.missing)} and have {_few(report.unexpected)}, which the model does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    both = sorted(live.keys() & stored.keys())
    wrong = [name for name in both if live[name].shape != stored[name].shape]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder}: {name} is {tuple(stored[name].shape)} in the files and {tuple(live[name].shape)} in the model"
            f"{f', and {len(wrong) - 1} more differ' if len(wrong) > 1 else ''}. Nothing was loaded."
        )
    with torch.no_grad():
        for name in both:
            _fill(live[name], stored[name])
    return report


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy a mapped tensor, or this rank's slice of it, into place."""
    piece = as_stored(target)
    if isinstance(piece, Slice):
        for dim, (start, size) in enumerate(zip(piece.offset, piece.data.shape, strict=True)):
            source = source.narrow(dim, start, size)
        piece.data.copy_(source)
        return
    local_tensor(target).copy_(source)


def _few(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
