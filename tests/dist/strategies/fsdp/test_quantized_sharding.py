"""QLoRA under FSDP2: quantized weights are really sharded, losses equal one process, adapters are saved, resumed and merged."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, dequantize_weights, quantize_weights
from hasten.errors import PrepareError
from hasten.modules.names import is_dtensor
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

WIDTH, DEPTH, STEPS = 256, 3, 3
pytestmark = (
    pytest.mark.exhaustive
    # importing peft, bitsandbytes and torchao takes long; docs/recipes.md runs in every suite
)
KINDS = ("nf4", "nf4-double", "torchao-nf4", "int4")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return output


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def quantized(kind: str, seed: int = 0) -> nn.Module:
    """A model whose blocks hold quantized weights."""
    torch.manual_seed(seed)
    model = Stack().requires_grad_(False)
    if kind == "torchao-nf4":
        torchao = pytest.importorskip("torchao.quantization")
        for layer in [
            module for module in model.blocks.modules() if isinstance(module, nn.Linear)
        ]:
            quantized_weight = torchao.NF4Tensor.from_tensor(
                layer.weight.detach(), 64, 256
            )
            layer.weight = nn.Parameter(quantized_weight, requires_grad=False)
        return model
    pytest.importorskip("torchao" if kind == "int4" else "bitsandbytes")
    if kind == "nf4-double":
        from hasten.extensions.quantization.quantize import (
            BnbSettings,
            chosen_linears,
            replace_linears,
        )

        return replace_linears(
            model,
            chosen_linears(model, ("head",)),
            BnbSettings(double_quantization=True),
        )
    quantize_weights(model, kind, skip_modules=("head",))  # type: ignore[arg-type]
    return model.requires_grad_(False)


# Any: a model of peft
def with_adapters(model: nn.Module, adapter: str | None = None) -> Any:
    peft = pytest.importorskip("peft")
    if adapter is not None:
        return peft.PeftModel.from_pretrained(model, adapter)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["up", "down"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        # about merging in place
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without")
        return peft.get_peft_model(model, config)


def batch(step: int, ctx: ProcessContext | None = None) -> Tensor:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows if ctx is None else rows.chunk(ctx.world.size)[ctx.world.rank]


def plain(kind: str) -> tuple[list[float], Any]:
    """Losses of plain torch on one process, and the trained model."""
    model = with_adapters(quantized(kind))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01
    )
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def prepared(
    ctx: ProcessContext, kind: str, seed: int = 0, **options: Any
) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy="fsdp", **options)
    model = with_adapters(quantized(kind, seed))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))
    return accelerator, model, optimizer


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    steps: range,
    ctx: ProcessContext,
) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step, ctx)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def close(actual: Any, expected: Any) -> None:
    # sums in another order
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-6
    )


@ranks(1, 2, timeout_s=400)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_sharded_and_losses_equal_one_process(
    ctx: ProcessContext, kind: str
) -> None:
    expected, plain_model = plain(kind)
    accelerator, model, optimizer = prepared(ctx, kind)
    frozen = {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(frozen) == 2 * DEPTH
    assert all(is_dtensor(p) for p in frozen.values())
    local_numel = sum(p.to_local().numel() for p in frozen.values())
    total = sum(p.numel() for p in frozen.values())
    bits = 8 * total / (DEPTH * 4 * WIDTH * WIDTH)
    assert bits < (9 if kind == "int4" else 4.3), (
        "torchao's int4 on a CPU holds one value in a byte"
    )
    assert local_numel == total // ctx.world.size
    close(train(accelerator, model, optimizer, range(STEPS), ctx), expected)
    trained = accelerator.get_state_dict(model)
    for name, value in plain_model.state_dict().items():
        if "lora" in name and ctx.is_main:
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)


@ranks(2, timeout_s=400)
def test_half_precision_leaves_the_bytes_alone(ctx: ProcessContext) -> None:
    accelerator, model, optimizer = prepared(ctx, "nf4-double", mixed_precision="bf16")
    expected, _ = plain("nf4-double")
    losses = train(accelerator, model, optimizer, range(STEPS), ctx)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected), rtol=0.05, atol=0.0
    )
    model.eval()
    with torch.no_grad():
        first_output, second_output = model(batch(7)), model(batch(7))
    assert torch.equal(first_output, second_output)


@ranks(2, timeout_s=400)
@pytest.mark.parametrize("kind", ["nf4-double", "torchao-nf4"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    ctx: ProcessContext, tmp_path: Path, kind: str
) -> None:
    where = ctx.world.broadcast_object(str(tmp_path))
    accelerator, model, optimizer = prepared(ctx, kind, project_dir=where)
    train(accelerator, model, optimizer, range(2), ctx)
    accelerator.save_state(f"{where}/state")
    uninterrupted_losses = train(accelerator, model, optimizer, range(2, 5), ctx)
    expected = {
        name: value.clone() for name, value in accelerator.get_state_dict(model).items()
    }
    # another base, which the checkpoint replaces
    accelerator, model, optimizer = prepared(ctx, kind, seed=5)
    accelerator.load_state(f"{where}/state")
    assert (
        train(accelerator, model, optimizer, range(2, 5), ctx) == uninterrupted_losses
    )
    resumed_state = accelerator.get_state_dict(model)
    assert resumed_state.keys() == expected.keys()
    assert all(
        torch.equal(resumed_state[name], expected[name]) for name in resumed_state
    )


@ranks(2, timeout_s=400)
@pytest.mark.parametrize("kind", ["nf4", "torchao-nf4"])
def test_adapters_are_saved_loaded_and_merged(
    ctx: ProcessContext, tmp_path: Path, kind: str
) -> None:
    where = ctx.world.broadcast_object(str(tmp_path))
    accelerator, model, optimizer = prepared(ctx, kind)
    train(accelerator, model, optimizer, range(STEPS), ctx)
    weights = accelerator.get_state_dict(model)
    with torch.no_grad():
        expected_output = model(batch(9))
    if ctx.is_main:
        inner: Any = accelerator.unwrap_model(model)  # Any: a model of peft
        inner.save_pretrained(f"{where}/adapter", state_dict=weights)
        assert {path.name for path in Path(where, "adapter").iterdir()} >= {
            "adapter_model.safetensors",
            "adapter_config.json",
        }
        loaded = with_adapters(quantized(kind), f"{where}/adapter")
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(batch(9)), expected_output, rtol=1e-5, atol=1e-6
            )
        merged = with_adapters(
            dequantize_weights(quantized(kind)), f"{where}/adapter"
        ).merge_and_unload()
        assert all(
            type(p.data) is Tensor and p.dtype == torch.float32
            for p in merged.parameters()
        )
        with torch.no_grad():
            torch.testing.assert_close(
                merged(batch(9)), expected_output, rtol=1e-4, atol=1e-5
            )
    accelerator.wait_for_everyone()


@ranks(2, timeout_s=400)
def test_trained_quantized_weights_are_refused(ctx: ProcessContext) -> None:
    model = quantized("torchao-nf4")
    model.get_parameter("blocks.0.up.weight").requires_grad_(True)
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    with pytest.raises(
        PrepareError,
        match=r"blocks\.0\.up\.weight is quantized and requires gradients.*freeze it",
    ):
        accelerator.prepare(model)
    library = pytest.importorskip("bitsandbytes.nn")
    with torch.device("meta"):
        bare = nn.Sequential(library.Linear4bit(64, 64, bias=False), nn.Linear(64, 1))
    bare[0].requires_grad_(False)
    with pytest.raises(
        PrepareError,
        match=r"0\.weight is a four-bit weight without values.*on every rank",
    ):
        accelerator.prepare(bare)


@ranks(1, timeout_s=400)
def test_memory_of_one_rank_of_eight(ctx: ProcessContext) -> None:
    """On a fake process group, a rank holds an eighth of half a byte per weight."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg.__name__, "importing it registers the backend"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    try:
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        model = accelerator.prepare(with_adapters(quantized("nf4")))
        frozen = [p for p in model.parameters() if p.dtype == torch.uint8]
        local_bytes, full_bytes = (
            sum(p.to_local().nbytes for p in frozen),
            sum(p.numel() for p in frozen),
        )
        assert full_bytes == DEPTH * 4 * WIDTH * WIDTH // 2
        assert local_bytes == full_bytes // 8
    finally:
        gc.collect()
        dist.destroy_process_group()
