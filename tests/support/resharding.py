"""Check that weights and optimizer state saved on one mesh are loaded on another bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hasten import Accelerator
from hasten.modules.names import stage_part
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool

State = dict[str, Tensor]
Run = tuple[Accelerator, nn.Module, Optimizer]
Layouts = Sequence[tuple[str, int]]
"""Names of layouts, and the number of ranks of each."""


@dataclass(frozen=True, slots=True)
class ReshardTrial:
    """Model and training of a resharding check."""

    begin: Callable[[str, int], Run]
    """Creates a run on the named layout, whose model has weights of this seed. Ranks: every rank."""
    step: Callable[[Accelerator, nn.Module, Optimizer], None]
    """Makes one update. Ranks: every rank."""


def held(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> State:
    """Return the full weights and moments of which this rank holds a shard, by name in the whole model. Ranks: every rank."""
    full_state: State = {}
    stage = stage_part(net)
    for name, parameter in accelerator.unwrap_model(net).named_parameters():
        full_name = name if stage is None else stage.whole_name(name)
        for key, value in {
            "weight": parameter.detach(),
            **optimizer.state[parameter],
        }.items():
            full_state[f"{full_name}/{key}"] = (
                value.full_tensor() if isinstance(value, DTensor) else value
            ).clone()
    return full_state


def joined(states: Iterable[State]) -> State:
    """Return the merged states of all ranks; values held by several ranks must be equal."""
    merged: State = {}
    for state in states:
        for name, value in state.items():
            assert torch.equal(merged.setdefault(name, value), value), (
                f"{name} differs between ranks"
            )
    return merged


def _save(ctx: ProcessContext, trial: ReshardTrial, layout: str, folder: Path) -> State:
    accelerator, net, optimizer = trial.begin(layout, 1)
    for _ in range(2):
        trial.step(accelerator, net, optimizer)
    accelerator.save_state(folder)
    return held(accelerator, net, optimizer)


def _load(
    ctx: ProcessContext, trial: ReshardTrial, layout: str, folders: list[Path]
) -> list[State]:
    loaded_states = []
    accelerator, net, optimizer = trial.begin(layout, 2)
    for folder in folders:
        accelerator.load_state(folder)
        loaded_states.append(held(accelerator, net, optimizer))
    trial.step(accelerator, net, optimizer)  # training continues from there
    return loaded_states


def check_pairs(
    pool: Pool, folder: Path, trial: ReshardTrial, layouts: Layouts, among: str = ""
) -> None:
    """Save on every layout and load on every other; pairs without `among` in a name are skipped.

    Raises: AssertionError that names the tensor and both layouts.
    """
    folders = {layout: folder / layout.replace(" ", "-") for layout, _ in layouts}
    saved = {
        layout: joined(pool.run(_save, world, trial, layout, folders[layout]))
        for layout, world in layouts
    }
    for layout, world in layouts:
        sources = [
            source_layout
            for source_layout, _ in layouts
            if among in layout or among in source_layout
        ]
        loaded = pool.run(
            _load, world, trial, layout, [folders[source] for source in sources]
        )
        for number, source in enumerate(sources):
            state = joined(rank[number] for rank in loaded)
            assert state.keys() == saved[source].keys(), (
                f"saved by {source}, loaded by {layout}"
            )
            for name, value in state.items():
                assert torch.equal(value, saved[source][name]), (
                    f"{name}: saved by {source}, loaded by {layout}"
                )
