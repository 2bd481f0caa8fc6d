"""Agreement of ranks before a loader is split: equal settings, and equal data unless it is sharded already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from hasten.comm.base import Comm
from hasten.data.batch_plan import derive_seed
from hasten.data.carried_state import CarriedState
from hasten.data.foreign import ForeignSplit, has_fixed_shard_order, length_of, plainly, split_by_itself
from hasten.data.random_states import RandomStates, seed_everything
from hasten.data.rank_differences import NUM_SAMPLES, Sample, checksum_of, different_data, leaves_of, samples_differ
from hasten.data.source import Forwarding, engine_of
from hasten.errors import DataError
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

# Any in this file: datasets, samples and samplers of the user.
_LENGTH: Final = "the dataset's length"
_NUM_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class LoaderAgreement:
    """Facts that hold on all ranks."""

    seed: int
    sharded: bool
    """True if every rank's loader holds that rank's shard of the data."""
    split: ForeignSplit | None = None
    """The split that the dataset performs itself, if one was recognised."""
    checks: bool = False
    """True if ranks that read the same data compare it, because `already_sharded` was not given."""


class _RankFacts(NamedTuple):
    """Facts about one rank's loader."""

    settings: dict[str, Any]
    length: int | None
    indices: list[int] | None
    """Count and checksum of the indices that the sampler draws from."""
    seed: int
    reads_samples: bool
    checksum: int | None
    """Checksum of some samples; None if they are not compared here, or cannot be read."""


def agree_on_loader(
    loader: DataLoader[Any],
    settings: Mapping[str, Any],
    already_sharded: bool | None,
    seed: int,
    comm: Comm,
    reads_samples: bool,
) -> LoaderAgreement:
    """Compare the ranks' settings, and without `already_sharded` their data; with `reads_samples`, by the first samples.

    Ranks: every rank. Raises: DataError on every rank, with the values of each rank.
    """
    split = split_by_itself(loader.dataset) if already_sharded is None else None
    is_stream = isinstance(loader.dataset, IterableDataset)
    reads_samples = reads_samples and already_sharded is None and split is None
    own = _RankFacts(
        settings={**settings, "already_sharded": already_sharded, "whether it splits itself": split is not None},
        length=length_of(loader.dataset),
        indices=_sampled_indices(loader.sampler),
        seed=seed,
        reads_samples=reads_samples,
        checksum=_checksum_of_first_samples(loader) if reads_samples and not is_stream else None,
    )
    facts: list[_RankFacts] = comm.all_gather_object(own)
    for name in own.settings:
        _refuse_difference(name, [rank_facts.settings[name] for rank_facts in facts], comm)
    seed = facts[0].seed
    if already_sharded:
        return LoaderAgreement(seed, True)
    if split is not None:
        log.info("the dataset is already split over the ranks by %s, so each rank reads its part", split.by)
        return LoaderAgreement(seed, True, split)
    lengths = ["unknown" if rank_facts.length is None else rank_facts.length for rank_facts in facts]
    _refuse_difference(_LENGTH, lengths, comm)
    if already_sharded is None:
        if any(rank_facts.indices != own.indices for rank_facts in facts):
            raise different_data(f"{type(loader.sampler).__name__} has different indices on every rank", comm.size)
        checksums = [rank_facts.checksum for rank_facts in facts]
        if is_stream and all(rank_facts.reads_samples for rank_facts in facts):
            draw_alike(loader.dataset, comm)
            checksums = comm.all_gather_object(_checksum_of_first_samples(loader))
        if None not in checksums and len(set(checksums)) > 1:
            compare_first_samples(loader, comm)
    return LoaderAgreement(seed, False, checks=already_sharded is None)


def _refuse_difference(name: str, values: list[Any], comm: Comm) -> None:
    if all(value == values[0] for value in values):
        return
    table = ", ".join(f"rank {comm.ranks[member]}: {value}" for member, value in enumerate(values))
    advice = (
        " If the dataset of each rank already is its part of the data, set DataLoaderConfiguration(already_sharded=True) or call "
        "prepare_data_loader(loader, already_sharded=True)."
        if name == _LENGTH
        else ""
    )
    raise DataError(
        f"the ranks prepare loaders that differ in {name} ({table}), so some would run out of batches while "
        f"the others wait for them. Give every rank the whole dataset and the same settings; prepare() splits it.{advice}"
    )


def _sampled_indices(sampler: Any) -> list[int] | None:
    """Return count and checksum of the indices that one of torch's random samplers draws from, if it has any."""
    if plainly(sampler, SubsetRandomSampler):
        indices = torch.as_tensor(list(sampler.indices), dtype=torch.int64)
    elif plainly(sampler, WeightedRandomSampler):
        indices = torch.as_tensor(sampler.weights).nonzero().flatten()
    else:
        return None
    return [indices.numel(), derive_seed(*indices.sort().values[:4096].tolist())]


def draw_alike(stream: Any, comm: Comm) -> None:
    """Set the stream's generators to their states on the first rank, since ranks that share it must draw equally.

    Ranks: every rank.
    """
    if comm.size == 1:
        return
    carried = CarriedState(stream, attributes=False)
    generators = carried.capture()
    generators_of_ranks = comm.all_gather_object(generators)
    if has_fixed_shard_order(stream) and any(others != generators for others in generators_of_ranks):
        raise DataError(
            f"the stream's {stream.num_shards} shards are shuffled without a seed, so every rank has them in another "
            f"order and samples would be lost or read twice. Give shuffle() a seed."
        )
    carried.restore(generators_of_ranks[0])


def _checksum_of_first_samples(loader: DataLoader[Any]) -> int | None:
    turns = _read_first_samples(loader, 1)
    return None if turns is None else checksum_of(turns[0])


def compare_first_samples(loader: DataLoader[Any], comm: Comm) -> None:
    """Read the first samples of a loader three times and compare those of ranks.

    Ranks: every rank. Raises: DataError on every rank if they come from different data.
    """
    if samples_differ(comm.all_gather_object(_read_first_samples(loader, _NUM_TURNS))):
        raise different_data(f"the first samples of {type(loader.dataset).__name__} differ between ranks", comm.size)


# -- first samples -----------------------------------------------------------------------------------------------------
def _seed_turn(turn: int) -> None:
    """Seed one reading, equally on every rank; the first two readings have equal seeds."""
    seed_everything(derive_seed(turn == 2))


class FirstItems(Forwarding):
    """Items from all parts of a map-style dataset, `num_turns` times: twice from equal random states, then from different ones."""

    def __init__(self, dataset: Any, size: int, num_turns: int) -> None:
        self.hasten_dataset = dataset
        count = min(size, NUM_SAMPLES)
        self.hasten_indices = [number * (size - 1) // max(count - 1, 1) for number in range(count)]
        self.hasten_num_turns = num_turns

    def __len__(self) -> int:
        return self.hasten_num_turns * len(self.hasten_indices)

    def __getitem__(self, place: int) -> Any:
        turn, number = divmod(place, len(self.hasten_indices))
        if not number:
            _seed_turn(turn)
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
            _seed_turn(turn)
            yield from ((turn, element) for element in islice(iter(self.hasten_dataset), NUM_SAMPLES))


def leaves_of_turn(read: Any) -> tuple[int, Sample]:
    """Return (turn, leaves) for an element of FirstItems or FirstElements."""
    turn, sample = read
    return turn, leaves_of(sample)


def _read_first_samples(loader: DataLoader[Any], num_turns: int) -> list[list[Sample]] | None:
    """Read the first samples, in a worker if the loader has any; None if they cannot be read."""
    dataset: Any = loader.dataset
    size = length_of(dataset) or 0
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not size:
        return None
    first: Any = FirstElements(dataset, num_turns) if is_stream else FirstItems(dataset, size, num_turns)
    engine = engine_of(
        loader,
        dataset=first,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        sampler=count() if is_stream else range(len(first)),
        collate_fn=leaves_of_turn,
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    engine.generator = torch.Generator().manual_seed(0)
    carried = CarriedState(dataset)
    before = carried.capture()
    turns: list[list[Sample]] = [[] for _ in range(num_turns)]
    try:
        with RandomStates().kept():
            for turn, leaves in engine:
                turns[turn].append(leaves)
    except Exception as error:  # the user's dataset: the training loop raises its error when it reads
        log.info("the first samples could not be compared between ranks: %r", error)
        return None
    finally:
        carried.restore(before)
    return turns
