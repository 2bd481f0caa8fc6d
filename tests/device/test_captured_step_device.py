"""capture_step() on a real GPU: a step as one CUDA graph trains as the plain loop does, and notices what a graph would freeze."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.accelerator.facade import Accelerator
from hasten.errors import HastenWarning
from hasten.extensions.metrics.part import metrics_of

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The driver's handles stay for the life of the process; they are no test's leak."""
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a CUDA device")
    torch.zeros(2, device="cuda").add_(1)


class Run:
    """One training: a model with dropout and batch norm, AdamW and a schedule."""

    def __init__(
        self,
        performance: str,
        captured: bool,
        kind: Any = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        self.accelerator = Accelerator(performance=performance, **settings)
        net = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 4),
        )
        bare_optimizer: torch.optim.Optimizer = kind(
            net.parameters(), lr=1e-2, fused=True
        )
        schedule = torch.optim.lr_scheduler.LinearLR(
            bare_optimizer, 1.0, 0.1, total_iters=12
        )
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            net, bare_optimizer, schedule
        )
        self.step: Callable[[Tensor, Tensor], Tensor] = (
            self.accelerator.capture_step(self._step) if captured else self._step
        )

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(
        self, numbers: range, rows: Callable[[int], int] = lambda number: 8
    ) -> list[float]:
        losses = []
        torch.cuda.manual_seed(numbers.start)  # dropout, also where two runs take turns
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(rows(number), 16, generator=generator).cuda()
            y = torch.randint(4, (rows(number),), generator=generator).cuda()
            losses.append(self.step(x, y).detach())
            self.schedule.step()
        return [loss.item() for loss in losses]


def weights(run: Run) -> list[Tensor]:
    return [
        tensor.detach().clone()
        for tensor in (*run.model.parameters(), *run.model.buffers())
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_captured_step_trains_as_the_plain_one(kind: Any, precision: str) -> None:
    plain = Run("off", False, kind, mixed_precision=precision)
    expected_losses = plain.train(range(14))
    captured = Run("auto", True, kind, mixed_precision=precision)
    losses = captured.train(range(14))
    step: Any = captured.step
    assert not step.refusal
    assert step._graphs, "nothing was captured"
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for a, b in zip(weights(captured), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert captured.optimizer.num_updates == plain.optimizer.num_updates == 14
    assert captured.accelerator._clock.num_updates == 14
    assert captured.schedule.get_last_lr() == plain.schedule.get_last_lr()


def test_other_shapes_have_graphs_of_their_own() -> None:
    def rows(number: int) -> int:
        return 5 if number % 4 == 3 else 8

    expected = Run("off", False).train(range(24), rows)
    captured = Run("auto", True)
    assert captured.train(range(24), rows) == pytest.approx(expected, rel=1e-4)
    step: Any = captured.step
    assert len(step._graphs) == 2


def test_loaded_state_and_changed_options_are_noticed() -> None:
    plain, captured = Run("off", False), Run("auto", True)
    for run in (plain, captured):
        run.train(range(8))
        state = run.optimizer.state_dict()
        run.train(range(8, 10))
        run.optimizer.load_state_dict(state)  # torch makes new tensors
        run.optimizer.param_groups[0]["weight_decay"] = 0.5
    assert captured.train(range(10, 18)) == pytest.approx(
        plain.train(range(10, 18)), rel=1e-4
    )


def test_losses_of_replays_are_watched() -> None:
    captured = Run("auto", True)
    captured.train(range(8))
    with torch.no_grad():
        next(captured.model.parameters()).fill_(float("nan"))

    def to_the_end() -> None:
        captured.train(range(8, 12))
        captured.accelerator.end_training()

    with pytest.warns(HastenWarning, match="loss"):
        to_the_end()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mixed_precision": "fp16"}, "fp16"),
        ({"trust": {"numbers": "stop"}}, "trust.numbers=stop"),
        ({"gradient_accumulation_steps": 2}, "accumulated"),
        ({"performance": {"step_graph": False}}, "step_graph is off"),
    ],
)
def test_what_a_graph_cannot_hold_runs_as_it_is(
    settings: dict[str, Any], why: str
) -> None:
    accelerator = Accelerator(**{"performance": "auto", **settings})
    step: Any = accelerator.capture_step(lambda x: x)  # type: ignore[misc]  # any function
    assert why in step.refusal
    assert step(3) == 3


def test_replays_give_their_loss_and_norm_to_the_metrics() -> None:
    run = Run("auto", True, metrics={"port": 0}, trust="off")
    metrics = metrics_of(run.accelerator)
    assert metrics is not None
    log = metrics._run_log()
    assert log is not None
    log.every_second = None
    run.train(range(8))
    step: Any = run.step
    assert step._graphs, "nothing was captured"
    for number in (8, 10):
        metrics.sampled.request_values()
        (loss,) = run.train(range(number, number + 1))
        torch.cuda.synchronize()
        metrics.sampled.request_values()
        # reads the copy of the first loss, and that of the second if it has arrived
        (newer,) = run.train(range(number + 1, number + 2))
        last_sample = metrics.sampled.known
        assert last_sample["loss"] in (
            pytest.approx(loss, rel=1e-6),
            pytest.approx(newer, rel=1e-6),
        )
        assert 0 < last_sample["grad_norm"] < 100
    run.train(range(12, 14))
    assert metrics.sampled.known is last_sample, (
        "a replay copies nothing that is not due"
    )
    run.accelerator.end_training()
