"""Agreement of ranks before a loader is split: equal settings, and equal data unless it is sharded already."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hasten import trees
from hasten.comm.base import Comm
from hasten.data.carried_state import CarriedState, SamplerState
from hasten.data.foreign import (
    ForeignSplit,
    find_length,
    find_own_split,
    has_fixed_shard_order,
    is_exactly,
)
from hasten.data.order import to_plain_unit
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.source import Forwarding, copy_loader
from hasten.errors import DataError
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

# Any in this file: datasets, samples and samplers of the user.
_LENGTH: Final = "the dataset's length"
_NUM_SAMPLES: Final = 4
_NUM_UNITS: Final = 64
_MAX_LEAVES: Final = 200
_NUM_VALUES: Final = 16

Leaf = list[Any]
"""A value of a sample: text with its type and checksum, and for real numbers some of them, which may differ by rounding."""
Sample = dict[str, Leaf]
"""The leaves of a sample by their paths."""


@dataclass(frozen=True, slots=True)
class LoaderAgreement:
    """Facts that hold on all ranks."""

    seed: int
    sharded: bool
    """True if every rank's loader holds that rank's shard of the data."""
    split: ForeignSplit | None = None
    """The split that the dataset performs itself, if one was recognised."""


def agree_on_loader(
    loader: DataLoader[Any],
    settings: Mapping[str, Any],
    already_sharded: bool | None,
    seed: int,
    comm: Comm,
    reads_samples: bool,
) -> LoaderAgreement:
    """Compare the ranks' settings, and without `already_sharded` their samplers and, with `reads_samples`, first samples.

    Ranks: every rank. Raises: DataError on every rank, with the values of each rank.
    """
    split = find_own_split(loader.dataset) if already_sharded is None else None
    facts = {
        **settings,
        "already_sharded": already_sharded,
        "whether it splits itself": split is not None,
        _LENGTH: None
        if already_sharded or split is not None
        else find_length(loader.dataset),
    }
    facts_of_ranks: list[tuple[dict[str, Any], int]] = comm.all_gather_object(
        (facts, seed)
    )
    for name in facts:
        _refuse_difference(
            name, [rank_facts[name] for rank_facts, _ in facts_of_ranks], comm
        )
    seed = facts_of_ranks[0][1]
    if already_sharded:
        return LoaderAgreement(seed, True)
    if isinstance(loader.dataset, IterableDataset):
        _equalise_generators(loader.dataset, comm)
    if split is not None:
        log.info(
            "the dataset is already split over the ranks by %s, so each rank reads its part",
            split.by,
        )
        return LoaderAgreement(seed, True, split)
    if already_sharded is None:
        _compare_samplers(loader, comm)
        if reads_samples:
            _compare_first_samples(loader, comm)
    return LoaderAgreement(seed, False)


def _refuse_difference(name: str, values: list[Any], comm: Comm) -> None:
    if all(rank_value == values[0] for rank_value in values):
        return
    values_of_ranks = ", ".join(
        f"rank {comm.ranks[member]}: {rank_value}"
        for member, rank_value in enumerate(values)
    )
    advice = ""
    if name == _LENGTH:
        advice = (
            " If the dataset of each rank already is its part of the data, set DataLoaderConfiguration(already_sharded=True) or call "
            "prepare_data_loader(loader, already_sharded=True)."
        )
    raise DataError(
        f"the ranks prepare loaders that differ in {name} ({values_of_ranks}), so some would run out of batches while "
        f"the others wait for them. Give every rank the whole dataset and the same settings; prepare() splits it.{advice}"
    )


def _different_data_error(difference: str, num_ranks: int) -> DataError:
    return DataError(
        f"the ranks were given different data: {difference}. prepare() splits a loader, so each rank would read 1/{num_ranks} of its "
        "data and the rest would be lost. Give every rank the same dataset and sampler: call set_seed(0) before random data is made or "
        "split. If the loader of each rank holds its part of the data on purpose, set DataLoaderConfiguration(already_sharded=True), or "
        "call prepare_data_loader(loader, already_sharded=True). already_sharded=False leaves this check out."
    )


def _equalise_generators(stream: Any, comm: Comm) -> None:
    """Set the stream's generators to their states on the first rank, since ranks that share it must draw equally."""
    stream_state = CarriedState(stream, attributes=False)
    generators = stream_state.capture()
    generators_of_ranks = comm.all_gather_object(generators)
    if has_fixed_shard_order(stream) and any(
        rank_generators != generators for rank_generators in generators_of_ranks
    ):
        raise DataError(
            f"the stream's {stream.num_shards} shards are shuffled without a seed, so every rank has them in another "
            f"order and samples would be lost or read twice. Give shuffle() a seed."
        )
    stream_state.restore(generators_of_ranks[0])


# -- indices that samplers draw ----------------------------------------------------------------------------------------
def _compare_samplers(loader: DataLoader[Any], comm: Comm) -> None:
    """Raise on every rank when the ranks' samplers yield different indices from equal random states.

    Samplers that yield other indices when they are drawn from again are not compared, nor are those of which nothing
    can be drawn twice: all ranks use the first rank's indices.
    """
    batches = loader.batch_sampler
    has_own_batches = batches is not None and not is_exactly(batches, BatchSampler)
    sampler: Any = batches if has_own_batches else loader.sampler
    torch_samplers = (SequentialSampler, RandomSampler, DistributedSampler)
    if any(
        is_exactly(sampler, sampler_class) for sampler_class in torch_samplers
    ) or hasattr(sampler, "__next__"):
        return
    sampler_state = SamplerState(sampler)
    saved_state = sampler_state.capture()
    try:
        first_units = _draw_units(sampler)
        units_again = _draw_units(sampler)
    # the user's sampler: the training loop raises its error when it draws
    except Exception:
        first_units = units_again = None
    finally:
        sampler_state.restore(saved_state)
    is_comparable = first_units is not None and first_units == units_again
    units_of_ranks = comm.all_gather_object(first_units if is_comparable else None)
    if None in units_of_ranks:
        return
    if any(units != units_of_ranks[0] for units in units_of_ranks):
        raise _different_data_error(
            f"{type(sampler).__name__} yields different indices on every rank",
            comm.size,
        )


def _draw_units(sampler: Any) -> list[Any] | None:
    with RandomStates().kept():
        seed_everything(0)
        return [to_plain_unit(unit) for unit in islice(iter(sampler), _NUM_UNITS)]


# -- first samples -----------------------------------------------------------------------------------------------------
def _compare_first_samples(loader: DataLoader[Any], comm: Comm) -> None:
    """Raise on every rank when the ranks' first samples come from different data."""
    samples = _read_first_samples(loader, 1)
    checksum = None if samples is None else zlib.crc32(repr(samples).encode())
    checksums = comm.all_gather_object(checksum)
    if None in checksums or len(set(checksums)) == 1:
        return
    if samples_differ(comm.all_gather_object(_read_first_samples(loader, 2))):
        raise _different_data_error(
            f"the first samples of {type(loader.dataset).__name__} differ between ranks",
            comm.size,
        )


def _read_first_samples(
    loader: DataLoader[Any], num_turns: int
) -> list[list[Sample]] | None:
    """Read the first samples, in a worker if the loader has any; None if they cannot be read."""
    dataset: Any = loader.dataset
    size = find_length(dataset) or 0
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not size:
        return None
    if is_stream:
        first_samples: Any = FirstElements(dataset, num_turns)
    else:
        first_samples = FirstItems(dataset, size, num_turns)
    engine = copy_loader(
        loader,
        dataset=first_samples,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        sampler=count() if is_stream else range(len(first_samples)),
        collate_fn=summarise_turn,
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    engine.generator = torch.Generator().manual_seed(0)
    dataset_state = CarriedState(dataset)
    saved_state = dataset_state.capture()
    samples_by_turn: list[list[Sample]] = [[] for _ in range(num_turns)]
    try:
        with RandomStates().kept():
            for turn, sample in engine:
                samples_by_turn[turn].append(sample)
    # the user's dataset: the training loop raises its error when it reads
    except Exception as error:
        log.info("the first samples could not be compared between ranks: %r", error)
        return None
    finally:
        dataset_state.restore(saved_state)
    return samples_by_turn


class FirstItems(Forwarding):
    """Items from all parts of a map-style dataset, `num_turns` times from equal random states."""

    def __init__(self, dataset: Any, size: int, num_turns: int) -> None:
        self.hasten_dataset = dataset
        num_items = min(size, _NUM_SAMPLES)
        index_step = (size - 1) / max(num_items - 1, 1)
        self.hasten_indices = [int(number * index_step) for number in range(num_items)]
        self.hasten_num_turns = num_turns

    def __len__(self) -> int:
        return self.hasten_num_turns * len(self.hasten_indices)

    def __getitem__(self, index: int) -> Any:
        turn, number = divmod(index, len(self.hasten_indices))
        if not number:
            seed_everything(0)
        return turn, self.hasten_dataset[self.hasten_indices[number]]


class FirstElements(Forwarding, IterableDataset[Any]):
    """The first elements of a stream, `num_turns` times; none of a stream that can be read only once."""

    def __init__(self, dataset: Any, num_turns: int) -> None:
        self.hasten_dataset = dataset
        self.hasten_num_turns = num_turns

    def __iter__(self) -> Iterator[Any]:
        if iter(self.hasten_dataset) is iter(self.hasten_dataset):
            return
        for turn in range(self.hasten_num_turns):
            seed_everything(0)
            for element in islice(iter(self.hasten_dataset), _NUM_SAMPLES):
                yield turn, element


def summarise_turn(turn_and_sample: tuple[int, Any]) -> tuple[int, Sample]:
    """Return (turn, leaves) for an element of FirstItems or FirstElements."""
    turn, sample = turn_and_sample
    return turn, summarise_sample(sample)


def summarise_sample(sample: Any) -> Sample:
    """Return the first values of a sample by path; objects of unknown classes are left out."""
    leaves: Sample = {}
    for path, value in islice(trees.paths(sample), _MAX_LEAVES):
        leaf = _summarise_leaf(value)
        if leaf is not None:
            leaves[repr(path)] = leaf
    return leaves


def _summarise_leaf(value: Any) -> Leaf | None:
    if value is None or isinstance(value, bool | int | str | bytes):
        return [f"{type(value).__name__} {zlib.crc32(repr(value).encode())}"]
    if isinstance(value, float):
        return ["float", value]
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            return None
        host_tensor = value.detach().cpu()
        value = (
            host_tensor.double() if value.is_floating_point() else host_tensor
        ).numpy()
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        return None
    flat_numbers = np.ravel(value)
    last_position = max(flat_numbers.size - 1, 0)
    positions = np.linspace(
        0, last_position, min(_NUM_VALUES, flat_numbers.size)
    ).astype(np.int64)
    picked_numbers = flat_numbers[positions].tolist()
    # images are subject to rounding
    if value.dtype.kind == "f" or value.dtype == np.uint8:
        mean = float(flat_numbers.mean(dtype=np.float64)) if picked_numbers else 0.0
        return [f"real {value.shape}", mean, *picked_numbers]
    return [f"exact {value.shape} {zlib.crc32(repr(picked_numbers).encode())}"]


def samples_differ(turns_of_ranks: Sequence[Sequence[list[Sample]] | None]) -> bool:
    """Return True if the first samples of ranks come from different data; each rank has read them twice.

    Values that a rank does not read twice are ignored. A text or whole number that is equal on all ranks and differs
    between samples identifies the sample: then the rest is augmentation.
    """
    all_turns = [turns for turns in turns_of_ranks if turns is not None]
    num_samples = min(len(samples) for turns in all_turns for samples in turns)
    if len(all_turns) < len(turns_of_ranks) or not num_samples:
        return False
    own_samples = all_turns[0][0][:num_samples]
    num_steady = num_equal = 0
    for path in {path for sample in own_samples for path in sample}:
        readings = [
            [sample.get(path) for sample in samples[:num_samples]]
            for turns in all_turns
            for samples in turns
        ]
        is_steady = all(map(_are_close, readings[::2], readings[1::2]))
        is_equal = all(_are_close(readings[0], reading) for reading in readings)
        num_steady += is_steady
        num_equal += is_equal
        exact_values = {leaf[0] for leaf in readings[0] if leaf and len(leaf) == 1}
        if is_equal and len(exact_values) == num_samples:
            return False
    return num_equal < num_steady


def _are_close(leaves: list[Leaf | None], other_leaves: list[Leaf | None]) -> bool:
    return all(map(_is_close, leaves, other_leaves))


def _is_close(leaf: Leaf | None, other_leaf: Leaf | None) -> bool:
    if not leaf or not other_leaf or leaf[0] != other_leaf[0]:
        return False
    return bool(
        np.allclose(leaf[1:], other_leaf[1:], rtol=2e-2, atol=1e-6, equal_nan=True)
    )
