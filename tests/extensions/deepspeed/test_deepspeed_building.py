"""Models built partitioned under ZeRO 3 train as models that are built whole, and never exist whole."""

from __future__ import annotations

import gc
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("deepspeed", "transformers.modeling_utils")

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)


def engine(stage: int = 3, **options: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 8}
    return {
        "strategy": "deepspeed",
        "deepspeed_plugin": {"hf_ds_config": {"zero_optimization": zero}, **options},
    }


class Block(nn.Module):
    """A linear layer with a norm, a tied matrix and a buffer."""

    def __init__(self, tied: Tensor) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.tied = tied
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (
            x
            + torch.tanh(self.linear(self.norm(x)) + self.shift.to(x.dtype)) @ self.tied
        )
        return out


class Net(nn.Module):
    """Its constructor initialises what its children have built, in the ways models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block(self.first.weight) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.ones(1) * 1.5)
        self.apply(self._shrink)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            self.head.weight.copy_(self.first.weight[:1] * 0.5)

    def _shrink(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight.data.mul_(0.9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale
        return out


def trained(
    accelerator: Accelerator, partitioned: bool, steps: int = 5
) -> tuple[list[float], dict[str, Tensor]]:
    if partitioned:
        with accelerator.init_module():
            model: Any = Net()
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    else:
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        x = torch.randn(
            4,
            6,
            generator=torch.Generator().manual_seed(
                10 * step + accelerator.process_index
            ),
        )
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(accelerator.get_state_dict(model))


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_built_partitioned_trains_as_one_built_whole(
    ctx: ProcessContext, precision: str
) -> None:
    linear = nn.functional.linear
    partitioned = trained(Accelerator(mixed_precision=precision, **engine()), True)
    assert nn.functional.linear is linear
    unpartitioned = trained(Accelerator(mixed_precision=precision, **engine()), False)
    assert partitioned[0] == unpartitioned[0]
    assert partitioned[1].keys() == unpartitioned[1].keys()
    for name, value in unpartitioned[1].items():
        assert torch.equal(partitioned[1][name], value), name


class Watching(nn.Module):
    """Notes after each layer how many weights this process holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.held: list[int] = []
        for _ in range(8):
            self.layers.append(nn.Linear(64, 64, bias=False))
            # else a parameter is gathered to be looked at
            with torch._C.DisableTorchFunction():
                parameters: list[Any] = list(self.parameters())
                self.held.append(
                    sum(p.numel() + p.ds_tensor.numel() for p in parameters)
                )


@ranks(2)
def test_a_process_never_holds_more_than_its_part(ctx: ProcessContext) -> None:
    """Half of what is built so far, on each of two processes; and a model without an optimizer is whole again."""
    accelerator = Accelerator(**engine())
    with accelerator.init_module():
        model = Watching()
    assert model.held == [64 * 64 // 2 * (number + 1) for number in range(8)]
    teacher = accelerator.prepare(model)
    assert [tuple(parameter.shape) for parameter in teacher.parameters()] == [
        (64, 64)
    ] * 8
    assert teacher.layers[0](torch.ones(1, 64)).shape == (1, 64)


class Lost(nn.Module):
    """Writes where nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.data.zero_()


@ranks(1)
def test_what_would_be_lost_is_refused(ctx: ProcessContext) -> None:
    accelerator = Accelerator(**engine())
    with (
        pytest.raises(PrepareError, match=r"instead of its \.data"),
        accelerator.init_module(),
    ):
        Lost()
    Lost()  # nothing is left behind
    with pytest.raises(ConfigError, match="needs ZeRO stage 3"):
        Accelerator(**engine(2, zero3_init_flag=True))
    for settings in (engine(2), {"strategy": "none"}):
        with Accelerator(**settings).init_module():
            assert Lost().linear.weight.shape == (4, 4)


@ranks(2)
@pytest.mark.timeout(240)
def test_transformers_builds_partitioned(ctx: ProcessContext, tmp_path: Any) -> None:
    """With zero3_init_flag after Accelerator(), else in init_module(); the weights are those of the files, and it trains the same."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 32,
    }
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    folder = tmp_path / "gpt2"
    torch.manual_seed(1)
    plain = transformers.GPT2LMHeadModel(config)
    if ctx.rank == 0:
        plain.save_pretrained(folder)
    ctx.world.barrier("the model is written")
    tokens = torch.arange(16).reshape(1, 16)

    def losses(accelerator: Accelerator, model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        step_losses = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step_losses.append(float(loss.detach()))
        return step_losses

    def partitioned(model: Any) -> Any:
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        return model

    read = transformers.GPT2LMHeadModel.from_pretrained
    accelerator = Accelerator(**engine())
    expected_losses = losses(accelerator, plain)
    with accelerator.init_module():
        model = read(folder)
    assert losses(accelerator, partitioned(model)) == expected_losses
    assert all(parameter.numel() for parameter in read(folder).parameters()), (
        "outside the block models are whole"
    )
    accelerator = Accelerator(**engine(zero3_init_flag=True))
    assert losses(accelerator, partitioned(read(folder))) == expected_losses
    del accelerator
    gc.collect()
    assert not need("transformers.integrations.deepspeed").is_deepspeed_zero3_enabled()
