"""Tensor parallelism on models people have: transformers' Llama, BERT and T5, dropout, loaders, export, refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig, TorchTensorParallelConfig
from hasten.errors import ConfigError, PrepareError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.hub_models import BERT_PLAN, T5_PLAN
from tests.support.toys import Numbers

PRELOAD: Final = ("transformers.modeling_utils",)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    build: Any = LlamaForCausalLM
    net: nn.Module = build(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=16,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )
    return net


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 4,
    }
    build: Any = Qwen3ForCausalLM
    config: Any = Qwen3Config
    net: nn.Module = build(
        config(
            **sizes, num_key_value_heads=2, vocab_size=16, max_position_embeddings=16
        )
    )
    return net


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    build: Any = BertForMaskedLM
    net: nn.Module = build(
        BertConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return net


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config
    build: Any = T5ForConditionalGeneration
    sizes = {
        "d_model": 8,
        "d_kv": 2,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 16,
    }
    net: nn.Module = build(config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    return net


LLAMA_PLAN = {
    "*.embed_tokens": "embedding_rowwise",
    "*.[qkv]_proj": "colwise",
    "*.o_proj": "rowwise",
    "*.gate_proj": "colwise",
    "*.up_proj": "colwise",
    "*.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {}),
    "bert": (bert, {"tp_plan": BERT_PLAN}),
    "t5": (t5, {"tp_plan": T5_PLAN, "tp_divide": ("n_heads", "inner_dim")}),
}


def losses(
    net: nn.Module, accelerator: Accelerator | None = None, steps: int = 6
) -> list[float]:
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    g = torch.Generator().manual_seed(3)
    step_losses = []
    for _ in range(steps):
        batch = torch.randint(1, 16, (4, 6), generator=g)
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(float(loss.detach()))
    return step_losses


@ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_unchanged(ctx: ProcessContext, name: str) -> None:
    build, options = MODELS[name]
    # of BERT's masked LM
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=2, **options)
    )
    expected = losses(seeded(build))
    assert losses(seeded(build), accelerator) == pytest.approx(expected, abs=1e-5)


@ranks(2)
def test_llama_trains_unchanged_with_divided_logits(
    ctx: ProcessContext,
) -> None:
    handler = TorchTensorParallelConfig(loss_parallel=True)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(
            tp_size=2, tp_handler=handler, tp_plan=LLAMA_PLAN
        )
    )
    assert losses(seeded(llama), accelerator) == pytest.approx(
        losses(seeded(llama)), abs=1e-5
    )


@ranks(2)
@pytest.mark.timeout(300)  # the first of these tests imports transformers
def test_norms_of_heads_have_the_gradient_of_all_heads(ctx: ProcessContext) -> None:
    """Each rank normalises its own queries and keys: without a sum the ranks' norms would drift apart."""
    batch = torch.arange(24).view(4, 6) % 15
    plain = seeded(qwen)
    plain(input_ids=batch, labels=batch).loss.backward()
    expected = {
        name: p.grad
        for name, p in plain.named_parameters()
        if "q_norm" in name or "k_norm" in name
    }
    plans: list[dict[str, Any]] = [{}, {"tp_plan": LLAMA_PLAN}]
    for plan in plans:
        accelerator = Accelerator(
            parallelism_config=ParallelismConfig(tp_size=2, **plan)
        )
        net = accelerator.prepare(seeded(qwen))
        accelerator.backward(net(input_ids=batch, labels=batch).loss)
        for name, gradient in expected.items():
            local_grad = net.get_parameter(name).grad
            actual_grad = (
                local_grad.full_tensor()
                if isinstance(local_grad, DTensor)
                else local_grad
            )
            assert gradient is not None
            assert gradient.abs().max() > 0
            torch.testing.assert_close(actual_grad, gradient, rtol=1e-3, atol=1e-8)


@ranks(2)
def test_ranks_of_one_group_read_the_same_samples_and_count_them_once(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    loader = accelerator.prepare(DataLoader(Numbers(11), batch_size=4))
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert gathered.tolist() == list(range(11))


class Dropped(nn.Module):
    """Records which elements were dropped, of what every rank holds and of what each holds a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.inside: list[Tensor] = []
        self.outside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x), 0.5, self.training)
        self.inside.append(h.detach() != 0)
        x = F.dropout(self.down(h), 0.5, self.training)
        self.outside.append(x.detach() != 0)
        return x


@ranks(2)
def test_dropout_is_equal_where_ranks_hold_the_same_and_different_where_they_do_not(
    ctx: ProcessContext,
) -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=2, tp_plan=plan)
    )
    net = Dropped()
    net.dropout = 0.5  # type: ignore[assignment]  # what an attention module keeps for its kernel
    net = accelerator.prepare(net)
    torch.manual_seed(0)
    for _ in range(3):
        net(torch.ones(64, 4))
    inside, outside = (
        accelerator.ctx.world.all_gather_object(torch.stack(masks).to(torch.uint8))
        for masks in (net.inside, net.outside)
    )
    assert torch.equal(outside[0], outside[1])
    assert not torch.equal(inside[0], inside[1])
    assert not torch.equal(inside[0][0], inside[0][1]), "every step draws anew"


@ranks(2)
def test_weights_are_exported_whole_and_state_of_an_optimizer_moves_along(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    net: nn.Module = seeded(
        lambda: TinyLM(vocab=16, width=8, heads=2, depth=2, context=6)
    )
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    batch = torch.arange(12).reshape(2, 6)
    next_token_loss(net(batch), batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()
    moments = {
        name: optimizer.state[p]["exp_avg"].clone()
        for name, p in net.named_parameters()
    }
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    net, optimizer = accelerator.prepare(net, optimizer)
    full_state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        assert all(
            torch.equal(full_state[name], value) for name, value in expected.items()
        )
    for name, parameter in accelerator.unwrap_model(net).named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(
            moment.full_tensor() if isinstance(moment, DTensor) else moment,
            moments[name],
        ), name


@ranks(2)
def test_what_cannot_be_split_is_refused_before_anything_changes(
    ctx: ProcessContext,
) -> None:
    def prepare(net: nn.Module, **options: Any) -> nn.Module:
        split_net: nn.Module = Accelerator(
            parallelism_config=ParallelismConfig(tp_size=2, **options)
        ).prepare(net)
        return split_net

    def net() -> TinyLM:
        return TinyLM(vocab=9, width=9, heads=3, depth=2, context=6, tied=True)

    with pytest.raises(
        ConfigError,
        match=r"does not divide the 9 output features of 'blocks.0.q'.*one of \[1, 3, 9\]",
    ):
        prepare(net())
    with pytest.raises(ConfigError, match=r"does not divide the 3 heads"):
        prepare(TinyLM(vocab=9, width=12, heads=3, depth=2, context=6))
    with pytest.raises(ConfigError, match=r"matches no module"):
        prepare(net(), tp_plan={"layers.*": "colwise"})
    with pytest.raises(ConfigError, match=r"which is unknown; use one of colwise"):
        prepare(net(), tp_plan={"head": "columns"})
    with pytest.raises(ConfigError, match=r"one tied tensor"):
        prepare(TinyLM(vocab=8, tied=True), tp_plan={"head": "colwise_gather_output"})
    with pytest.raises(ConfigError, match=r"is a LayerNorm, which cannot be split"):
        prepare(net(), tp_plan={"norm": "colwise"})
    with pytest.raises(ConfigError, match=r"tp_divide names 'n_heads'"):
        prepare(TinyLM(), tp_divide=("n_heads",))
    with pytest.raises(
        ConfigError, match=r"tp_handler.enable_async_tp=.*cannot be honoured"
    ):
        prepare(net(), tp_handler=TorchTensorParallelConfig(enable_async_tp=True))
    stack = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        PrepareError,
        match=r"Sequential has no tensor-parallel plan .*tp_plan=\{",
    ):
        prepare(stack)
    assert prepare(stack, tp_plan={"*": "colwise_gather_output"})(
        torch.ones(1, 4)
    ).shape == (1, 4)


@ranks(2)
def test_layers_of_torch_are_split_by_a_plan_of_hasten(ctx: ProcessContext) -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def run(accelerator: Accelerator | None) -> tuple[list[float], Tensor]:
        model: Any = seeded(build)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
            assert isinstance(model.layers[1].linear2.weight, DTensor)
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
        losses = []
        for _ in range(3):
            loss = model(inputs).pow(3).mean()
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            return losses, model(inputs)

    losses, outputs = run(Accelerator(parallelism_config=ParallelismConfig(tp_size=2)))
    expected_losses, expected_outputs = run(None)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-5)
