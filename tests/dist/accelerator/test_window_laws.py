"""Random loops over several models and optimizers in one window update as they would by hand, or are refused.

A loop is a random order of backward(), step() and zero_grad() calls. Every loss reaches a random set of models, so that,
as in a GAN, a loss also reaches parameters whose optimizer does not want it and clears it. The reference sums by hand what
each optimizer's step() finds in every micro-step, on plain modules and the batches of all ranks together. Gradients that it
clears again inside a window of several micro-steps cannot be taken out of the sums: such loops are refused. Tolerance: sums in
another order (2e-6 on weights of about 1).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, GradScalerKwargs
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

WINDOWS = 3
ROWS = 2


@dataclass(frozen=True)
class Program:
    """One iteration: ("z", i) and ("s", i) are calls of optimizer i, ("b", k) is the backward of loss k."""

    models: int
    every: int
    reaches: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[str, int], ...]


def draw(rng: random.Random) -> Program:
    """A loop in which nothing that a step should use arrives after that optimizer's zero_grad at the end."""
    while True:
        models = rng.randint(1, 3)
        losses = rng.randint(1, 3)
        reaches = tuple(
            tuple(sorted(rng.sample(range(models), rng.randint(1, models))))
            for _ in range(losses)
        )
        calls = [(kind, i) for i in range(models) for kind in "zs"] + [
            ("b", k) for k in range(losses)
        ]
        rng.shuffle(calls)
        if all(_makes_sense(tuple(calls), reaches, i) for i in range(models)):
            return Program(models, rng.randint(1, 4), reaches, tuple(calls))


def _makes_sense(
    calls: tuple[tuple[str, int], ...], reaches: tuple[tuple[int, ...], ...], index: int
) -> bool:
    clears, steps = calls.index(("z", index)), calls.index(("s", index))
    losses = [
        position
        for position, (kind, k) in enumerate(calls)
        if kind == "b" and index in reaches[k]
    ]
    has_one_model = (
        all(reached == (0,) for reached in reaches) and ("s", 1) not in calls
    )
    if has_one_model:  # nobody writes a loop that throws its only loss away
        return all(
            clears < position < steps if clears < steps else position < steps
            for position in losses
        )
    # With zero_grad first, what comes before it or after step is thrown away, here and in plain torch.
    return clears < steps or max(losses, default=-1) < clears


def nets(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(count)
    ]


def loss_of(reached: list[nn.Module], x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 2)
    for net in reached:
        out = out + net(x)
    return (out - x[:, :2]).pow(2).mean()


def inputs(step: int, loss: int, rows: int) -> Tensor:
    return torch.randn(
        rows, 3, generator=torch.Generator().manual_seed(100 * step + loss)
    )


def plain(program: Program, size: int) -> list[nn.Module]:
    models = nets(program.models)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5) for model in models
    ]
    parameters = [list(model.parameters()) for model in models]
    # since zero_grad
    gradients = [[torch.zeros_like(p) for p in group] for group in parameters]
    for step in range(WINDOWS):
        # what step() has found in the window
        sums = [[torch.zeros_like(p) for p in group] for group in parameters]
        for micro in range(program.every):
            for kind, index in program.calls:
                if kind == "z":
                    gradients[index] = [torch.zeros_like(p) for p in parameters[index]]
                elif kind == "s":
                    sums[index] = [
                        a + b
                        for a, b in zip(sums[index], gradients[index], strict=True)
                    ]
                    if micro == program.every - 1 and any(
                        index in reached for reached in program.reaches
                    ):
                        for parameter, total in zip(
                            parameters[index], sums[index], strict=True
                        ):
                            parameter.grad = total / program.every
                        optimizers[index].step()
                else:
                    x = inputs(step, index, ROWS * size * program.every).chunk(
                        program.every
                    )[micro]
                    reached = program.reaches[index]
                    inside = [p for i in reached for p in parameters[i]]
                    grads = iter(
                        torch.autograd.grad(
                            loss_of([models[i] for i in reached], x), inside
                        )
                    )
                    for i in reached:
                        gradients[i] = [total + next(grads) for total in gradients[i]]
    return models


def prepared(ctx: ProcessContext, program: Program, **options: Any) -> list[nn.Module]:
    accelerator = Accelerator(gradient_accumulation_steps=program.every, **options)
    models = nets(program.models)
    prepared_objects = accelerator.prepare(
        *models,
        *[torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in models],
    )
    models, optimizers = (
        list(prepared_objects[: program.models]),
        list(prepared_objects[program.models :]),
    )
    for step in range(WINDOWS):
        for micro in range(program.every):
            with accelerator.accumulate(*models):
                for kind, index in program.calls:
                    if kind == "z":
                        optimizers[index].zero_grad()
                    elif kind == "s":
                        optimizers[index].step()
                    else:
                        x = inputs(step, index, ROWS * ctx.world.size * program.every)
                        rank_inputs = x.chunk(program.every)[micro].chunk(
                            ctx.world.size
                        )[ctx.world.rank]
                        accelerator.backward(
                            loss_of(
                                [models[i] for i in program.reaches[index]], rank_inputs
                            )
                        )
    return [accelerator.unwrap_model(model) for model in models]


def assert_same(
    models: list[nn.Module], reference_models: list[nn.Module], description: object
) -> None:
    for a, b in zip(models, reference_models, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            full_parameter = p.full_tensor() if hasattr(p, "full_tensor") else p
            torch.testing.assert_close(
                full_parameter.detach(),
                q.detach(),
                rtol=0,
                atol=2e-6,
                msg=lambda t: f"{description}\n{t}",
            )


def clears_losses(program: Program) -> bool:
    """Whether the loop clears a loss inside a window: one that arrives after an optimizer's step, or before its zero_grad."""
    if program.every == 1 or program.models == 1:
        return False
    for index in range(program.models):
        clears, steps = (
            program.calls.index(("z", index)),
            program.calls.index(("s", index)),
        )
        losses = [
            position
            for position, (kind, k) in enumerate(program.calls)
            if kind == "b" and index in program.reaches[k]
        ]
        if clears < steps and any(not clears < position < steps for position in losses):
            return True
        if steps < clears and any(steps < position < clears for position in losses):
            return True
    return False


def check(ctx: ProcessContext, program: Program, **options: Any) -> None:
    if clears_losses(program):
        with pytest.raises(StepError, match="zero_grad\\(\\) would have to clear"):
            prepared(ctx, program, **options)
        return
    assert_same(
        prepared(ctx, program, **options), plain(program, ctx.world.size), program
    )


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_any_order_of_calls_updates_as_by_hand(
    ctx: ProcessContext, strategy: str
) -> None:
    rng = random.Random(7 * ctx.world.size + len(strategy))
    for _ in range(60 if strategy == "auto" else 20):
        check(ctx, draw(rng), strategy=strategy)


@ranks(2)
def test_any_order_of_calls_with_replicated_shards(ctx: ProcessContext) -> None:
    rng = random.Random(3)
    replicated = ParallelismConfig(dp_replicate_size=2, dp_shard_size=1)
    for _ in range(5):
        check(ctx, draw(rng), strategy="fsdp", parallelism_config=replicated)


@ranks(1, 2)
def test_two_optimizers_in_one_window_are_unscaled_by_one_scale(
    ctx: ProcessContext,
) -> None:
    """An overflow of the first optimizer moves the scale only when the second has used its gradients."""
    for every in (1, 2):
        small = GradScalerKwargs(init_scale=256.0)
        accelerator = Accelerator(
            mixed_precision="fp16",
            gradient_accumulation_steps=every,
            kwargs_handlers=[small],
        )
        weights = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        for weight in weights:
            nn.init.ones_(weight.weight)
        first, second, first_optimizer, second_optimizer = accelerator.prepare(
            *weights,
            *[torch.optim.SGD(weight.parameters(), lr=0.125) for weight in weights],
        )
        x = torch.ones(1, 2)
        for _ in range(every):
            with accelerator.accumulate(first, second):
                accelerator.backward(first(x).sum() * float("inf") + second(x).sum())
                first_optimizer.step()
                accelerator.backward(second(x).sum())
                second_optimizer.step()
        assert first_optimizer.step_was_skipped
        assert not second_optimizer.step_was_skipped
        torch.testing.assert_close(
            second.weight.detach(), torch.full((1, 2), 0.75), msg=f"{every}"
        )


@ranks(1, 2)
def test_a_block_inside_a_block_is_an_error(ctx: ProcessContext) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(*nets(2))
    for outer, inner in (
        ((first,), (first,)),
        ((first, second), (second,)),
        ((), (first,)),
        ((first,), (second,)),
    ):
        with (
            pytest.raises(StepError, match="Remove the inner block"),
            accelerator.accumulate(*outer),
            accelerator.accumulate(*inner),
        ):
            pass
    boundaries = []
    for _ in range(4):
        with accelerator.accumulate(first):
            boundaries.append(accelerator.sync_gradients)
    assert boundaries == [False, True, False, True], "a refused block leaves no trace"


@ranks(1)
def test_blocks_of_different_models_in_one_window_are_an_error(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(*nets(2))
    with accelerator.accumulate(first):
        pass
    with (
        pytest.raises(StepError, match="an Accelerator has one window"),
        accelerator.accumulate(second),
    ):
        pass
    with accelerator.accumulate(first):
        assert accelerator.sync_gradients
    for _ in range(2):
        with accelerator.accumulate(second):
            pass
    assert accelerator.sync_gradients


@ranks(1)
def test_a_second_weighted_loss_inside_a_window_is_an_error(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    (net,) = nets(1)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of([model], inputs(0, 0, 4)), weight=4)
        with pytest.raises(StepError, match="Add the losses before backward"):
            accelerator.backward(loss_of([model], inputs(0, 0, 4)), weight=4)
