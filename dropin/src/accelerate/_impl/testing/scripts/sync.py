"""Checks of gradient accumulation and `no_sync`: what reaches the other processes, and when weights change."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.settings.general import DataLoaderConfiguration
from accelerate._impl.settings.kwargs_handlers import GradientAccumulationPlugin
from accelerate._impl.testing.training import RegressionDataset, RegressionModel
from accelerate._impl.views.state import GradientState
from hasten.runtime.seeding import set_seed

# Any in this file: what `prepare` returns.
_EVERY = 2


def check_model_parameters(
    model_a: nn.Module,
    model_b: nn.Module,
    did_step: bool,
    iteration: int,
    **kwargs: Any,
) -> None:
    """Raise unless the gradients of two models are equal after a synchronised step, and different otherwise."""
    for a, b in zip(model_a.parameters(), model_b.parameters(), strict=True):
        if a.requires_grad and a.grad is not None and b.grad is not None:
            are_equal = torch.allclose(a.grad, b.grad, **kwargs)
            expected_relation = "equal" if did_step else "different"
            assert are_equal == did_step, (
                f"iteration {iteration}: {a.grad} and {b.grad} should be {expected_relation}"
            )


def step_model(
    model: Any,
    input: Tensor,
    target: Tensor,
    accelerator: Any,
    do_backward: bool = True,
) -> None:
    """Run forward and backward; without `do_backward`, the loss is divided by hand and the Accelerator is left out."""
    model.train()
    loss = functional.mse_loss(model(input), target.to(input.device))
    if do_backward:
        accelerator.backward(loss)
    else:
        (loss / accelerator.gradient_accumulation_steps).backward()


def get_training_setup(accelerator: Any, sched: bool = False) -> tuple[Any, ...]:
    """Return a model, a copy that `prepare` returned, and its loader; with `sched`, both optimizers and schedulers too."""
    set_seed(42)
    model = RegressionModel()
    prepared = copy.deepcopy(model)
    loader = DataLoader(RegressionDataset(length=80, seed=4), batch_size=16)
    model.to(accelerator.device)
    if not sched:
        return model, *accelerator.prepare(prepared, loader)
    optimizers = []
    for model_or_optimizer in (model, prepared):
        optimizers.append(torch.optim.AdamW(model_or_optimizer.parameters(), lr=1e-3))
    schedulers = [
        LambdaLR(model_or_optimizer, lambda epoch: 0.65**epoch)
        for model_or_optimizer in optimizers
    ]
    prepared_objects = accelerator.prepare(
        prepared, optimizers[1], loader, schedulers[1]
    )
    return (
        model,
        optimizers[0],
        schedulers[0],
        prepared_objects[2],
        prepared_objects[0],
        prepared_objects[1],
        prepared_objects[3],
    )


def test_noop_sync(accelerator: Any) -> None:
    model, prepared, loader = get_training_setup(accelerator)
    batch = next(iter(loader))
    for iteration in range(3):
        step_model(model, batch["x"], batch["y"], accelerator)
        with accelerator.no_sync(prepared) if iteration % 2 == 0 else nullcontext():
            step_model(prepared, batch["x"], batch["y"], accelerator)
        check_model_parameters(model, prepared, True, iteration)


def _stack_gradients(model: nn.Module) -> Tensor:
    return (
        torch.stack(
            [
                parameter.grad
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
        .detach()
        .clone()
    )


def test_distributed_sync(accelerator: Any) -> None:
    """Check that gradients differ between processes inside `no_sync` and are their mean after it."""
    _, model, loader = get_training_setup(accelerator)
    batch = next(iter(loader))
    with accelerator.no_sync(model):
        step_model(model, batch["x"], batch["y"], accelerator)
    local_gradients = accelerator.gather(_stack_gradients(model)[None])
    assert not torch.equal(local_gradients[0], local_gradients[1]), (
        "no_sync let gradients reach the other process"
    )
    step_model(model, batch["x"], batch["y"], accelerator)
    synced_gradients = _check_equal_gradients(accelerator, model)
    assert torch.allclose(
        synced_gradients[0], 2 * local_gradients.mean(0), rtol=1e-4
    ), (synced_gradients, local_gradients)


def test_distributed_sync_multiple_fwd(accelerator: Any) -> None:
    """Check that several forwards inside `no_sync` are reduced by one backward outside of it."""
    _, model, loader = get_training_setup(accelerator)
    batches = list(itertools.islice(loader, 2))
    with accelerator.no_sync(model):
        losses = []
        for batch in batches:
            losses.append(functional.mse_loss(model(batch["x"]), batch["y"]))
        for loss in losses[:-1]:
            accelerator.backward(loss)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[-1])
    _check_equal_gradients(accelerator, model)


def _check_equal_gradients(accelerator: Any, model: Any) -> Any:
    synced_gradients = accelerator.gather(_stack_gradients(model)[None])
    assert torch.equal(synced_gradients[0], synced_gradients[1]), (
        "gradients differ after a synchronised step"
    )
    return synced_gradients


def _make_accelerator(
    split_batches: bool, dispatch_batches: bool, sync_each_batch: bool
) -> Accelerator:
    loader_config = DataLoaderConfiguration(
        split_batches=split_batches, dispatch_batches=dispatch_batches
    )
    plugin = GradientAccumulationPlugin(
        num_steps=_EVERY, sync_each_batch=sync_each_batch
    )
    return Accelerator(
        dataloader_config=loader_config, gradient_accumulation_plugin=plugin
    )


def test_gradient_accumulation(
    split_batches: bool = False,
    dispatch_batches: bool = False,
    sync_each_batch: bool = False,
) -> None:
    """Check that gradients of a window are those of one step over all its samples, on every process."""
    accelerator = _make_accelerator(split_batches, dispatch_batches, sync_each_batch)
    model, prepared, loader = get_training_setup(accelerator)
    for iteration, batch in enumerate(loader):
        inputs, targets = accelerator.gather((batch["x"], batch["y"]))
        step_model(model, inputs, targets, accelerator, False)
        with accelerator.accumulate(prepared):
            step_model(prepared, batch["x"], batch["y"], accelerator)
        ended = (iteration + 1) % _EVERY == 0 or iteration + 1 == len(loader)
        if ended or sync_each_batch:
            check_model_parameters(model, prepared, True, iteration, rtol=1e-4)
        if ended:
            model.zero_grad()
            prepared.zero_grad()
    GradientState._reset_state()


def test_gradient_accumulation_with_opt_and_scheduler(
    split_batches: bool = False,
    dispatch_batches: bool = False,
    sync_each_batch: bool = False,
) -> None:
    """Check that weights and learning rates change at the end of a window only, and as those of a plain loop."""
    accelerator = _make_accelerator(split_batches, dispatch_batches, sync_each_batch)
    (
        model,
        optimizer,
        scheduler,
        loader,
        prepared,
        prepared_optimizer,
        prepared_scheduler,
    ) = get_training_setup(accelerator, True)
    for iteration, batch in enumerate(loader):
        inputs, targets = accelerator.gather((batch["x"], batch["y"]))
        ended = (iteration + 1) % _EVERY == 0 or iteration + 1 == len(loader)
        loss: Any = functional.mse_loss(model(inputs), targets) / _EVERY
        loss.backward()
        if ended:
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(1 if split_batches else accelerator.num_processes):
                scheduler.step()
        with accelerator.accumulate(prepared):
            step_model(prepared, batch["x"], batch["y"], accelerator)
            prepared_optimizer.step()
            prepared_scheduler.step()
            prepared_optimizer.zero_grad()
        rates = (
            optimizer.param_groups[0]["lr"],
            prepared_optimizer.param_groups[0]["lr"],
        )
        assert rates[0] == rates[1], f"iteration {iteration}: learning rates {rates}"
        for a, b in zip(model.parameters(), prepared.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4), (
                f"iteration {iteration}: {a} and {b}"
            )
    GradientState._reset_state()


def test_dataloader_break() -> None:
    """Check that a loop inside of a loop, and one that is left early, leave the active loader as it was."""
    accelerator = Accelerator()
    first, second = accelerator.prepare(
        *(DataLoader(RegressionDataset(length=n), batch_size=16) for n in (80, 96))
    )
    assert not accelerator.gradient_state.in_dataloader
    for iteration, _ in enumerate(first):
        assert accelerator.gradient_state.active_dataloader is first
        if iteration == 1:
            for _ in second:
                assert accelerator.gradient_state.active_dataloader is second
        if iteration == 2:
            for _ in second:
                break
    assert not accelerator.gradient_state.in_dataloader


def main() -> None:
    accelerator = Accelerator()
    process_state = accelerator.state
    process_state.print(
        "**Test `accumulate` gradient accumulation with dataloader break**"
    )
    test_dataloader_break()
    if process_state.num_processes == 1:
        process_state.print("**Test NOOP `no_sync` context manager**")
        test_noop_sync(accelerator)
    else:
        process_state.print("**Test Distributed `no_sync` context manager**")
        test_distributed_sync(accelerator)
        test_distributed_sync_multiple_fwd(accelerator)
    kinds: list[tuple[bool, ...]] = [(False, False, False)]
    if process_state.num_processes > 1:
        kinds = list(itertools.product((False, True), repeat=3))
    for split, dispatch, each in kinds:
        option_text = f"`split_batches={split}`, `dispatch_batches={dispatch}`, `sync_each_batch={each}`"
        process_state.print(
            f"**Test `accumulate` gradient accumulation, {option_text}**"
        )
        test_gradient_accumulation(split, dispatch, each)
        test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each)
