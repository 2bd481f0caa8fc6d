"""prepare(): any number, order and combination of objects, real torch types, and clear errors for what cannot be."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, ProfileKwargs
from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.config.sections.parallel import DistributedDataParallelKwargs
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.optim.optimizer import PreparedOptimizer
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis
from hasten.testing.pool import ranks


class Net(nn.Module):
    """A network with a method, an attribute and a part that can be left unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.label = "mine"

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encode(x)) + 0 * self.unused(x).sum()

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def loss_of(self, x: Tensor) -> Any:
        return self(x).sum()

    def describe(self) -> str:
        return f"{self.label} with {sum(p.numel() for p in self.parameters())}"


class Partly(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.encode(x))


def inner_of(accelerator: Accelerator, model: nn.Module) -> Any:
    return accelerator.unwrap_model(model).inner


def data(rows: int = 8) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)),
        batch_size=2,
    )


@ranks(1, 2)
def test_any_order_comes_back_in_call_order_as_real_types(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    model = Net()
    optimizer = AdamW(model.parameters())
    scheduler = StepLR(optimizer, 1)
    out = accelerator.prepare(scheduler, data(), optimizer, None, model)
    kinds: tuple[type[Any], ...] = (
        LRScheduler,
        DataLoader,
        Optimizer,
        type(None),
        nn.Module,
    )
    assert [
        isinstance(value, kind) for value, kind in zip(out, kinds, strict=True)
    ] == [True] * 5
    assert accelerator.prepare(*out) == out  # preparing twice is harmless
    assert len(accelerator._prepared.models) == 1
    assert accelerator.unwrap_model(out[4]) is model
    assert set(accelerator.get_state_dict(out[4])) == set(model.state_dict())


@ranks(1, 2)
def test_gan_shared_optimizers_frozen_and_factories(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    generator, critic, frozen = Net(), Net(), Net().requires_grad_(False)
    owned: list[Tensor] = [*generator.parameters(), *critic.parameters()]
    joint_optimizer = SGD(owned, lr=0.1)
    groups: list[dict[str, Any]] = [
        {"params": critic.head.parameters(), "lr": 0.5},
        {"params": critic.inner.parameters()},
    ]
    head_only = SGD(groups, lr=0.1)
    g, c, f, both_p, head_p = accelerator.prepare(
        generator, critic, frozen, joint_optimizer, head_only
    )
    assert isinstance(g, DistributedDataParallel) == (ctx.world.size > 1)
    assert not isinstance(f, DistributedDataParallel)
    assert [group["lr"] for group in head_p.param_groups] == [0.5, 0.1]
    accelerator.backward(
        F.mse_loss(c(g(torch.randn(2, 4)) @ torch.ones(2, 4)), torch.zeros(2, 2))
    )
    both_p.step()
    made_model, factory_optimizer = accelerator.prepare(Net(), partial(AdamW, lr=0.25))
    assert isinstance(factory_optimizer, PreparedOptimizer)
    assert factory_optimizer.param_groups[0]["lr"] == 0.25
    assert {id(p) for p in factory_optimizer.param_groups[0]["params"]} == {
        id(p) for p in made_model.parameters()
    }


def test_factory_for_two_models_is_refused() -> None:
    with pytest.raises(PrepareError, match="2 trainable models"):
        Accelerator().prepare(Net(), Net(), partial(SGD, lr=0.1))


def test_optimizer_of_an_unprepared_model_is_named() -> None:
    accelerator = Accelerator()
    with pytest.raises(
        PrepareError, match=r"not prepared: group 0, parameter 0, shape \(4, 4\)"
    ):
        accelerator.prepare(SGD(Net().parameters(), lr=0.1))
    model = accelerator.prepare(Net())
    later = accelerator.prepare(
        SGD(accelerator.unwrap_model(model).parameters(), lr=0.1)
    )
    assert isinstance(later, PreparedOptimizer)


def test_objects_that_are_none_of_the_kinds_are_refused() -> None:
    with pytest.raises(PrepareError, match="wrap the dataset in a"):
        Accelerator().prepare(TensorDataset(torch.ones(1)))
    with pytest.raises(PrepareError, match="type str"):
        Accelerator().prepare("model")
    with pytest.raises(PrepareError, match="optimizer that is not prepared"):
        Accelerator().prepare(StepLR(SGD(Net().parameters(), lr=0.1), 1))
    with pytest.raises(PrepareError, match="has not prepared"):
        Accelerator().accumulate(Net())
    with pytest.raises(PrepareError, match="2 entries for 1 objects"):
        Accelerator().prepare(Net(), device_placement=[True, False])


@ranks(1, 2)
def test_existing_optimizer_state_and_tied_weights_survive(ctx: ProcessContext) -> None:
    model = Net()
    model.unused.weight = model.head.weight
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    moments = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}
    prepared, optimizer = Accelerator().prepare(model, optimizer)
    assert all(
        torch.equal(state["exp_avg"], moments[id(p)])
        for p, state in optimizer.state.items()
    )
    assert model.unused.weight is model.head.weight
    assert prepared.unused.weight is model.head.weight


@ranks(1, 2)
def test_plateau_scheduler_and_lbfgs(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    model = Net()
    optimizer = SGD(model.parameters(), lr=1.0)
    prepared, optimizer, plateau = accelerator.prepare(
        model, optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    )
    for _ in range(4):
        accelerator.backward(prepared(torch.ones(2, 4)).sum() * 0)
        optimizer.step()
        plateau.step(1.0)
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.125
    lbfgs_model = Net()
    lbfgs = torch.optim.LBFGS(lbfgs_model.parameters(), lr=0.1, max_iter=2)
    other_p, second = accelerator.prepare(lbfgs_model, lbfgs)

    def closure() -> Tensor:
        second.zero_grad()
        loss = F.mse_loss(other_p(torch.ones(2, 4)), torch.zeros(2, 2))
        accelerator.backward(loss)
        return loss

    first = float(second.step(closure).detach())
    assert float(closure().detach()) < first


@ranks(2)
def test_user_attributes_and_methods_through_ddp(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    assert model.label == "mine"
    assert model.describe().startswith("mine with")
    with torch.no_grad():
        assert model.encode(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(StepError, match=r"mark_forward_method\(model, 'encode'\)"):
        model.encode(torch.ones(1, 4))
    accelerator.mark_forward_method(model, "loss_of")
    accelerator.backward(model.loss_of(torch.full((1, 4), float(ctx.rank + 1))))
    grads = accelerator.gather(inner_of(accelerator, model).weight.grad.unsqueeze(0))
    assert torch.equal(grads[0], grads[1])  # routed through DDP: synchronised
    with pytest.raises(PrepareError, match="no method 'encod'"):
        accelerator.mark_forward_method(model, "encod")


@ranks(2)
def test_unused_parameters_are_named(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Partly())
    accelerator.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(StepError, match=r"unused\.weight, unused\.bias") as caught:
        model(torch.ones(1, 4))
    assert "find_unused_parameters=True" in str(caught.value)
    allowed = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    tolerant_model = allowed.prepare(Partly())
    for _ in range(2):
        allowed.backward(tolerant_model(torch.ones(1, 4)).sum())


@ranks(2)
@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_gradients_are_compressed_by_hooks(ctx: ProcessContext, hook: Any) -> None:
    accelerator = Accelerator(
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                comm_hook=hook, comm_state_option={"start_powerSGD_iter": 2}
            )
        ]
        if hook != "fp16"
        else [
            DistributedDataParallelKwargs(
                comm_hook="fp16", static_graph=True, gradient_as_bucket_view=True
            )
        ]
    )
    model, optimizer = accelerator.prepare(
        *(lambda m: (m, SGD(m.parameters(), lr=0.1)))(Net())
    )
    for step in range(4):
        accelerator.backward(model(torch.full((2, 4), float(ctx.rank + step))).sum())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.gather(
        inner_of(accelerator, model).weight.detach().unsqueeze(0)
    )
    assert torch.equal(weights[0], weights[1])


@ranks(2)
def test_settings_ddp_cannot_honour_are_errors(ctx: ProcessContext) -> None:
    with pytest.raises(ConfigError, match="only the NCCL backend"):
        Accelerator(
            kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")]
        ).prepare(Net())
    with pytest.raises(ConfigError, match="strategy='none'"):
        Accelerator(strategy="none")


@ranks(2)
def test_only_the_boundary_communicates(ctx: ProcessContext) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = Net()
    model, _ = accelerator.prepare(net, SGD(net.parameters(), lr=0.1))
    for boundary in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 4), float(ctx.rank + 1))).sum())
            grads = accelerator.gather(
                inner_of(accelerator, model).weight.grad.unsqueeze(0)
            )
            assert torch.equal(grads[0], grads[1]) == boundary
    each = Accelerator(
        gradient_accumulation_plugin={"num_steps": 2, "sync_each_batch": True}
    )
    net = Net()
    eager, _ = each.prepare(net, SGD(net.parameters(), lr=0.1))
    with each.accumulate(eager):
        each.backward(eager(torch.full((1, 4), float(ctx.rank + 1))).sum())
        grads = each.gather(inner_of(each, eager).weight.grad.unsqueeze(0))
        assert torch.equal(grads[0], grads[1])


@ranks(1, 2)
def test_evaluation_mode_leaves_a_model_unspread(ctx: ProcessContext) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare_model(Net(), evaluation_mode=True)
    assert not isinstance(model, DistributedDataParallel)
    assert model(torch.ones(1, 4)).dtype == torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model


@ranks(1, 2)
def test_uneven_inputs_can_be_joined(ctx: ProcessContext) -> None:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(
        *(lambda m: (m, SGD(m.parameters(), lr=0.1)))(Net())
    )
    done = 0
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + ctx.rank):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    assert done == 2 + ctx.rank


@ranks(1, 2)
def test_compiled_and_recomputed_models_give_the_same_gradients(
    ctx: ProcessContext,
) -> None:
    def blocks() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        )

    def grads(accelerator: Accelerator) -> list[Tensor]:
        model = accelerator.prepare(blocks())
        # after so many calls in which nothing was compiled, a setting that asks for it is an error
        for _ in range(3):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
        return [p.grad for p in model.parameters() if p.grad is not None]

    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch 2.13, while it traces
    expected = grads(Accelerator())
    eager = TorchDynamoPlugin(backend="eager")
    regional = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    settings: list[dict[str, Any]] = [
        {"dynamo_plugin": eager},
        {"dynamo_plugin": regional},
        {"recompute": ("Linear",)},
    ]
    for accelerator_settings in settings:
        for actual_grad, expected_grad in zip(
            grads(Accelerator(**accelerator_settings)), expected, strict=True
        ):
            torch.testing.assert_close(actual_grad, expected_grad)
    with pytest.raises(ConfigError, match="names Blok"):
        Accelerator(recompute=("Blok",)).prepare(blocks())


@ranks(1, 2)
def test_collectives_on_the_accelerator(ctx: ProcessContext) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    me, world = ctx.rank, ctx.world.size
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gather_ragged(torch.full((me + 1,), me)).shape == (
        sum(range(1, world + 1)),
    )
    assert accelerator.gather_object([me]) == list(range(world))
    assert accelerator.broadcast_object_list([me, "x"]) == [0, "x"]
    assert accelerator.broadcast(torch.tensor([me]), axes=tuple(Axis)).tolist() == [0]
    assert accelerator.pad_across_processes(torch.ones(me + 1)).shape == (world,)


def test_profile_leaves_a_trace_and_memory_is_freed(tmp_path: Any) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    from_config = ProfileKwargs(
        output_trace_dir=str(tmp_path / "traces"), activities=("cpu",)
    )
    with Accelerator(kwargs_handlers=[from_config]).profile() as running:
        model(torch.ones(1, 4))
    assert running.key_averages()
    assert (tmp_path / "traces" / "rank_0.json").stat().st_size > 0
    model = accelerator.free_memory(model)
    assert model is None
    assert accelerator._prepared.models == []


def one_cycle_run(loader_first: bool, calls: int = 1) -> tuple[list[str], float]:
    """The warnings while a schedule over two epochs of 20 batches is prepared, and its rate after those epochs."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(80, 1)), batch_size=4)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        if loader_first:
            loader = accelerator.prepare(loader)
        schedule = OneCycleLR(
            optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(loader)
        )
        if calls == 1:
            model, optimizer, loader, schedule = accelerator.prepare(
                model, optimizer, loader, schedule
            )
        else:
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            loader = accelerator.prepare(loader)
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            schedule.step()
    return [str(caught.message) for caught in caught_warnings], float(
        schedule.get_last_lr()[0]
    )


@ranks(2)
def test_a_schedule_made_for_the_undivided_loader_is_reported_before_training(
    ctx: ProcessContext,
) -> None:
    messages, rate = one_cycle_run(loader_first=True)
    assert (messages, rate < 2e-3) == ([], True), "at its end"
    for calls in (1, 2):
        messages, rate = one_cycle_run(loader_first=False, calls=calls)
        assert rate > 2e-2, "half-way"
        assert [
            "would end at step 20 of 40" in warning and "num_updates(loader" in warning
            for warning in messages
        ] == [True] * (ctx.rank == 0)
