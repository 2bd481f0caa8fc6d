"""Canonical names: the same however a model is wrapped, and tied names found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from hasten.modules.names import (
    canonical_name,
    named_buffers,
    named_parameters,
    tied_groups,
)
from hasten.testing.toys import TinyLM
from tests.support.toys import Classifier


class HasModule(nn.Module):
    """A user's model that has an attribute called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2))


def compiled_model(model: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(model)  # type: ignore[assignment]  # an OptimizedModule, which is a Module
    return wrapped


def block_checkpointed(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(child))
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        compiled_model,
        checkpoint_wrapper,
        block_checkpointed,
        lambda model: nn.DataParallel(compiled_model(model)),
        lambda model: compiled_model(nn.DataParallel(checkpoint_wrapper(model))),
    ],
)
@pytest.mark.parametrize("build", [HasModule, TinyLM, Classifier])
def test_names_do_not_depend_on_wrappers(
    build: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = build()
    expected = [name for name, _ in model.named_parameters()]
    wrapped = wrap(model)
    assert [name for name, _ in named_parameters(wrapped)] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.a.weight", "a.weight"),
        ("module._orig_mod.module.a", "a"),
        ("a._checkpoint_wrapped_module.b._fsdp_wrapped_module.w", "a.b.w"),
        ("a.module.w", "a.module.w"),
        ("module", "module"),
        ("_orig_mod.w", "w"),
    ],
)
def test_names_without_a_model(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_buffers() -> None:
    model = nn.DataParallel(Classifier(batch_norm=True))
    names = [name for name, _ in named_buffers(model)]
    assert names == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_tied_groups() -> None:
    assert tied_groups(TinyLM()) == ()
    assert tied_groups(TinyLM(tied=True)) == (("embed.weight", "head.weight"),)
    assert tied_groups(compiled_model(nn.DataParallel(TinyLM(tied=True)))) == (
        ("embed.weight", "head.weight"),
    )
    shared = nn.Linear(2, 2)
    shared_layers = nn.Sequential(shared, nn.ReLU(), shared, shared)
    assert tied_groups(shared_layers) == (
        ("0.weight", "2.weight", "3.weight"),
        ("0.bias", "2.bias", "3.bias"),
    )
    assert len(list(named_parameters(shared_layers))) == 2
    assert len(list(named_parameters(shared_layers, tied=True))) == 6
