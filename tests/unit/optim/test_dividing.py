"""Gradients of a loss divided by a number of parts: equal to plain torch's to the last bit, whatever is asked of backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hasten.optim.window import backpropagate


def model_and_loss(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[nn.Module, Tensor]:
    """A model and its loss; the same every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return model, model(torch.randn(4, 5, dtype=dtype)).square().mean().reshape(shape)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_gradients_are_those_of_the_divided_loss(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    for divisor in (1, 2, 3, 4, 5, 6, 7, 10, 11, 13, 48, 49, 100, 127, 1000):
        plain, loss = model_and_loss(dtype, shape)
        torch.autograd.backward(loss / divisor)
        model, loss = model_and_loss(dtype, shape)
        backpropagate(loss, divisor)
        assert len(gradients_of(model)) == 4
        for gradient, plain_gradient in zip(
            gradients_of(model), gradients_of(plain), strict=True
        ):
            assert torch.equal(gradient, plain_gradient), divisor


def test_keywords_of_backward_act_as_on_the_divided_loss() -> None:
    plain, loss = model_and_loss(torch.float32, (1,))
    torch.autograd.backward(loss / 3, torch.tensor([2.0]), retain_graph=True)
    torch.autograd.backward(loss / 3, inputs=[next(plain.parameters())])
    model, loss = model_and_loss(torch.float32, (1,))
    backpropagate(loss, 3, gradient=torch.tensor([2.0]), retain_graph=True)
    backpropagate(loss, 3, inputs=[next(model.parameters())])
    for gradient, plain_gradient in zip(
        gradients_of(model), gradients_of(plain), strict=True
    ):
        assert torch.equal(gradient, plain_gradient)


def test_several_losses_in_one_tensor_need_a_gradient_as_in_torch() -> None:
    _, loss = model_and_loss(torch.float32, ())
    with pytest.raises(RuntimeError, match="scalar outputs"):
        backpropagate(loss.expand(2), 4)


def test_hooks_see_the_divided_gradient_and_may_write_to_it() -> None:
    for _ in range(2):  # what a hook writes does not reach the next loss
        weight = nn.Parameter(torch.ones(1))
        loss = (weight * 3).reshape(())
        hook_gradients: list[float] = []

        def doubled(grad: Tensor, hook_gradients: list[float] = hook_gradients) -> None:
            hook_gradients.append(grad.item())
            grad.mul_(2)

        loss.register_hook(doubled)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        backpropagate(loss, 4)
        assert hook_gradients == [0.25]
        assert weight.grad is not None
        assert weight.grad.item() == 1.5


def test_gradients_of_a_loss_that_is_the_parameter_itself_are_its_own() -> None:
    weight = nn.Parameter(torch.ones(1))
    for _ in range(3):
        backpropagate(weight.reshape(()), 4)
    assert weight.grad is not None
    assert weight.grad.item() == 0.75
