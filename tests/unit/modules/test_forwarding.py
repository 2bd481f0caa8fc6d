"""Replaced forwards: reversible, copied with their module, one graph under torch.compile."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hasten.modules import forwarding
from hasten.modules.hooks import (
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
    remove_hook_from_module,
)


class AddingForward(forwarding.Forward):
    def __init__(self, tag: str, amount: float) -> None:
        self.tag = tag
        self.amount = amount

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) + self.amount


class ScalingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x * self.weight * times


def test_replacements_stack_and_come_off_in_any_order() -> None:
    model, x = ScalingModel(), torch.tensor(1.0)
    forwarding.replace(model, AddingForward("a", 1))
    forwarding.replace(model, AddingForward("b", 10))
    assert model(x).item() == 13
    assert list(inspect.signature(model.forward).parameters) == ["x", "times"]
    assert forwarding.restore(model, "a")
    assert model(x).item() == 12
    assert not forwarding.restore(model, "a")
    assert forwarding.find(model, "b") is not None
    assert forwarding.restore(model, "b")
    assert "forward" not in model.__dict__


def test_a_forward_the_user_had_put_on_the_instance_is_put_back() -> None:
    model = ScalingModel()
    user_forward = lambda x: x - 1  # noqa: E731  # exactly what users write
    model.forward = user_forward  # type: ignore[method-assign, assignment]
    forwarding.replace(model, AddingForward("a", 5))
    assert model(torch.tensor(1.0)).item() == 5
    assert forwarding.restore(model, "a")
    assert model.forward is user_forward


@pytest.mark.parametrize("copy_method", ["deepcopy", "pickle"])
def test_a_copy_calls_its_own_weights(copy_method: str) -> None:
    model = ScalingModel()
    forwarding.replace(model, AddingForward("a", 1))
    forwarding.replace(model, AddingForward("b", 1))
    twin = (
        copy.deepcopy(model)
        if copy_method == "deepcopy"
        else pickle.loads(pickle.dumps(model))
    )
    with torch.no_grad():
        twin.weight.zero_()
    assert twin(torch.tensor(1.0)).item() == 2
    assert model(torch.tensor(1.0)).item() == 4
    assert forwarding.restore(twin, "a")
    assert forwarding.restore(twin, "b")
    assert twin(torch.tensor(1.0)).item() == 0


class NotingHook(ModelHook):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.log.append(f"pre {self.name}")
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append(f"post {self.name}")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"detach {self.name}")
        return module


def test_hooks_come_and_go() -> None:
    model, log = ScalingModel(), list[str]()
    add_hook_to_module(model, NotingHook("a", log))
    add_hook_to_module(model, NotingHook("b", log), append=True)
    assert isinstance(hook_of(model), SequentialHook)
    assert model(torch.tensor(1.0)).item() == 6
    assert log == ["init a", "init b", "pre a", "pre b", "post a", "post b"]
    log.clear()
    add_hook_to_module(model, NotingHook("c", log))
    assert log == ["detach a", "detach b", "init c"]
    outer = nn.Sequential(model)
    remove_hook_from_module(outer, recurse=True)
    assert hook_of(model) is None
    assert "forward" not in model.__dict__


def test_layerwise_casting_stores_small_and_computes_large() -> None:
    layer = nn.Linear(4, 4)
    add_hook_to_module(layer, LayerwiseCastingHook(torch.bfloat16, torch.float32))
    assert layer.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert layer(torch.ones(1, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.bfloat16
    remove_hook_from_module(layer)
    assert layer.weight.dtype == torch.float32


def test_a_graph_that_is_recompiled_runs_anew_inside_its_forward() -> None:
    graph: Any = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    forwarding.replace(graph, forwarding.Forward())
    graph.graph.erase_node(
        next(
            node
            for node in graph.graph.nodes
            if node.op == "call_module" and bypass_node(node)
        )
    )
    graph.recompile()
    assert graph(torch.tensor(-1.0)) == -1
    assert forwarding.restore(graph, forwarding.Forward.tag)
    assert "forward" not in graph.__dict__


def bypass_node(node: Any) -> bool:
    """Lead the output past a node; the node has no users afterwards."""
    node.replace_all_uses_with(node.args[0])
    return True
