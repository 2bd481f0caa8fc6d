"""What ranks must agree on: overflow, batch size, averaged models, norms of gradients spread over meshes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hasten import LocalSGD
from hasten.accelerator.facade import Accelerator
from hasten.config.sections.loop import GradScalerKwargs
from hasten.optim.batch_size import find_executable_batch_size
from hasten.optim.clip import clip_norm, clip_value
from hasten.optim.gradients import multiply_gradients
from hasten.optim.rebind import OptimizerRecord
from hasten.precision.build import build_precision
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@ranks(2, 4)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ctx: ProcessContext) -> None:
    # not spread by anything: only the scaler can agree
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision = build_precision(
        "fp16", ctx.device, ctx.world, scaler=GradScalerKwargs(init_scale=8.0)
    )
    for step in range(6):
        overflow = step in (1, 4)
        factor = (
            float("inf")
            if overflow and ctx.world.rank == step % ctx.world.size
            else 1.0
        )
        torch.autograd.backward(precision.scale((weight * factor).sum()))
        result = precision.step(optimizer)
        optimizer.zero_grad()
        assert result.applied == (not overflow)
    assert precision.state_dict()["scale"] == 2.0
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.6))


@ranks(2)
def test_a_rank_without_gradients_still_takes_part(ctx: ProcessContext) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision = build_precision("fp16", ctx.device, ctx.world)
    scaled = precision.scale(weight.sum() * float("nan"))
    if ctx.world.rank == 0:
        torch.autograd.backward(scaled)
    assert not precision.step(optimizer).applied


@ranks(2)
def test_an_overflow_in_one_shard_skips_everywhere(ctx: ProcessContext) -> None:
    model = toy()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = build_precision("fp16", ctx.device, ctx.world)
    torch.autograd.backward(precision.scale(model(torch.ones(2, 4)).sum()))
    weight = next(model.parameters())
    assert isinstance(weight.grad, DTensor)
    if ctx.world.rank == 1:
        weight.grad.to_local().fill_(float("inf"))
    assert not precision.step(optimizer).applied
    optimizer.zero_grad()
    torch.autograd.backward(precision.scale(model(torch.ones(2, 4)).sum()))
    assert precision.step(optimizer).applied


@ranks(2, 3, exhaustive=(1,))
def test_local_sgd_averages_every_few_updates(ctx: ProcessContext) -> None:
    size, rank = ctx.world.size, ctx.world.rank
    accelerator = Accelerator(context=ctx, gradient_accumulation_steps=2)
    model = toy()
    reference = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    data = [
        torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * rank + i))
        for i in range(10)
    ]
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for x in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    for number, x in enumerate(data):
        torch.autograd.backward(reference(x).pow(2).mean() / 2)
        if number % 2:
            plain.step()
            plain.zero_grad()
            if number in (3, 7, 9):
                for p in reference.parameters():
                    p.data.copy_(ctx.world.all_reduce(p.data, "mean"))
    assert local.num_steps == 5
    assert local.enabled == (size > 1)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@ranks(2, exhaustive=(3,))
def test_ranks_try_the_same_batch_size(ctx: ProcessContext) -> None:
    accelerator = Accelerator(context=ctx)
    tried_sizes = []

    @find_executable_batch_size(
        starting_batch_size=16, accelerator=accelerator, keep_global_batch=True
    )
    def train(batch_size: int) -> int:
        tried_sizes.append(batch_size)
        if batch_size > 4 and ctx.world.rank == ctx.world.size - 1:
            raise torch.OutOfMemoryError("out of memory")
        return batch_size

    assert train() == 4
    assert tried_sizes == [16, 8, 4]
    assert accelerator.gradient_accumulation_steps == 4


def spread(
    ctx: ProcessContext, mesh: DeviceMesh, full: torch.Tensor, *placements: object
) -> nn.Parameter:
    """A parameter whose gradient is `full`, spread over a mesh."""
    parameter = nn.Parameter(
        distribute_tensor(torch.zeros_like(full), mesh, placements)  # type: ignore[arg-type]
    )
    parameter.grad = distribute_tensor(full.clone(), mesh, placements)  # type: ignore[arg-type]
    return parameter


@ranks(4)
def test_norms_are_true_over_several_meshes(ctx: ProcessContext) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(5, 6, generator=generator) for _ in range(4)]
    for norm_type in (1.0, 2.0, float("inf")):
        plain = nn.Parameter(torch.zeros(5, 6))
        plain.grad = full[3].clone()
        parameters = [
            spread(ctx, line, full[0], Shard(0)),
            spread(ctx, square, full[1], Shard(0), Shard(1)),
            spread(ctx, square, full[2], Replicate(), Shard(0)),
            plain,
        ]
        expected = torch.linalg.vector_norm(torch.stack(full), norm_type)
        norm = clip_norm(parameters, 1.5, norm_type)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected)
        for parameter, full_grad in zip(parameters, full, strict=True):
            grad = parameter.grad
            clipped = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(
                clipped, full_grad * (1.5 / expected), rtol=1e-5, atol=1e-6
            )
        multiply_gradients([{"params": parameters}], 100.0)
        clip_value(parameters, 0.5)
        for parameter in parameters:
            grad = parameter.grad
            assert grad is not None
            assert (
                grad.full_tensor() if isinstance(grad, DTensor) else grad
            ).abs().max() <= 0.5


@ranks(2)
def test_stages_of_a_pipeline_share_one_norm(ctx: ProcessContext) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = (
        torch.tensor([3.0, 0.0]) if ctx.world.rank == 0 else torch.tensor([0.0, 4.0])
    )
    norm = clip_norm(parameter, 1.0, across=ctx.world)
    assert norm.item() == 5.0
    assert parameter.grad.abs().max().item() == (3 if ctx.world.rank == 0 else 4) / (
        5 + 1e-6
    ) or torch.isclose(
        parameter.grad.abs().max(), torch.tensor((3 if ctx.world.rank == 0 else 4) / 5)
    )


@ranks(2)
def test_an_optimizer_follows_its_model_into_shards(ctx: ProcessContext) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(
                model(torch.randn(4, 4, generator=generator)).pow(2).mean()
            )
            optimizer.step()

    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    reference, plain = copy.deepcopy((model, optimizer))
    record = OptimizerRecord.write(optimizer, [model])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    record.bind(optimizer, [model])
    assert all(
        isinstance(values["exp_avg"], DTensor) for values in optimizer.state.values()
    )
    train(model, optimizer, 2)
    train(reference, plain, 2)
    for parameter, reference_parameter in zip(
        model.parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(
            parameter.full_tensor(), reference_parameter.detach(), rtol=0, atol=1e-6
        )
