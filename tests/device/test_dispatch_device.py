"""Models that an accelerator and the host share: shared weights, gradients, copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hasten.extensions.bigmodel import cpu_offload, dispatch_model
from hasten.extensions.bigmodel.placed import end_dispatch

pytestmark = pytest.mark.device

IDS = torch.arange(12).view(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            for _ in range(4)
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return torch.as_tensor(self.head(x))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The driver's handles stay for the life of the process; they are no test's leak."""
    if torch.cuda.is_available():
        build().cuda()(IDS.cuda()).sum().backward()


@pytest.mark.parametrize("on_device", ["embed", "head"])
@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_a_weight_shared_with_an_offloaded_part_stays_on_the_device(
    on_device: str, away: str, tmp_path: Path
) -> None:
    reference, model = build().cuda(), build()
    device_map: dict[str, int | str | torch.device] = {
        "embed": away,
        "blocks": away,
        "head": away,
        on_device: 0,
    }
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device.type == "cuda"
    for _ in range(2):
        out = model(IDS)
        assert out.device.type == "cpu"
        assert torch.equal(out, reference(IDS.cuda()).cpu())
    end_dispatch(model)


def test_a_map_to_one_device_takes_inputs_from_the_host() -> None:
    reference, model = build().cuda(), dispatch_model(build(), {"": 0})
    out = model(IDS)
    assert out.device.type == "cpu"
    assert torch.equal(out, reference(IDS.cuda()).cpu())


def test_gradients_pass_through_a_streamed_model_and_those_of_weights_are_dropped() -> (
    None
):
    reference, model = build().cuda(), cpu_offload(build(), "cuda")
    inputs = [torch.ones(2, 16, device="cuda", requires_grad=True) for _ in range(2)]
    for network, x in zip((reference, model), inputs, strict=True):
        out = network(IDS.cuda())
        assert out.requires_grad
        (out.square().mean() + network.blocks[2](x).sum()).backward()  # type: ignore[index,operator]
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=0)
    initial_bytes = torch.cuda.memory_allocated()
    for _ in range(3):
        model(IDS.cuda()).square().mean().backward()
    assert torch.cuda.memory_allocated() <= initial_bytes
    assert all(parameter.grad is None for parameter in model.parameters())
    end_dispatch(model)
