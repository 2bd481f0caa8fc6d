"""Training with offload: losses, weights and checkpoints are bit for bit those of the run without it, on one device and over shards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.modules.names import local_tensor
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.training import Task, hasten_losses

MODES = ("optimizer", "parameters", "all")
STEPS = 12


def build(tied: bool = False) -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=16, width=8, heads=2, depth=3, context=6, tied=tied)
    )


def tokens(steps: int) -> list[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randint(0, 16, (12, 6), generator=drawn),) for _ in range(steps)]


TASK = Task(build, tokens, lambda net, batch: next_token_loss(net(batch[0]), batch[0]))


def accelerators(**settings: Any) -> Iterator[tuple[str | None, Accelerator]]:
    for mode in (None, *MODES):
        yield mode, Accelerator(offload=mode, **settings)


@ranks(1)
@pytest.mark.parametrize(("precision", "recompute"), [("no", ()), ("bf16", ("Block",))])
def test_every_mode_on_one_device_is_bitwise_equal_to_none(
    ctx: ProcessContext, precision: str, recompute: tuple[str, ...]
) -> None:
    losses_by_mode = {
        mode: hasten_losses(accelerator, TASK, STEPS)
        for mode, accelerator in accelerators(
            mixed_precision=precision, recompute=recompute
        )
    }
    assert all(losses == losses_by_mode[None] for losses in losses_by_mode.values()), (
        losses_by_mode
    )


@ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_mode_over_shards_is_bitwise_equal_to_none(
    ctx: ProcessContext, precision: str
) -> None:
    losses_by_mode = {
        mode: hasten_losses(accelerator, TASK, STEPS)
        for mode, accelerator in accelerators(
            strategy="fsdp", mixed_precision=precision
        )
    }
    assert all(losses == losses_by_mode[None] for losses in losses_by_mode.values()), (
        losses_by_mode
    )


@ranks(2)
def test_optimizer_state_of_replicas_and_of_split_layers(ctx: ProcessContext) -> None:
    for settings in (
        {"strategy": "ddp"},
        {"parallelism_config": ParallelismConfig(tp_size=2)},
    ):
        mode_losses = [
            hasten_losses(Accelerator(offload=mode, **settings), TASK, STEPS)
            for mode in (None, "optimizer")
        ]
        assert mode_losses[0] == mode_losses[1]


def trained(
    accelerator: Accelerator,
    folder: Path,
    make: Any = torch.optim.AdamW,
    stop: int = 5,
    load: bool = False,
) -> tuple[list[float], nn.Module]:
    """Train with two optimizers and a scheduler, save after three steps or load that state, and return losses and model."""
    net = build(tied=True)
    block_parameters = list(net.blocks.parameters())
    remaining_parameters = [
        p
        for p in net.parameters()
        if all(p is not block_parameter for block_parameter in block_parameters)
    ]
    first, second = (
        make(block_parameters, lr=0.05),
        torch.optim.SGD(remaining_parameters, lr=0.1, momentum=0.9),
    )
    schedule = torch.optim.lr_scheduler.StepLR(first, 2, 0.5)
    model, first, second, schedule = accelerator.prepare(net, first, second, schedule)
    losses = []
    if load:
        accelerator.load_state(folder)
    for step, (batch,) in enumerate(tokens(stop)):
        if load and step < 3:
            continue
        loss = next_token_loss(model(batch), batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        if step == 2 and not load:
            accelerator.save_state(folder)
    return losses, model


def weights(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [local_tensor(p).detach().clone() for p in model.parameters()]


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in {".safetensors", ".bin"}
    }


@ranks(1, 2)
@pytest.mark.parametrize("mode", ["optimizer", "all"])
def test_checkpoints_are_the_same_files_and_load_into_any_mode(
    ctx: ProcessContext, mode: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp"} if ctx.world.size > 1 else {}
    plain, expected = trained(Accelerator(**settings), tmp_path / "plain")
    losses, model = trained(
        Accelerator(offload=mode, **settings), tmp_path / "offloaded"
    )
    assert losses == plain
    assert all(map(torch.equal, weights(model), weights(expected)))
    saved = files(tmp_path / "plain")
    assert saved
    assert saved == files(tmp_path / "offloaded")
    for source, target in (("plain", mode), ("offloaded", None), ("offloaded", mode)):
        resumed, resumed_model = trained(
            Accelerator(offload=target, **settings), tmp_path / source, load=True
        )
        assert resumed == plain[3:], (source, target)
        assert all(map(torch.equal, weights(resumed_model), weights(expected)))


@ranks(1)
def test_state_and_streamed_weights_are_in_host_memory_between_steps(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(offload="all")
    net = build()
    model, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.1)
    )
    block = net.blocks[0]
    inside: list[int] = []
    block.register_forward_pre_hook(
        lambda module, inputs: inside.append(next(module.parameters()).data_ptr())
    )
    host_address = next(block.parameters()).data_ptr()
    (batch,) = tokens(1)[0]
    accelerator.backward(next_token_loss(model(batch), batch))
    assert next(block.parameters()).data_ptr() == host_address
    assert inside != [host_address]
    initial_weights = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, initial_weights, weights(model)))
    storages = {
        v.untyped_storage().data_ptr()
        for values in optimizer.state.values()
        for v in values.values()
        if v.ndim
    }
    # slabs of host memory, not the memory that the update used
    assert len(storages) <= 2


@ranks(1)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_training_that_is_dropped_leaves_no_memory_behind(
    ctx: ProcessContext, mode: str | None
) -> None:
    accelerator = Accelerator(offload=mode)
    net = build()
    model, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.1)
    )
    for (batch,) in tokens(3):
        accelerator.backward(next_token_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
    references: list[weakref.ref[Tensor]] = [
        weakref.ref(parameter) for parameter in net.parameters()
    ]
    references += [
        weakref.ref(v)
        for values in optimizer.state.values()
        for v in values.values()
        if isinstance(v, Tensor)
    ]
    assert references
    del accelerator, net, model, optimizer, batch
    gc.collect()
    assert not [reference for reference in references if reference() is not None]


@ranks(1)
def test_a_window_is_repeated_from_a_save_inside_it(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    def run(mode: str | None, resume: bool) -> list[Tensor]:
        accelerator = Accelerator(offload=mode, gradient_accumulation_steps=2)
        net = build()
        model, optimizer = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.1)
        )
        if resume:
            accelerator.load_state(tmp_path / str(mode))
        for number, (batch,) in enumerate(tokens(4)):
            # the save inside the second window stored its beginning
            if resume and number < 2:
                continue
            with accelerator.accumulate(model):
                accelerator.backward(next_token_loss(model(batch), batch))
                optimizer.step()
                optimizer.zero_grad()
            if number == 2 and not resume:
                accelerator.save_state(tmp_path / str(mode))
        return weights(model)

    expected = run(None, resume=False)
    for mode in MODES:
        assert all(map(torch.equal, run(mode, resume=False), expected))
        assert all(map(torch.equal, run(mode, resume=True), expected))


@ranks(1)
def test_combinations_that_cannot_be_offloaded_are_refused(ctx: ProcessContext) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed\.offload_optimizer_device"):
        Accelerator(offload="optimizer", strategy="deepspeed", cpu=True)
    with pytest.raises(ConfigError, match=r"megatron\.optimizer_cpu_offload"):
        Accelerator(offload="all", strategy="megatron", cpu=True)
    with pytest.raises(ConfigError, match=r"Remove fsdp\.cpu_offload"):
        Accelerator(
            offload="all", fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True)
        )
    with pytest.raises(ConfigError, match="dynamo_backend='no'"):
        Accelerator(offload="parameters", dynamo_backend="eager")
    accelerator = Accelerator(offload="optimizer")
    net = build()
    with pytest.raises(PrepareError, match="Use AdamW"):
        accelerator.prepare(net, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(PrepareError, match="Use offload='optimizer'"):
        Accelerator(offload="all").prepare(nn.Linear(2, 2))
    net = build()
    _, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(StepError, match=r"Call backward\(\) and step\(\) instead"):
        optimizer.step(lambda: 0.0)


@ranks(2)
def test_replicas_keep_their_parameters_on_the_device(ctx: ProcessContext) -> None:
    with pytest.raises(ConfigError, match="Use strategy='fsdp'"):
        Accelerator(offload="all", strategy="ddp")
    with pytest.raises(ConfigError, match="tp_size=2"):
        Accelerator(offload="all", parallelism_config=ParallelismConfig(tp_size=2))
