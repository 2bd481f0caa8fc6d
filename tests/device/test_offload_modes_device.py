"""Offload on an accelerator: losses, weights and state equal the run without it bit for bit, and leave the device between steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten import Accelerator
from hasten.modules.names import local_tensor
from hasten.testing.toys import TinyLM, next_token_loss, seeded

pytestmark = pytest.mark.device

MODES = ("optimizer", "parameters", "all")
VOCAB, WIDTH, DEPTH, CONTEXT = 512, 512, 6, 128


@pytest.fixture(autouse=True)
def same_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic algorithms, without which two runs of the same attention differ."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one over NCCL, which FSDP2 needs."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", os.environ.get("MASTER_PORT", "29511"))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    mode: str | None,
    steps: int = 8,
    folder: Path | None = None,
    resume: bool = False,
    fused: bool = True,
    **settings: Any,
) -> tuple[list[float], list[Tensor], Any]:
    """Train with clipping and accumulation; with `folder`, save after half of the steps, or with `resume` start there."""
    accelerator = Accelerator(offload=mode, gradient_accumulation_steps=2, **settings)
    net: nn.Module = seeded(lambda: TinyLM(VOCAB, WIDTH, 8, DEPTH, CONTEXT))
    optimizer: Any = torch.optim.AdamW(
        net.parameters(), lr=1e-3, fused=fused, foreach=None if fused else True
    )
    model, optimizer = accelerator.prepare(net, optimizer)
    drawn = torch.Generator().manual_seed(3)
    batches = [
        torch.randint(0, VOCAB, (8, CONTEXT), generator=drawn).to(accelerator.device)
        for _ in range(steps)
    ]
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step, batch in enumerate(batches):
        if resume and step < steps // 2:
            continue
        with accelerator.accumulate(model):
            loss = next_token_loss(model(batch), batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if folder is not None and not resume and step == steps // 2 - 1:
            accelerator.save_state(folder)
    with torch.no_grad():
        weights = [local_tensor(p).detach().cpu() for p in model.parameters()]
    return [float(loss) for loss in losses], weights, optimizer


def assert_same_training(
    first: tuple[list[float], list[Tensor], Any],
    second: tuple[list[float], list[Tensor], Any],
) -> None:
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))
    states = first[2].state_dict()["state"], second[2].state_dict()["state"]
    for index, values in states[0].items():
        for key, value in values.items():
            second_value = states[1][index][key]
            with torch.no_grad():
                assert torch.equal(
                    local_tensor(value).cpu(), local_tensor(second_value).cpu()
                ), (index, key)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_one_device_is_bitwise_equal(precision: str, fused: bool) -> None:
    plain = train(None, mixed_precision=precision, fused=fused)
    for mode in MODES:
        assert_same_training(plain, train(mode, mixed_precision=precision, fused=fused))


def test_recomputed_blocks_are_bitwise_equal() -> None:
    plain = train(None, mixed_precision="bf16", recompute=("Block",))
    for mode in MODES:
        assert_same_training(
            plain, train(mode, mixed_precision="bf16", recompute=("Block",))
        )


@pytest.mark.usefixtures("one_rank")
def test_shards_are_bitwise_equal() -> None:
    plain = train(None, mixed_precision="bf16", strategy="fsdp")
    assert_same_training(
        plain, train("optimizer", mixed_precision="bf16", strategy="fsdp")
    )
    # FSDP2 offloads the gradients too, and their norm is computed on the host
    for mode in ("parameters", "all"):
        losses, _, _ = train(mode, mixed_precision="bf16", strategy="fsdp")
        assert torch.allclose(
            torch.tensor(losses), torch.tensor(plain[0]), rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_bitwise_equal(mode: str, tmp_path: Path) -> None:
    plain = train(None, folder=tmp_path / "plain", mixed_precision="bf16")
    offloaded = train(mode, folder=tmp_path / "offloaded", mixed_precision="bf16")
    assert_same_training(plain, offloaded)
    for folder in ("plain", "offloaded"):
        losses, weights, _ = train(
            mode, folder=tmp_path / folder, resume=True, mixed_precision="bf16"
        )
        assert losses == plain[0][4:]
        assert all(map(torch.equal, weights, plain[1]))


def test_the_device_keeps_a_part_of_the_state_between_steps() -> None:
    def allocated_bytes(mode: str | None) -> int:
        torch.accelerator.synchronize()
        initial_bytes = torch.accelerator.memory_allocated()
        trained = train(mode, steps=6)
        # reading it also frees the copies that the last update left on the device
        assert trained[2].state
        torch.accelerator.synchronize()
        grown = torch.accelerator.memory_allocated() - initial_bytes
        del trained
        return grown

    with_nothing_offloaded, with_state_offloaded = (
        allocated_bytes(None),
        allocated_bytes("optimizer"),
    )
    with_all_offloaded = allocated_bytes("all")
    assert with_state_offloaded < 0.7 * with_nothing_offloaded
    assert with_all_offloaded < 0.5 * with_nothing_offloaded
