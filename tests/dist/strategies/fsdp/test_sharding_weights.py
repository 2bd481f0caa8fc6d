"""Sharded models and files: meta models filled slice by slice, full exports, and memory that follows 1/world."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator
from hasten.checkpoint.export import read_model
from hasten.errors import CheckpointError, PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, seeded


def model(tied: bool = False) -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=17, width=8, heads=2, depth=2, context=6, tied=tied)
    )


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("size", ["10GB", "2KB"])
def test_meta_models_read_their_own_slices(
    ctx: ProcessContext, tmp_path: Path, size: str
) -> None:
    """Exported from plain data parallel in one or many files, loaded into a sharded model built on meta."""
    plain = Accelerator(strategy="auto")
    plain.save_model(
        plain.prepare(model(tied=True)), tmp_path / "out", max_shard_size=size
    )
    plain.wait_for_everyone()
    with torch.device("meta"):
        empty = TinyLM(vocab=17, width=8, heads=2, depth=2, context=6, tied=True)
    accelerator = Accelerator(strategy="fsdp")
    sharded = accelerator.prepare(empty)
    report = accelerator.load_model(sharded, tmp_path / "out")
    assert not report.missing
    assert sharded.head.weight is sharded.embed.weight
    expected = model(tied=True).state_dict()
    for name, value in sharded.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), expected[name])
    accelerator.save_model(sharded, tmp_path / "again", max_shard_size=size)
    accelerator.wait_for_everyone()
    for name, value in read_model(tmp_path / "again").items():
        assert torch.equal(value, expected[name])


@ranks(2)
def test_files_of_another_model_are_refused_and_change_nothing(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = Accelerator(strategy="fsdp")
    accelerator.save_model(accelerator.prepare(nn.Linear(3, 3)), tmp_path)
    accelerator.wait_for_everyone()
    mismatched = accelerator.prepare(nn.Linear(3, 4))
    initial_weight = mismatched.weight.full_tensor().clone()
    with pytest.raises(
        CheckpointError,
        match=r"bias is \(3,\) in the files and \(4,\) in the model, and 1 more",
    ):
        accelerator.load_model(mismatched, tmp_path)
    with pytest.raises(
        (CheckpointError, PeerFailedError), match="lack nothing and have bias"
    ):
        accelerator.load_model(
            accelerator.prepare(nn.Linear(3, 3, bias=False)), tmp_path
        )
    assert torch.equal(mismatched.weight.full_tensor(), initial_weight)


@ranks(4)
@pytest.mark.slow
def test_host_memory_stays_near_model_over_world(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """256 MB of weights on four ranks: each grows by its quarter and what sharding needs, not by a whole copy."""
    rows, layers = 4096, 4
    if ctx.rank == 0:
        weights = {f"{i}.weight": torch.randn(rows, rows) for i in range(layers)}
        save_file(weights, tmp_path / "model.safetensors")
        del weights
    ctx.world.barrier("written")
    with torch.device("meta"):
        empty = nn.Sequential(
            *(nn.Linear(rows, rows, bias=False) for _ in range(layers))
        )
    accelerator = Accelerator(strategy="fsdp")
    initial_bytes = anonymous_bytes()
    sharded = accelerator.prepare(empty)
    accelerator.load_model(sharded, tmp_path)
    grown = anonymous_bytes() - initial_bytes
    model_bytes = rows * rows * 4 * layers
    assert grown < model_bytes * 0.45, (
        f"rank {ctx.rank} grew by {grown / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB"
    )


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
