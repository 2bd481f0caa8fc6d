"""QLoRA on a real accelerator in a world of one: losses of bare torch, bytes of four-bit weights, exact resume, merge."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, dequantize_weights, quantize_weights

# Any in this file: models of peft and transformers.
# warnings of the imports of torchao and peft
pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
WIDTH, DEPTH, VOCABULARY = 512, 3, 256
KINDS = ("nf4", "torchao-nf4")


def device() -> torch.device:
    current_device = torch.accelerator.current_accelerator()
    return torch.device("cpu") if current_device is None else current_device


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The packages' libraries and the driver's handles stay for the life of the process; they are no test's leak."""
    if torch.accelerator.is_available():
        for kind in KINDS:
            accelerator, model, optimizer = prepared(kind)
            losses(model, optimizer, accelerator.backward, range(1))


def quantized_llama(kind: str) -> Any:
    """A Llama in bf16 whose blocks have weights of four bits."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    with torch.device(device()):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
        )
    model = model.to(torch.bfloat16).requires_grad_(False)
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
        return quantize_weights(model, "nf4")
    torchao = pytest.importorskip("torchao.quantization")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight = nn.Parameter(
                torchao.NF4Tensor.from_tensor(layer.weight.detach(), 64, 256), False
            )
    return model


def llama_with_adapters(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(quantized_llama(kind), config)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step % 2)
    return torch.randint(0, VOCABULARY, (2, 64), generator=generator).to(device())


def prepared(kind: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(strategy="fsdp", cpu=device().type == "cpu")
    model = llama_with_adapters(kind)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(trained_parameters(model), lr=0.01)
    )
    return accelerator, model, optimizer


def losses(model: Any, optimizer: Any, backward: Any, steps: range) -> list[float]:
    step_losses = []
    for step in steps:
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(loss.item())
    return step_losses


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_bare_torch(kind: str) -> None:
    model = llama_with_adapters(kind)
    expected = losses(
        model,
        torch.optim.AdamW(trained_parameters(model), lr=0.01),
        torch.autograd.backward,
        range(6),
    )
    assert expected[4] < expected[0] - 0.02
    accelerator, model, optimizer = prepared(kind)
    prepared_losses = losses(model, optimizer, accelerator.backward, range(6))
    # bf16 products
    torch.testing.assert_close(
        torch.tensor(prepared_losses), torch.tensor(expected), rtol=2e-3, atol=0.0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_weights_take_four_bits_on_the_device(kind: str) -> None:
    def allocated_bytes() -> int:
        gc.collect()
        return torch.accelerator.memory_allocated() if device().type != "cpu" else 0

    initial_bytes = allocated_bytes()
    _, model, optimizer = prepared(kind)
    model_bytes = allocated_bytes() - initial_bytes
    frozen = [p.to_local() for p in model.parameters() if p.dtype == torch.uint8]
    weights = DEPTH * (4 + 3 * 4) * WIDTH**2
    assert len(frozen) == 7 * DEPTH
    assert weights // 2 <= sum(p.nbytes for p in frozen) <= 1.1 * weights // 2
    unquantized_bytes = sum(
        p.to_local().nbytes for p in model.parameters() if p.dtype != torch.uint8
    )
    if device().type != "cpu":
        assert {p.device.type for p in frozen} == {device().type}
        assert model_bytes <= 0.6 * weights + unquantized_bytes + 2**20, (
            "the whole weights were not freed"
        )
    assert optimizer is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(kind)
    losses(model, optimizer, accelerator.backward, range(2))
    accelerator.save_state(tmp_path / "state")
    uninterrupted = losses(model, optimizer, accelerator.backward, range(2, 5))
    accelerator, model, optimizer = prepared(kind)
    accelerator.load_state(tmp_path / "state")
    assert losses(model, optimizer, accelerator.backward, range(2, 5)) == uninterrupted


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_give_the_trained_outputs(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    accelerator, model, optimizer = prepared(kind)
    losses(model, optimizer, accelerator.backward, range(3))
    with torch.no_grad():
        trained_logits = model(input_ids=batch(9)).logits.float()
    inner: Any = accelerator.unwrap_model(model)
    inner.save_pretrained(
        tmp_path / "adapter", state_dict=accelerator.get_state_dict(model)
    )
    # in fp32: merging in bf16 would round once more
    plain = dequantize_weights(quantized_llama(kind)).float()
    merged = peft.PeftModel.from_pretrained(
        plain, tmp_path / "adapter"
    ).merge_and_unload()
    assert all(type(p.data) is Tensor for p in merged.parameters())
    with torch.no_grad():
        merged_logits = merged(input_ids=batch(9)).logits
    spread = float(trained_logits.std())
    # bf16 activations
    torch.testing.assert_close(
        merged_logits, trained_logits, rtol=0.0, atol=0.1 * spread
    )
    torch.testing.assert_close(
        merged_logits.mean(), trained_logits.mean(), rtol=0.0, atol=0.01 * spread
    )
