"""Packed sequences: each sample once on every world size, the loss of the unpacked samples, and exact resumes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, TorchContextParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import ConfigError, DataError, StepError
from hasten.extensions.packing.packing import (
    IGNORED,
    PackedBatchSampler,
    PackedCollator,
    num_label_tokens,
    packed_attention_mask,
    packed_block_mask,
    sample_numbers,
)
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks

VOCABULARY = 32


def samples(count: int, longest: int = 20, seed: int = 0) -> list[dict[str, list[int]]]:
    """Samples whose first token is their number, modulo the vocabulary; tokens are never 0."""
    draw = random.Random(seed)
    return [
        {
            "input_ids": [
                1 + i % (VOCABULARY - 1),
                *(
                    draw.randrange(1, VOCABULARY)
                    for _ in range(draw.randrange(longest))
                ),
            ]
        }
        for i in range(count)
    ]


def loader_of(
    data: list[dict[str, list[int]]], max_tokens: int = 32, **options: Any
) -> DataLoader[Any]:
    sampler = PackedBatchSampler(
        [len(sample["input_ids"]) for sample in data], max_tokens, **options
    )
    return DataLoader(data, batch_sampler=sampler, collate_fn=PackedCollator())  # type: ignore[arg-type]


def rows_of(batch: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The samples of a pack, cut apart where positions restart."""
    starts = [
        *(batch["position_ids"][0] == 0).nonzero().flatten().tolist(),
        batch["input_ids"].shape[1],
    ]
    return [
        tuple(batch["input_ids"][0, a:b].tolist())
        for a, b in itertools.pairwise(starts)
    ]


class Attention(nn.Module):
    """One causal attention layer with learned positions, which sees across samples unless it is masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.place = nn.Embedding(64, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (projection[:, None] for projection in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        logits: Tensor = self.head(x + out[:, 0])
        return logits


def shifted_loss(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(
        logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction=reduction
    )


def test_packs_are_full_and_hold_each_sample_once() -> None:
    for count, max_tokens, seed in (
        (0, 8, 0),
        (1, 20, 0),
        (57, 20, 1),
        (200, 64, 2),
        (1000, 128, 3),
    ):
        data = samples(count, 20)
        lengths = [len(sample["input_ids"]) for sample in data]
        sampler = PackedBatchSampler(lengths, max_tokens, seed=seed)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            packs = list(sampler)
            assert sorted(index for pack in packs for index in pack) == list(
                range(count)
            )
            assert all(
                sum(lengths[index] for index in pack) <= max_tokens for pack in packs
            )
            assert len(packs) == len(sampler)
        if count >= 200:
            # hardly a token is wasted
            assert sum(lengths) / (len(sampler) * max_tokens) > 0.95
    first, second = PackedBatchSampler([3] * 40, 6), PackedBatchSampler([3] * 40, 6)
    second.set_epoch(1)
    assert list(first) == list(first) != list(second)


def test_the_loss_of_a_pack_is_that_of_its_samples() -> None:
    data, net = samples(40), Attention()
    total, count = torch.zeros(()), 0
    for sample in data:
        tokens = torch.tensor([sample["input_ids"]])
        logits = net(tokens, torch.arange(tokens.shape[1])[None], None)
        total = total + shifted_loss(logits, tokens, "sum")
        count += tokens.shape[1] - 1
    torch.autograd.backward(total / count)
    expected_grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    for pad_to in (None, 48):
        collate = PackedCollator(pad_to=pad_to)
        sampler = PackedBatchSampler([len(sample["input_ids"]) for sample in data], 48)
        packed, num_tokens = torch.zeros(()), 0
        for pack in sampler:
            batch = collate([data[index] for index in pack])
            mask = packed_attention_mask(batch["position_ids"])
            logits = net(batch["input_ids"], batch["position_ids"], mask)
            packed = (
                packed
                + shifted_loss(logits, batch["labels"], "mean") * batch["num_tokens"]
            )
            num_tokens += int(batch["num_tokens"])
        assert num_tokens == count
        torch.testing.assert_close(packed, total)
        torch.autograd.backward(packed / num_tokens)
        for parameter, gradient in zip(net.parameters(), expected_grads, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        net.zero_grad()


def test_masks_agree() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
    assert sample_numbers(positions).tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
    for causal in (True, False):
        mask = packed_attention_mask(positions, causal)[0, 0]
        block = packed_block_mask(positions, causal)
        row = torch.tensor(0)
        for query in range(8):
            for key in range(8):
                allowed = block.mask_mod(
                    row, row, torch.tensor(query), torch.tensor(key)
                )
                assert bool(allowed) == bool(mask[query, key])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_with_block_masks_equals_masked_attention(causal: bool) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    positions = torch.cat([torch.arange(n) for n in (40, 3, 61, 1, 23)])[None]
    q, k, v = (
        torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    )
    masked_output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=packed_attention_mask(positions, causal)
    )
    with torch.no_grad():
        flex_output = flex.flex_attention(
            q, k, v, block_mask=packed_block_mask(positions, causal)
        )
    torch.testing.assert_close(flex_output, masked_output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_llama_of_transformers_keeps_packed_samples_apart(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation=kind,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    data = samples(6)
    total, count = torch.zeros(()), 0
    for sample in data:
        tokens = torch.tensor([sample["input_ids"]])
        if tokens.shape[1] > 1:
            total = total + model(input_ids=tokens, labels=tokens).loss * (
                tokens.shape[1] - 1
            )
            count += tokens.shape[1] - 1
    batch = PackedCollator(transformers=True)(data)
    tokens_in_pack = int(num_label_tokens(batch["labels"]))
    assert tokens_in_pack == count
    torch.testing.assert_close(
        model(**batch).loss * tokens_in_pack, total, rtol=1e-4, atol=1e-4
    )


@ranks(1, 2, exhaustive=(3, 4))
@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_read_once(ctx: ProcessContext, workers: int) -> None:
    data = samples(61)
    accelerator = Accelerator(cpu=True)
    user = loader_of(data)
    loader = accelerator.prepare(
        DataLoader(
            data,  # type: ignore[arg-type]
            batch_sampler=user.batch_sampler,
            collate_fn=PackedCollator(),
            num_workers=workers,
        )
    )
    for _ in range(2):
        rank_rows = [row for batch in loader for row in rows_of(batch)]
        everyone = [
            row for rows in ctx.world.all_gather_object(rank_rows) for row in rows
        ]
        expected_rows = [tuple(sample["input_ids"]) for sample in data]
        repeated = len(everyone) - len(expected_rows)
        assert set(everyone) == set(expected_rows)
        assert repeated >= 0
        # otherwise the last step repeats packs, as every prepared loader does
        if len(user) % ctx.world.size == 0:
            assert sorted(everyone) == sorted(expected_rows)


@ranks(2)
def test_a_weighted_loop_equals_one_process_on_unpacked_samples(
    ctx: ProcessContext,
) -> None:
    """Four packs on two ranks, two updates: the gradient is the mean over all tokens of an update."""
    data = [{"input_ids": [1 + i, *range(2, 2 + 7 + i % 3)]} for i in range(16)]
    plain = Attention()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    sampler = PackedBatchSampler([len(s["input_ids"]) for s in data], 40)
    packs = list(sampler)
    assert len(packs) == 4
    for update in range(2):
        update_samples = [
            data[index] for pack in packs[2 * update : 2 * update + 2] for index in pack
        ]
        losses = torch.zeros(())
        for sample in update_samples:
            tokens = torch.tensor([sample["input_ids"]])
            losses = losses + shifted_loss(
                plain(tokens, torch.arange(tokens.shape[1])[None], None), tokens, "sum"
            )
        torch.autograd.backward(
            losses / sum(len(s["input_ids"]) - 1 for s in update_samples)
        )
        reference.step()
        reference.zero_grad()
    accelerator = Accelerator(cpu=True)
    net = Attention()
    loader: Any
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.5),
        DataLoader(data, batch_sampler=sampler, collate_fn=PackedCollator()),  # type: ignore[arg-type]
    )
    for batch in loader:
        mask = packed_attention_mask(batch["position_ids"])
        loss = shifted_loss(
            net(batch["input_ids"], batch["position_ids"], mask),
            batch["labels"],
            "mean",
        )
        accelerator.backward(loss, weight=batch["num_tokens"])
        optimizer.step()
        optimizer.zero_grad()
    for parameter, reference_parameter in zip(
        accelerator.unwrap_model(net).parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.detach(), reference_parameter.detach(), rtol=1e-5, atol=1e-6
        )


@ranks(2)
def test_a_resumed_loader_continues_with_the_next_pack(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    data = samples(80)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(data))
    read_packs: list[Any] = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            read_packs.append(rows_of(batch))
            if (epoch, number) == (1, 3):
                accelerator.save_state(f"{where}/middle")
                saved_index = len(read_packs)
    second_accelerator = Accelerator(cpu=True)
    resumed = second_accelerator.prepare(loader_of(data))
    second_accelerator.load_state(f"{where}/middle")
    assert [rows_of(batch) for batch in resumed] == read_packs[saved_index:]


def test_balanced_packs_cost_ranks_the_same() -> None:
    """The slowest rank of a step has hardly more attention to compute than the mean; every sample comes once."""
    data = samples(1000, 60)
    lengths = [len(sample["input_ids"]) for sample in data]

    def waiting(sampler: PackedBatchSampler, num_ranks: int) -> float:
        costs = [sum(lengths[index] ** 2 for index in pack) for pack in sampler]
        steps = [
            costs[i : i + num_ranks]
            for i in range(0, len(costs) - num_ranks + 1, num_ranks)
        ]
        return sum(map(max, steps)) / (sum(map(sum, steps)) / num_ranks)

    for num_ranks in (2, 4, 8):
        plain, balanced = (
            PackedBatchSampler(lengths, 128),
            PackedBatchSampler(lengths, 128, balance=num_ranks),
        )
        orders = []
        for epoch in range(2):
            balanced.set_epoch(epoch)
            orders.append(list(balanced))
            assert len(orders[-1]) == len(balanced) == len(plain)
            assert sorted(index for pack in orders[-1] for index in pack) == list(
                range(1000)
            )
        assert orders[0] != orders[1]
        assert waiting(balanced, num_ranks) < 1.02 < waiting(plain, num_ranks)
    assert list(PackedBatchSampler([], 8, balance=4)) == []
    with pytest.raises(ConfigError, match="balance=0"):
        PackedBatchSampler([1], 4, balance=0)


class Packed(nn.Module):
    """The attention layer, which makes its mask from the positions that it is given."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.net, self.masked = Attention(), masked

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        mask = packed_attention_mask(positions) if self.masked else None
        logits: Tensor = self.net(tokens, positions, mask)
        return logits


def over_ranks(comm_strategy: str, cp_size: int) -> Accelerator:
    handler = TorchContextParallelConfig(cp_comm_strategy=comm_strategy)  # type: ignore[arg-type]
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=cp_size, cp_handler=handler),
    )


@ranks(2)
def test_packs_are_refused_in_context_parallel_blocks_on_every_rank(
    ctx: ProcessContext,
) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    tokens = torch.ones(1, 8, dtype=torch.long)
    accelerator = over_ranks("allgather", 2)
    net = accelerator.prepare(Packed(False))
    block = accelerator.context_parallel([tokens, positions], [1, 1])
    with (
        pytest.raises(StepError, match=r"samples are packed.*set cp_size=1"),
        block,
    ):
        net(tokens, positions)


@ranks(2)
def test_context_parallel_ranks_resume_with_the_next_pack(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    data = samples(80)
    accelerator = over_ranks("allgather", 2)
    loader = accelerator.prepare(loader_of(data, balance=2))
    read_packs: list[Any] = []
    for number, batch in enumerate(loader):
        read_packs.append(rows_of(batch))
        if number == 3:
            accelerator.save_state(f"{where}/middle")
    assert ctx.world.all_gather_object(read_packs) == [read_packs, read_packs], (
        "both hold parts of the same rows"
    )
    second_accelerator = over_ranks("allgather", 2)
    resumed = second_accelerator.prepare(loader_of(data, balance=2))
    second_accelerator.load_state(f"{where}/middle")
    assert [rows_of(batch) for batch in resumed] == read_packs[4:]


@ranks(1, 2, 4)
def test_fewer_packs_than_ranks_and_a_loop_that_is_left(ctx: ProcessContext) -> None:
    for count in (0, 1, 3, 9):
        data = [{"input_ids": [1 + i] * 10} for i in range(count)]
        loader = Accelerator(cpu=True).prepare(loader_of(data, max_tokens=20))
        for left in (True, False, False):
            rank_packs = []
            for batch in loader:
                rank_packs.append(rows_of(batch))
                if left:
                    break
            everyone: list[Any] = ctx.world.all_gather_object(rank_packs)
            assert len({len(rank_batches) for rank_batches in everyone}) == 1, (
                "every rank makes as many steps"
            )
            if not left:
                read_samples = {
                    row
                    for rank_batches in everyone
                    for rows in rank_batches
                    for row in rows
                }
                assert read_samples == {tuple(sample["input_ids"]) for sample in data}


def save_after(ctx: ProcessContext, folder: Path, steps: int) -> list[Any]:
    """Read some steps of an epoch, save, and return this rank's packs so far."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(samples(80), balance=2))
    read_packs = []
    for number, batch in enumerate(loader, 1):
        read_packs.append(rows_of(batch))
        if number == steps:
            accelerator.save_state(folder / "middle")
            break
    return read_packs


def rest_of_epoch(ctx: ProcessContext, folder: Path) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(samples(80), balance=2))
    accelerator.load_state(folder / "middle")
    return [rows_of(batch) for batch in loader]


@pytest.mark.parametrize(
    "new_world", [1, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_packs_are_resumed_on_another_number_of_ranks(
    rank_pool: Pool, tmp_path: Path, new_world: int
) -> None:
    earlier_packs = rank_pool.run(save_after, 2, tmp_path, 3)
    later_packs = rank_pool.run(rest_of_epoch, new_world, tmp_path)
    packs = [tuple(pack) for rank in (*earlier_packs, *later_packs) for pack in rank]
    data = samples(80)
    sampler = PackedBatchSampler(
        [len(sample["input_ids"]) for sample in data], 32, balance=2
    )
    expected_packs = [
        tuple(tuple(data[index]["input_ids"]) for index in pack) for pack in sampler
    ]
    assert set(packs) == set(expected_packs)
    assert len(expected_packs) <= len(packs) < len(expected_packs) + new_world, (
        "only the last step repeats packs"
    )


def test_wrong_samples_are_refused_by_name() -> None:
    with pytest.raises(
        DataError, match=r"sample 1 has 9 tokens, more than max_tokens=8.*too_long"
    ):
        PackedBatchSampler([3, 9], 8)
    assert PackedBatchSampler([3, 9], 8, too_long="skip").skipped == [1]
    long = PackedBatchSampler([3, 9], 8, too_long="truncate", shuffle=False)
    assert list(long) == [[0], [1]]
    assert PackedCollator(max_tokens=8)([{"input_ids": list(range(9))}])[
        "input_ids"
    ].shape == (1, 8)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        PackedBatchSampler([1], 0)
    with pytest.raises(ConfigError, match="too_long='drop'"):
        PackedBatchSampler([1], 4, too_long="drop")  # type: ignore[arg-type]  # a wrong value on purpose
    with pytest.raises(DataError, match="no 'input_ids'"):
        PackedCollator()([{"text": [1]}])
    with pytest.raises(
        DataError, match="'labels' of sample 0 has 1 values and input_ids 2"
    ):
        PackedCollator()([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(DataError, match="more than pad_to=1"):
        PackedCollator(pad_to=1)([{"input_ids": [1, 2]}])
    batch = PackedCollator(cu_seqlens=True)([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3]
    assert batch["max_length_q"] == 2
