"""The chunked loss of a head equals torch's cross entropy of its logits, with its gradients, in less memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hasten.errors import ArgumentError, ConfigError, StepError
from hasten.extensions.chunked_loss.cross_entropy import ChunkedCrossEntropyLoss
from tests.support.live_bytes import LiveBytes

OPTIONS: list[dict[str, Any]] = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    for reduction, smoothing, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (-100, 0, 3)
    )
]


def drawn(
    shape: tuple[int, ...], width: int, classes: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, ...]:
    """Return hidden states, a weight, a bias, targets and token weights."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=g, dtype=dtype)
    weight = torch.randn(classes, width, generator=g, dtype=dtype)
    bias = torch.randn(classes, generator=g, dtype=dtype)
    return (
        hidden,
        weight,
        bias,
        torch.randint(0, classes, shape, generator=g),
        torch.rand(shape, generator=g, dtype=dtype),
    )


def torchs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Return torch's loss of the whole logits."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def compare(
    actual: Tensor,
    expected: Tensor,
    inputs: list[Tensor],
    grad: Tensor,
    tolerance: float,
) -> None:
    """Compare losses and gradients."""
    torch.testing.assert_close(
        actual.flatten(), expected.flatten(), rtol=tolerance, atol=tolerance
    )
    grads = [
        torch.autograd.grad(loss, inputs, grad.view(loss.shape))
        for loss in (actual, expected)
    ]
    for actual_grad, expected_grad in zip(*grads, strict=True):
        assert actual_grad.dtype == expected_grad.dtype
        torch.testing.assert_close(
            actual_grad, expected_grad, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)]
)
@pytest.mark.parametrize("chunk", [1, 3, 64, None])
def test_losses_and_gradients_equal_torchs_for_every_option(
    dtype: torch.dtype, tolerance: float, chunk: int | None
) -> None:
    """Tolerances: only the order of sums differs."""
    shapes = [(1,), (7,), (2, 5), (2, 3, 2)]
    for number, (options, shape) in enumerate(itertools.product(OPTIONS, shapes)):
        hidden, weight, bias, target, _ = drawn(shape, 6, 11, dtype, number)
        target[..., 0] = 5  # torch's mean of no token at all is nan
        inputs = [
            hidden.requires_grad_(),
            weight.requires_grad_(),
            bias.requires_grad_(),
        ]
        used = bias if number % 2 else None
        expected = torchs(hidden, weight, target, used, options)
        actual_loss = ChunkedCrossEntropyLoss(chunk_tokens=chunk, **options)(
            hidden, weight, target, used
        )
        grad = torch.rand(
            expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(number)
        )
        compare(
            actual_loss,
            expected,
            inputs if used is not None else inputs[:2],
            grad,
            tolerance,
        )
        assert actual_loss.shape == (
            target.shape if options["reduction"] == "none" else ()
        )


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_weights_multiply_the_losses_of_tokens(
    reduction: str, learned: bool
) -> None:
    hidden, weight, bias, target, weights = drawn((4, 5), 6, 11, torch.float64, 1)
    target[0, :3] = -100
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    if learned:
        inputs.append(weights.requires_grad_())
    each = (
        torchs(hidden, weight, target, bias, {"reduction": "none"}).view(target.shape)
        * weights
    )
    counted_weights = weights * (target != -100)
    expected = {
        "none": each,
        "sum": each.sum(),
        "mean": each.sum() / counted_weights.sum(),
    }[reduction]
    options: dict[str, Any] = {"reduction": reduction}
    loss = ChunkedCrossEntropyLoss(chunk_tokens=4, **options)
    compare(
        loss(hidden, weight, target, bias, weights),
        expected,
        inputs,
        torch.ones_like(expected),
        1e-12,
    )


def test_a_batch_of_ignored_tokens_has_torchs_mean_and_no_gradient_of_a_sum() -> None:
    hidden, weight, _, target, _ = drawn((4,), 6, 11, torch.float32, 1)
    target.fill_(-100)
    assert ChunkedCrossEntropyLoss()(hidden, weight, target).isnan()
    assert F.cross_entropy(hidden @ weight.t(), target).isnan()
    (grad,) = torch.autograd.grad(
        ChunkedCrossEntropyLoss(reduction="sum")(
            hidden, weight.requires_grad_(), target
        ),
        [weight],
    )
    assert not grad.any()


def test_frozen_weights_get_no_gradient_and_hidden_states_do() -> None:
    hidden, weight, bias, target, _ = drawn((9,), 6, 11, torch.float64, 1)
    hidden.requires_grad_()
    for reduction in ("mean", "none"):
        expected = torchs(hidden, weight, target, bias, {"reduction": reduction})
        actual_loss: Tensor = ChunkedCrossEntropyLoss(
            chunk_tokens=2, reduction=reduction
        )(hidden, weight, target, bias)
        compare(actual_loss, expected, [hidden], torch.ones_like(expected), 1e-12)


def test_without_gradients_nothing_is_recorded() -> None:
    hidden, weight, _, target, _ = drawn((9,), 6, 11, torch.float32, 1)
    with torch.no_grad():
        loss = ChunkedCrossEntropyLoss()(
            hidden.requires_grad_(), weight.requires_grad_(), target
        )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, torchs(hidden, weight, target, None, {}).detach())


def test_backward_twice_through_a_retained_graph_adds_the_same_gradient() -> None:
    hidden, weight, _, target, _ = drawn((9,), 6, 11, torch.float32, 1)
    loss = ChunkedCrossEntropyLoss(chunk_tokens=2)(
        hidden, weight.requires_grad_(), target
    )
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision_weights_keep_the_precision_of_the_whole_loss(
    dtype: torch.dtype,
) -> None:
    """The error against float64 is at most that of torch's own loss in the same precision, with a quarter as slack."""
    hidden, weight, _, target, _ = drawn((64,), 32, 50, torch.float32, 1)
    weight *= 0.2
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    exact = torchs(hidden.double(), weight.double(), target, None, {})
    exact_grads = torch.autograd.grad(exact, inputs)
    scale = 2.0**10  # as a loss scale multiplies it
    for amp in (True, False):
        leaves = (
            inputs if amp else [x.detach().to(dtype).requires_grad_() for x in inputs]
        )
        with torch.autocast("cpu", dtype, enabled=amp):
            torch_loss = torchs(leaves[0], leaves[1], target, None, {})
            chunked_loss = ChunkedCrossEntropyLoss(chunk_tokens=7)(
                leaves[0], leaves[1], target
            )
        assert chunked_loss.dtype == torch.float32
        assert (
            abs(chunked_loss - exact) <= 1.25 * abs(torch_loss.double() - exact) + 1e-3
        )
        chunked_grads = [
            g / scale for g in torch.autograd.grad(chunked_loss * scale, leaves)
        ]
        torchs_own = [
            g / scale for g in torch.autograd.grad(torch_loss * scale, leaves)
        ]
        for a, b, right in zip(chunked_grads, torchs_own, exact_grads, strict=True):
            assert a.dtype == b.dtype
            assert (a - right).norm() <= 1.25 * (b - right).norm()


def test_it_runs_inside_a_recomputed_region() -> None:
    hidden, weight, _, target, _ = drawn((12,), 6, 11, torch.float64, 1)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = ChunkedCrossEntropyLoss(chunk_tokens=5)
    actual_loss: Any = checkpoint(
        lambda h: loss(h * 2, weight, target), hidden, use_reentrant=False
    )
    compare(
        actual_loss,
        torchs(hidden * 2, weight, target, None, {}),
        inputs,
        torch.ones(()),
        1e-12,
    )


# torch's own, while it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_traces_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # else torch leaves its thread
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    hidden, weight, bias, target, _ = drawn((12,), 6, 11, torch.float32, 1)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    for reduction in ("mean", "none"):
        loss = ChunkedCrossEntropyLoss(
            chunk_tokens=5, reduction=reduction, label_smoothing=0.1
        )
        compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
        expected = torchs(
            hidden,
            weight,
            target,
            bias,
            {"reduction": reduction, "label_smoothing": 0.1},
        )
        compare(
            compiled(hidden, weight, target, bias),
            expected,
            inputs,
            torch.ones_like(expected),
            2e-5,
        )


@pytest.mark.parametrize("amp", [False, True])
def test_the_peak_of_memory_is_an_eighth_of_that_of_whole_logits(amp: bool) -> None:
    """16 384 tokens, a width of 2048 and a vocabulary of 131 072, with all gradients counted; fake tensors hold no bytes."""
    peaks = []
    with FakeTensorMode():
        hidden = torch.empty(16384, 2048, requires_grad=True)
        weight = torch.empty(131072, 2048, requires_grad=True)
        target = torch.zeros(16384, dtype=torch.long)
        for loss in (
            lambda: torchs(hidden, weight, target, None, {}),
            lambda: ChunkedCrossEntropyLoss()(hidden, weight, target),
        ):
            with LiveBytes() as live:
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    computed = loss()
                computed.backward()
                del computed
            peaks.append(live.peak)
            hidden.grad = weight.grad = None
    full_peak, chunked = peaks
    assert full_peak > 2 * 16384 * 131072 * 4
    assert chunked * 8 <= full_peak, (
        f"{chunked / 2**30:.2f} of {full_peak / 2**30:.2f} GiB"
    )


def test_wrong_arguments_are_named() -> None:
    hidden, weight, bias, target, weights = drawn((4, 3), 6, 11, torch.float32, 1)
    loss = ChunkedCrossEntropyLoss()
    with pytest.raises(
        ArgumentError, match=r"hidden states \[4, 3, 6\] do not fit a weight \[6, 11\]"
    ):
        loss(hidden, weight.t(), target)
    with pytest.raises(ArgumentError, match=r"targets \[4, 2\].*shift labels before"):
        loss(hidden, weight, target[:, 1:])
    with pytest.raises(ArgumentError, match="not class indices"):
        loss(hidden, weight, target.float())
    with pytest.raises(ArgumentError, match=r"a bias \[10\]"):
        loss(hidden, weight, target, bias[1:])
    with pytest.raises(ArgumentError, match=r"token weights \[4\]"):
        loss(hidden, weight, target, None, weights[:, 0])
    target[0, 0] = 11
    with pytest.raises(
        ArgumentError,
        match=r"not one of the head's 11 classes .*ignore_index, which is -100",
    ):
        loss(hidden, weight, target)
    with pytest.raises(ConfigError, match="reduction='middle'"):
        ChunkedCrossEntropyLoss(reduction="middle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="label_smoothing=2"):
        ChunkedCrossEntropyLoss(label_smoothing=2)
    with pytest.raises(ConfigError, match="chunk_tokens=0"):
        ChunkedCrossEntropyLoss(chunk_tokens=0)


def test_a_freed_weight_is_named_instead_of_read() -> None:
    hidden, weight, _, target, _ = drawn((4,), 6, 11, torch.float32, 1)
    weight.untyped_storage().resize_(0)
    with pytest.raises(StepError, match="Leave the head in the root's shard group"):
        ChunkedCrossEntropyLoss()(hidden, weight, target)


def test_it_is_a_module_without_parameters() -> None:
    loss = ChunkedCrossEntropyLoss()
    assert isinstance(loss, nn.Module)
    assert not list(loss.state_dict())
