"""Background uploads of a sharded model: every rank trains meanwhile, and an error of the upload reaches every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from hasten import Accelerator
from hasten.errors import HubError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.hub_server import TOKEN, Hub, client_at, serving

NAME = "someone/tiny"


@contextmanager
def connected(ctx: ProcessContext, cache: Path) -> Iterator[Hub | None]:
    """Run the server on rank 0 and point the client of every rank to it."""
    pytest.importorskip("huggingface_hub")
    where = str(cache)
    if ctx.world.rank == 0:
        with (
            serving() as hub,
            client_at(ctx.world.broadcast_object(hub.address), where),
        ):
            yield hub
    else:
        with client_at(ctx.world.broadcast_object(None), where):
            yield None


def prepared(ctx: ProcessContext, strategy: str) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(
        cpu=True, strategy=strategy if ctx.world.size > 1 else "none"
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 16)).pow(2).sum())
    optimizer.step()
    optimizer.zero_grad()


@ranks(1, 2)
def test_training_goes_on_while_the_main_process_uploads(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with connected(ctx, tmp_path) as hub:
        accelerator, model, optimizer = prepared(ctx, "fsdp")
        train(accelerator, model, optimizer)
        saved_weights = {
            name: value.clone()
            for name, value in accelerator.get_state_dict(model).items()
        }
        if hub is not None:
            hub.before_gate = 0
        assert (
            accelerator.push_to_hub(
                model, NAME, token=TOKEN, max_shard_size="1100B", blocking=False
            )
            is None
        )
        for _ in range(3):
            train(accelerator, model, optimizer)
        accelerator.wait_for_everyone()
        if hub is not None:
            assert hub.messages(NAME) == [] if NAME in hub.repositories else True
            hub.gate.set()
        accelerator.end_training()
        if hub is not None:
            files = hub.files(NAME)
            sent = {
                k: v
                for name, raw in files.items()
                if name.endswith(".safetensors")
                for k, v in load(raw).items()
            }
            assert len([name for name in files if name.endswith(".safetensors")]) > 1
            assert all(
                torch.equal(sent[name], saved_weights[name]) for name in saved_weights
            )
        accelerator.load_model(model, f"hf://{NAME}")  # every rank, its own slices
        loaded_weights = accelerator.get_state_dict(model)
        assert all(
            torch.equal(loaded_weights[name], saved_weights[name])
            for name in saved_weights
        )


@ranks(1, 2)
def test_a_failed_upload_is_raised_on_every_rank(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with connected(ctx, tmp_path) as hub:
        accelerator, model, optimizer = prepared(ctx, "ddp")
        if hub is not None:
            hub.refuse_after = 0
        accelerator.push_to_hub(model, NAME, token=TOKEN, blocking=False)
        train(accelerator, model, optimizer)
        with pytest.raises(HubError, match="has expired") as caught:
            accelerator.push_to_hub(model, NAME, token=TOKEN, blocking=False)
        assert TOKEN not in str(caught.value)
        accelerator.push_to_hub(model, NAME, token=TOKEN, blocking=False)
        with pytest.raises(HubError, match="has expired"):
            accelerator.end_training()
        if hub is not None:
            hub.refuse_after = None
        accelerator.wait_for_everyone()
        address = accelerator.push_to_hub(model, NAME, token=TOKEN)
        assert (address is not None) == accelerator.is_main_process
