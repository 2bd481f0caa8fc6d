"""The prepared optimizer and scheduler against the plain torch loop."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hasten.config.sections.loop import GradScalerKwargs
from hasten.errors import StepError
from hasten.optim.clip import clip_norm, clip_value
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.optim.optimizer import PreparedOptimizer, settle_optimizers
from hasten.optim.scheduler import PreparedScheduler
from hasten.optim.window import divide_loss
from hasten.precision.base import Precision
from hasten.precision.build import build_precision

CPU = torch.device("cpu")


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def random_batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, 6, generator=generator),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(count)
    ]


class Loop:
    """A hand-made accelerator: just the collaborators of this room."""

    def __init__(
        self,
        every: int = 1,
        precision: str = "no",
        make: Callable[..., Any] | None = None,
    ) -> None:
        self.model = toy()
        self.clock = StepClock(every)
        in_flight = functools.partial(getattr, self.clock, "in_flight")
        self.precision: Precision = build_precision(precision, CPU, in_flight=in_flight)  # type: ignore[arg-type]
        self.precision.convert(self.model)
        inner = (make or functools.partial(torch.optim.AdamW, lr=0.05))(
            self.model.parameters()
        )
        self.optimizer = PreparedOptimizer(inner, self.clock, self.precision)

    def batches(
        self, data: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        cursor = LoaderCursor()
        with self.clock.iterate_loader(cursor):
            for index, batch in enumerate(data):
                cursor.at_end = index == len(data) - 1
                yield batch

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        torch.autograd.backward(
            self.precision.scale(divide_loss(*self.clock.weigh(loss, weight)))
        )

    def clip(self, max_norm: float) -> Tensor | None:
        if not self.clock.boundary:
            return None
        parameters = list(self.model.parameters())
        settle_optimizers(parameters, [self.optimizer])
        return clip_norm(parameters, max_norm)


def train_on_big_batches(
    data: list[tuple[Tensor, Tensor]], every: int, epochs: int, max_norm: float | None
) -> nn.Module:
    """Big batches by hand: each window as one batch."""
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(epochs):
        for start in range(0, len(data), every):
            x, y = (
                torch.cat(tensors)
                for tensors in zip(*data[start : start + every], strict=True)
            )
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("clear_first", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_windows_equal_big_batches(
    every: int, max_norm: float | None, weighted: bool, clear_first: bool
) -> None:
    data = random_batches(7)
    loop = Loop(every)
    schedule = PreparedScheduler(
        lr_scheduler.StepLR(loop.optimizer.optimizer, 2, 0.5), loop.optimizer
    )
    for _ in range(3):
        for x, y in loop.batches(data):
            loop.clock.tick((0,))
            if clear_first:
                loop.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(loop.model(x), y)
            loop.backward(loss, len(y) if weighted else None)
            if max_norm is not None:
                loop.clip(max_norm)
            loop.optimizer.step()
            schedule.step()
            if not clear_first:
                loop.optimizer.zero_grad()
    for parameter, plain_parameter in zip(
        loop.model.parameters(),
        train_on_big_batches(data, every, 3, max_norm).parameters(),
        strict=True,
    ):
        torch.testing.assert_close(parameter, plain_parameter, rtol=0, atol=1e-6)


def test_ragged_weights_equal_one_big_batch() -> None:
    data = [
        (x[: 1 + i % 4], y[: 1 + i % 4]) for i, (x, y) in enumerate(random_batches(6))
    ]
    loop = Loop(6)
    for x, y in loop.batches(data):
        loop.clock.tick()
        loop.backward(nn.functional.cross_entropy(loop.model(x), y), len(y))
    loop.optimizer.settle()
    loop.optimizer.settle()
    model = toy()
    x, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
    for parameter, plain_parameter in zip(
        loop.model.parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.grad, plain_parameter.grad, rtol=0, atol=1e-7
        )


def test_it_is_the_inner_optimizer_in_everything_but_timing() -> None:
    loop = Loop()
    optimizer, inner = loop.optimizer, loop.optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(inner.param_groups) == 2
    x, y = random_batches(1)[0]
    loop.backward(nn.functional.cross_entropy(loop.model(x), y))
    assert optimizer.step() is None
    assert calls == ["post"]
    assert optimizer.last is not None
    assert optimizer.last.applied
    state = optimizer.state_dict()
    assert state["state"].keys() == inner.state_dict()["state"].keys()
    optimizer.load_state_dict(state)
    twin = copy.deepcopy(optimizer)
    assert twin.optimizer is not inner
    assert isinstance(pickle.loads(pickle.dumps(inner)), torch.optim.AdamW)
    assert "AdamW" in repr(optimizer)
    # a scheduler made from the prepared optimizer
    schedule = lr_scheduler.LambdaLR(optimizer, lambda _: 0.1)
    assert inner.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.step()
    schedule.step()


def test_closures_work_where_they_mean_something() -> None:
    loop = Loop(make=functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5))
    data = random_batches(1)[0]

    def closure() -> float:
        loop.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(loop.model(data[0]), data[1])
        loop.backward(loss)
        return loss.item()

    model = toy()
    plain_optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)

    def plain_closure() -> float:
        plain_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        torch.autograd.backward(loss)
        return loss.item()

    for _ in range(3):
        assert loop.optimizer.step(closure) == plain_optimizer.step(plain_closure)
    for a, b in zip(loop.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(StepError, match="cannot run under mixed_precision='fp16'"):
        Loop(precision="fp16").optimizer.step(closure)
    with pytest.raises(StepError, match="gradient_accumulation_steps=2"):
        Loop(every=2).optimizer.step(closure)


def test_schedule_free_switches_are_forwarded() -> None:
    class ScheduleFreeSGD(torch.optim.SGD):
        mode = "train"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    loop = Loop(make=functools.partial(ScheduleFreeSGD, lr=0.1))
    loop.optimizer.eval()
    assert loop.optimizer.mode == "eval"
    loop.optimizer.train()
    assert loop.optimizer.mode == "train"
    Loop().optimizer.train()  # an optimizer without the switch does not mind


SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
]


@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step.*:UserWarning")
def test_schedules_follow_updates(index: int) -> None:
    loop = Loop(every=3)
    plain_optimizer = torch.optim.AdamW(toy().parameters(), lr=0.05)
    expected_schedule = SCHEDULES[index](plain_optimizer)
    schedule = PreparedScheduler(
        SCHEDULES[index](loop.optimizer.optimizer), loop.optimizer
    )
    assert isinstance(schedule, lr_scheduler.LRScheduler)
    rates, expected_rates = [], []
    for _ in range(2):
        for number, (x, y) in enumerate(loop.batches(random_batches(7))):
            loop.clock.tick()
            loop.backward(nn.functional.cross_entropy(loop.model(x), y))
            loop.optimizer.step()
            schedule.step()
            loop.optimizer.zero_grad()
            if number in (2, 5, 6):
                rates.append(schedule.get_last_lr())
                plain_optimizer.step()
                expected_schedule.step()
                expected_rates.append(expected_schedule.get_last_lr())
    assert rates == expected_rates
    assert schedule.state_dict().keys() == expected_schedule.state_dict().keys()


def test_plateau_and_epoch_schedules_and_plain_ones() -> None:
    loop = Loop()
    plateau = PreparedScheduler(
        lr_scheduler.ReduceLROnPlateau(
            loop.optimizer.optimizer, factor=0.5, patience=0
        ),
        loop.optimizer,
    )
    x, y = random_batches(1)[0]
    for _ in range(3):
        for _ in range(4):
            loop.backward(nn.functional.cross_entropy(loop.model(x), y))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        plateau.step(1.0)
        plateau.step(1.0)  # no update since: does not count
    assert plateau.get_last_lr() == [0.05 / 4]
    free = PreparedScheduler(
        lr_scheduler.StepLR(loop.optimizer.optimizer, 1, 0.5),
        loop.optimizer,
        follow=False,
    )
    loop.optimizer.step()
    free.step()
    free.step()
    assert free.last_epoch == 2
    assert free.get_last_lr()[0] == pytest.approx(0.05 / 16)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_before_the_first_attempt_a_schedule_can_be_wound_forward() -> None:
    loop = Loop()
    schedule = PreparedScheduler(
        lr_scheduler.StepLR(loop.optimizer.optimizer, 1, 0.5), loop.optimizer
    )
    schedule.step()
    assert schedule.last_epoch == 1


def step_outcome(optimizer: PreparedOptimizer) -> tuple[bool, float | None]:
    """Whether the latest step was skipped, and the scale it was tried at."""
    return (
        optimizer.step_was_skipped,
        None if optimizer.last is None else optimizer.last.scale,
    )


def test_fp16_overflow_is_a_result_and_holds_the_schedule() -> None:
    loop = Loop(precision="fp16", make=functools.partial(torch.optim.SGD, lr=0.1))
    schedule = PreparedScheduler(
        lr_scheduler.StepLR(loop.optimizer.optimizer, 1, 0.5), loop.optimizer
    )
    initial_parameters = [p.clone() for p in loop.model.parameters()]
    x, y = random_batches(1)[0]
    loop.backward(nn.functional.cross_entropy(loop.model(x), y) * float("inf"))
    loop.optimizer.step()
    schedule.step()
    loop.optimizer.zero_grad()
    assert step_outcome(loop.optimizer) == (True, 65536.0)
    assert schedule.last_epoch == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(initial_parameters, loop.model.parameters(), strict=True)
    )
    loop.backward(nn.functional.cross_entropy(loop.model(x), y))
    loop.clip(1e9)
    loop.optimizer.step()
    schedule.step()
    assert step_outcome(loop.optimizer) == (False, 32768.0)
    assert schedule.last_epoch == 1
    assert all(
        p.grad is not None and p.grad.abs().max() < 10 for p in loop.model.parameters()
    ), "unscaled once"


def test_fp16_trains_like_torch_with_a_scaler() -> None:
    data = random_batches(5)
    loop = Loop(precision="fp16")
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(
        "cpu", **{k: getattr(GradScalerKwargs(), k) for k in ("init_scale",)}
    )
    for number in range(20):
        x, y = data[number % 5]
        boom = float("inf") if number in (3, 11) else 1.0
        loop.backward(nn.functional.cross_entropy(loop.model(x), y) * boom)
        norm = loop.clip(0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y) * boom
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert norm is not None
        torch.testing.assert_close(norm, expected, equal_nan=True)
    for parameter, plain_parameter in zip(
        loop.model.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(parameter, plain_parameter)
    assert loop.precision.state_dict()["scale"] == scaler.get_scale()


def test_two_losses_scaled_together_are_unscaled_together() -> None:
    """The scale does not move between two optimizers whose losses went backward under the same one."""
    loop = Loop(precision="fp16", make=functools.partial(torch.optim.SGD, lr=0.1))
    second_model = nn.Linear(6, 3)
    second_optimizer = PreparedOptimizer(
        torch.optim.SGD(second_model.parameters(), lr=0.1), loop.clock, loop.precision
    )
    x, y = random_batches(1)[0]
    expected = torch.autograd.grad(
        nn.functional.cross_entropy(second_model(x), y), second_model.weight
    )[0]
    loop.backward(nn.functional.cross_entropy(loop.model(x), y) * float("inf"))
    loop.backward(nn.functional.cross_entropy(second_model(x), y))
    loop.optimizer.step()
    second_optimizer.step()
    assert loop.optimizer.step_was_skipped
    assert not second_optimizer.step_was_skipped
    assert second_model.weight.grad is not None
    torch.testing.assert_close(second_model.weight.grad, expected)


def test_value_clipping_and_multiplication_see_every_gradient() -> None:
    dense, sparse = nn.Linear(3, 2), nn.Embedding(5, 3, sparse=True)
    parameters = [*dense.parameters(), *sparse.parameters()]
    torch.autograd.backward(dense(sparse(torch.tensor([0, 1, 1]))).sum().mul(100))
    clip_value(parameters, 0.5)
    for p in parameters:
        assert p.grad is not None
        values = p.grad._values() if p.grad.is_sparse else p.grad
        assert values.abs().max() <= 0.5


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_equal_torch(norm_type: float) -> None:
    clipped_model, plain_model = toy(), toy()
    x, y = random_batches(1)[0]
    for model in (clipped_model, plain_model):
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
    mixed = [
        *clipped_model.parameters(),
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
    ]
    assert clip_norm(mixed, 0.01, norm_type).item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 0.01, norm_type).item()
    )
    for a, b in zip(clipped_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert clip_norm([], 1.0).item() == 0.0


def test_an_optimizer_whose_zero_grad_takes_nothing_is_cleared() -> None:
    class OlderSGD(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]  # as classes of users are written
            super().zero_grad()

    loop = Loop(make=functools.partial(OlderSGD, lr=0.1))
    loop.model(torch.ones(1, 6)).sum().backward()
    loop.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in loop.model.parameters())
