"""Sequence packing: samples of different lengths concatenated into rows of at most `max_tokens` tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hasten.errors import ConfigError, DataError
from hasten.optional import need

IGNORED: Final = -100
"""Label that loss functions ignore."""
TooLong = Literal["error", "skip", "truncate"]


class PackedBatchSampler(Sampler[list[int]]):
    """Batch sampler whose batches are packs: samples that fit together into `max_tokens` tokens.

    The packs are made once, by best fit over the samples in an order that depends on `seed`, so that the number of batches
    is the same in every epoch; `set_epoch` changes their order. Samples longer than `max_tokens` raise an error, are left
    out (`too_long="skip"`), or form a pack of their own that `PackedCollator(max_tokens=...)` truncates. `balance=8` makes each 8
    consecutive batches similar in tokens and in attention (the sum of squared lengths), for 8 data-parallel ranks that wait for
    each other in every step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        too_long: TooLong = "error",
        balance: int = 1,
    ) -> None:
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.balance = balance
        self.seed = seed
        self.epoch = 0
        self.skipped: list[int] = []
        """Indices of samples that are too long and left out."""
        if max_tokens < 1:
            raise ConfigError(
                f"PackedBatchSampler(max_tokens={max_tokens}) must be 1 or more tokens in a row."
            )
        if too_long not in ("error", "skip", "truncate"):
            raise ConfigError(
                f"too_long={too_long!r} is unknown; use 'error', 'skip' or 'truncate'."
            )
        if balance < 1:
            raise ConfigError(
                f"PackedBatchSampler(balance={balance}) must be 1 or more: the number of ranks that read different batches."
            )
        sizes = list(map(int, lengths))
        self._packs = self._pack_samples(sizes, too_long)
        if balance > 1:
            self._packs.sort(key=partial(_attention_cost, sizes, max_tokens))

    def _pack_samples(
        self, lengths: Sequence[int], too_long: TooLong
    ) -> list[list[int]]:
        sample_order: Sequence[int] = range(len(lengths))
        if self.shuffle:
            sample_order = torch.randperm(
                len(lengths), generator=torch.Generator().manual_seed(self.seed)
            ).tolist()
        packs: list[list[int]] = []
        # (free tokens, pack), sorted: the fullest pack that fits comes first
        free_packs: list[tuple[int, int]] = []
        for index in sample_order:
            length = lengths[index]
            if length > self.max_tokens:
                if too_long == "error":
                    raise DataError(
                        f"sample {index} has {length} tokens, more than max_tokens={self.max_tokens}, so it fits into no row. "
                        "Increase max_tokens, shorten the sample, or choose too_long='skip' or 'truncate'."
                    )
                if too_long == "skip":
                    self.skipped.append(index)
                    continue
                length = self.max_tokens
            pack_position = bisect_left(free_packs, (length, -1))
            if pack_position < len(free_packs):
                num_free_tokens, pack_index = free_packs.pop(pack_position)
                packs[pack_index].append(index)
            else:
                num_free_tokens = self.max_tokens
                pack_index = len(packs)
                packs.append([index])
            if num_free_tokens - length > 0:
                insort(free_packs, (num_free_tokens - length, pack_index))
        return packs

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the packs."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._packs)

    def __iter__(self) -> Iterator[list[int]]:
        group_size = self.balance
        groups = []
        for start in range(0, len(self._packs), group_size):
            groups.append(self._packs[start : start + group_size])
        # comes last, so that groups stay aligned
        last_group = groups.pop() if groups and len(groups[-1]) < group_size else []
        if self.shuffle:
            generator = torch.Generator().manual_seed(
                self.seed + 1_000_003 * (self.epoch + 1)
            )
            group_order = torch.randperm(len(groups), generator=generator).tolist()
            groups = [groups[group_index] for group_index in group_order]
            if group_size > 1:  # no rank always has the largest pack
                for group_index, group in enumerate(groups):
                    pack_order = torch.randperm(group_size, generator=generator)
                    groups[group_index] = [
                        group[index] for index in pack_order.tolist()
                    ]
        for pack in chain(*groups, last_group):
            yield list(pack)


def _attention_cost(sizes: list[int], max_tokens: int, pack: list[int]) -> int:
    return sum(min(sizes[index], max_tokens) ** 2 for index in pack)


def num_label_tokens(labels: Tensor) -> Tensor:
    """Return the number of labels that count in a loss: the weight of its mean."""
    return (labels != IGNORED).sum()


class PackedCollator:
    """Collate function that concatenates samples into one row, with what attention needs to keep them apart.

    Every sample is a mapping with `input_ids` and fields of the same length. The batch has `input_ids`, `labels` (the
    samples' labels, or their `input_ids`, with the first token of each sample ignored, because no earlier token of the
    sample predicts it), `position_ids` that restart at 0, and `num_tokens`, the number of labels that count: the weight of
    the batch's mean loss. For models of transformers, `transformers=True` adds `use_cache=False`, without which they let
    samples attend to each other, and leaves out `num_tokens`; `cu_seqlens=True` adds `cu_seq_lens_q`, `cu_seq_lens_k`,
    `max_length_q` and `max_length_k` for variable-length attention kernels. `pad_to` pads the row with ignored tokens, for compiled
    models that need one length. `shift_labels=True` makes `shift_labels`, where each token has the label of the next one: for
    context parallelism, which splits rows over ranks. It replaces `labels`, which models of transformers get as well.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        pad_to: int | None = None,
        pad_token_id: int = 0,
        transformers: bool = False,
        cu_seqlens: bool = False,
        shift_labels: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.pad_to = pad_to
        self.pad_token_id = pad_token_id
        self.transformers = transformers
        self.cu_seqlens = cu_seqlens
        self.shift_labels = shift_labels

    # Any: lists, arrays or tensors
    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = []
        for sample_index, sample in enumerate(samples):
            rows.append(self._sample_fields(sample_index, sample))
        sample_lengths = [len(row["input_ids"]) for row in rows]
        fields: dict[str, Any] = {
            name: torch.cat([row[name] for row in rows]) for name in rows[0]
        }
        fields["position_ids"] = torch.cat(list(map(torch.arange, sample_lengths)))
        num_padding = 0 if self.pad_to is None else self.pad_to - sum(sample_lengths)
        if num_padding < 0:
            raise DataError(
                f"a pack has {sum(sample_lengths)} tokens, more than pad_to={self.pad_to}; set pad_to to max_tokens or more."
            )
        if num_padding:
            sample_lengths.append(num_padding)
            for name, field in fields.items():
                fields[name] = torch.cat(
                    [field, self._make_padding(name, num_padding, field.dtype)]
                )
        if self.shift_labels:
            fields["shift_labels"] = torch.cat(
                [fields["labels"][1:], fields["labels"].new_full((1,), IGNORED)]
            )
            fields["labels"] = fields["shift_labels"].clone()
        packed_batch: dict[str, Any] = {
            name: field[None] for name, field in fields.items()
        }
        if self.shift_labels and not self.transformers:
            del packed_batch["labels"]
        if self.transformers:
            packed_batch["use_cache"] = False
        else:
            packed_batch["num_tokens"] = num_label_tokens(fields["labels"])
        if self.cu_seqlens:
            sample_ends = torch.tensor([0, *sample_lengths]).cumsum(0).to(torch.int32)
            packed_batch |= {"cu_seq_lens_q": sample_ends, "cu_seq_lens_k": sample_ends}
            packed_batch |= {
                "max_length_q": max(sample_lengths),
                "max_length_k": max(sample_lengths),
            }
        return packed_batch

    # Any: lists, arrays or tensors
    def _sample_fields(
        self, number: int, sample: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if "input_ids" not in sample:
            raise DataError(
                f"sample {number} of a pack has the fields {sorted(sample)} and no 'input_ids', the tokens to concatenate."
            )
        fields = {}
        for name, value in sample.items():
            if _is_row(value):
                fields[name] = torch.as_tensor(value)[: self.max_tokens]
        # one row without padding inside; position_ids keep the samples apart
        fields.pop("attention_mask", None)
        fields.pop("position_ids", None)
        length = len(fields["input_ids"])
        wrong_name = next(
            (name for name, value in fields.items() if len(value) != length), None
        )
        if wrong_name is not None:
            raise DataError(
                f"field {wrong_name!r} of sample {number} has {len(fields[wrong_name])} values and input_ids {length}; fields of a packed "
                "sample have one value per token."
            )
        labels = fields.get("labels", fields["input_ids"]).clone()
        labels[:1] = IGNORED
        return {**fields, "labels": labels}

    def _make_padding(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        if name == "position_ids":
            return torch.arange(count)
        value = {"labels": IGNORED, "input_ids": self.pad_token_id}.get(name, 0)
        return torch.full((count,), value, dtype=dtype)


def _is_row(value: Any) -> bool:  # Any: a field of the user's sample
    return (
        not isinstance(value, str)
        and getattr(value, "ndim", 1) == 1
        and hasattr(value, "__len__")
    )


def sample_numbers(position_ids: Tensor) -> Tensor:
    """Return the number of the packed sample that each token belongs to: 0, 0, 1, 1, 1, 2 for 0, 1, 0, 1, 2, 0."""
    return (position_ids == 0).long().cumsum(-1) - 1


def packed_attention_mask(position_ids: Tensor, causal: bool = True) -> Tensor:
    """Return a boolean mask (batch, 1, tokens, tokens) for `scaled_dot_product_attention`: True where a token may attend."""
    sample_ids = sample_numbers(position_ids)
    mask = sample_ids[:, None, :, None] == sample_ids[:, None, None, :]
    if causal:
        size = position_ids.shape[-1]
        mask = (
            mask
            & torch.ones(
                size, size, dtype=torch.bool, device=position_ids.device
            ).tril()
        )
    return mask


# Any: torch's BlockMask
def packed_block_mask(position_ids: Tensor, causal: bool = True) -> Any:
    """Return the same mask as `packed_attention_mask` for FlexAttention, which skips blocks without attention."""
    sample_ids = sample_numbers(position_ids)
    size = position_ids.shape[-1]

    def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_same_sample = sample_ids[row, query] == sample_ids[row, key]
        if causal:
            return is_same_sample & (query >= key)
        return is_same_sample

    create_mask = need("torch.nn.attention.flex_attention").create_block_mask
    return create_mask(
        may_attend, len(position_ids), None, size, size, device=str(position_ids.device)
    )
