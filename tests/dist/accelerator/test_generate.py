"""`accelerator.generate`: the tokens of one process, under every strategy, in input order."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig
from hasten.errors import ArgumentError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("transformers.modeling_utils",)

END, PAD = 3, 0


def make(seed: int = 0) -> Any:  # Any: a model of transformers
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def prompts(count: int) -> list[dict[str, torch.Tensor]]:
    """Prompts of two to five tokens, padded on the left."""
    rows = []
    for i in range(count):
        tokens = torch.randint(
            4, 32, (2 + i % 4,), generator=torch.Generator().manual_seed(i)
        )
        room = 5 - len(tokens)
        rows.append(
            {
                "input_ids": torch.cat([torch.full((room,), PAD), tokens]),
                "attention_mask": torch.cat(
                    [torch.zeros(room), torch.ones(len(tokens))]
                ).long(),
                "labels": tokens[:1],
            }
        )
    return rows


def expected(count: int) -> list[list[int]]:
    model = make().eval()
    expected_tokens = []
    for row in prompts(count):
        generated = model.generate(
            input_ids=row["input_ids"][None],
            attention_mask=row["attention_mask"][None],
            max_new_tokens=6,
            do_sample=False,
        )
        expected_tokens.append(without_end(generated[0].tolist()))
    return expected_tokens


def without_end(row: list[int]) -> list[int]:
    """The tokens of a row up to its end, without the padding behind it."""
    new = row[5:]
    return row[:5] + (new[: new.index(END) + 1] if END in new else new)


SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"parallelism_config": ParallelismConfig(tp_size=2)},
}


@ranks(1, 2, timeout_s=110)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_one_process(ctx: ProcessContext, name: str) -> None:
    accelerator = Accelerator(
        cpu=True, **(SETTINGS[name] if ctx.world.size > 1 else {})
    )
    model = make()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    count = 7  # the last step is incomplete
    loader = accelerator.prepare(DataLoader(prompts(count), batch_size=2))  # type: ignore[arg-type]
    generated_tokens: list[list[int]] = []
    model.train()
    for batch in loader:
        rows = accelerator.generate(model, batch, max_new_tokens=6, do_sample=False)
        generated_tokens += [without_end(row) for row in rows.tolist()]
    assert generated_tokens == expected(count)
    assert model.training


@ranks(2, timeout_s=110)
def test_ranks_may_finish_at_different_lengths(ctx: ProcessContext) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = make()
    model = accelerator.prepare(model)
    row = prompts(2)[ctx.rank]
    batch = {key: value[None] for key, value in row.items()}
    limit = 2 if ctx.rank == 0 else 6
    rank_tokens = accelerator.generate(
        model, batch, gather=False, max_new_tokens=limit, do_sample=False
    )
    everyone = accelerator.generate(
        model, batch["input_ids"], max_new_tokens=limit, do_sample=False
    )
    assert rank_tokens.shape[0] == 1
    assert everyone.shape[0] == 2


@ranks(1)
def test_wrong_use_is_refused(ctx: ProcessContext) -> None:
    accelerator = Accelerator(cpu=True)
    linear = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"Linear, which has no generate\(\)"):
        accelerator.generate(linear, torch.ones(1, 2))
    model = accelerator.prepare(make())
    with pytest.raises(ArgumentError, match=r"fields \['text'\] and no 'input_ids'"):
        accelerator.generate(model, {"text": "x", "labels": 1})
