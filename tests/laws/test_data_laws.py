"""Random loaders against plain torch, and interrupted runs against uninterrupted ones, bit for bit.

`make laws` searches for long, `make laws SEED=17` runs one case, which is printed with its seed when it fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from hasten import Accelerator, DataLoaderConfiguration
from hasten.errors import DataError, MismatchError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from tests.support.laws import Law

PRELOAD: Final = ("datasets",)

# Any in this file: samples and batches of many kinds.
ORDERS: Final = {
    "in order": "map-style data, in order",
    "shuffle": "`shuffle=True`",
    "torch's permutation": "`shuffle=True` with `use_seedable_sampler=False`",
    "generator": "`shuffle=True` with a generator of yours",
    "weighted": "`WeightedRandomSampler`",
    "subset": "`SubsetRandomSampler`",
    "own numpy": "a sampler that owns a numpy generator",
    "own python": "a sampler that owns a `random.Random`",
    "own torch": "a sampler that owns a torch generator",
    "counts epochs": "a sampler that counts its epochs",
    "shuffles in place": "a sampler that shuffles its own list in place",
    "batch sampler": "a batch sampler that draws from `np.random`",
    "own batch sampler": "a batch sampler that owns a generator",
}
STREAMS: Final = {
    "numbers": "a stream",
    "sized": "a stream with a length",
    "draws": "a stream that shuffles through a buffer with `random`",
    "draws numpy": "the same with `np.random`",
    "own generator": "the same with its own generator",
    "stateful": "a stream with `state_dict`",
    "stateful draws": "a stream with `state_dict` that forgets its shuffle buffer",
    "sharded": "a stream with `shard()`, of uneven parts",
}
HUB: Final = {
    "hub": "`datasets` stream",
    "hub mapped": "`datasets` stream, mapped and filtered",
    "hub shuffled": "`datasets` stream, shuffled through a buffer",
    "hub interleaved": "`datasets` streams, concatenated and shuffled",
}
SPLIT_DATA: Final = {
    "part of a list": "map-style data that is each process's part",
    "part sampler": "a sampler that yields its process's indices",
    "part batch sampler": "a batch sampler that yields its process's batches",
    "part stream": "a stream that asks for its rank",
    "part stream shuffled": "the same, shuffled with `random` before it is split",
    "hub shard": "`shard()` of a `datasets` dataset",
    "hub split": "`split_dataset_by_node()` of a `datasets` stream",
}
RECOGNISED: Final = ("hub shard", "hub split")
OWN_BATCHES: Final = ("batch sampler", "own batch sampler")
PATIENCE_S: Final = 300.0


@dataclass(frozen=True)
class Case:
    """One way to read, stop and go on."""

    data: str
    """A kind of sampler for map-style data, or a kind of stream."""
    augment: bool
    size: int
    batch: int | None
    workers: int
    persistent: bool
    mode: str
    even: bool
    drop_last: bool
    prefetch: int
    world: int
    new_world: int
    every: int
    stop: float
    """The part of the run after which it is saved."""
    seed: int
    flagged: bool = False
    """Whether `already_sharded=True` is said of data that every rank has its own part of."""

    @property
    def is_stream(self) -> bool:
        return (
            self.data in STREAMS
            or self.data in HUB
            or "stream" in self.data
            or self.data == "hub split"
        )

    @property
    def is_unsaid(self) -> bool:
        """Whether ranks have parts of the data, and nothing says so."""
        return (
            self.data in SPLIT_DATA
            and not self.flagged
            and self.data not in RECOGNISED
            and self.world > 1
        )

    def own_shards(self, world: int) -> bool:
        """Whether each of so many ranks reads a part that the dataset cuts for it."""
        if (
            world == 1
            or self.mode == "dispatch"
            or (self.mode == "split" and self.batch is None)
        ):
            return False
        return self.data == "sharded" or (
            self.data in HUB and hub_stream(self).num_shards >= world
        )

    @property
    def refused(self) -> bool:
        """Whether going on inside an epoch must be refused: parts of the dataset's own fit one number of ranks only."""
        uses_rank_parts = (
            self.data in SPLIT_DATA
            or self.own_shards(self.world)
            or self.own_shards(self.new_world)
        )
        return self.world != self.new_world and uses_rank_parts


def draw(seed: int) -> Case:
    """The case of a seed: of data that is sharded already in one of six."""
    r = random.Random(-seed - 2)
    case = draw_whole(seed)
    if r.random() > 1 / 6:
        return case
    data = r.choice(list(SPLIT_DATA))
    mode = (
        "shard"
        if case.mode == "dispatch"
        or case.data in OWN_BATCHES
        or data == "part batch sampler"
        else case.mode
    )
    batch = case.batch
    if mode != case.mode and case.mode == "split":
        batch = r.choice((1, 2, 3, 4))
    size = r.randint(8, 40)
    return replace(
        case, data=data, mode=mode, batch=batch, size=size, flagged=r.random() < 0.8
    )


def draw_whole(seed: int) -> Case:
    """A case of data that is whole on every rank."""
    r = random.Random(seed)
    data = r.choice(list(r.choice((ORDERS, STREAMS, HUB))))
    mode = r.choice(("shard", "shard", "split", "dispatch"))
    world = r.choice((1, 2, 2, 3, 4))
    workers = r.choice((0, 0, 0, 2))
    batch: int | None = r.choice((1, 2, 3, 4))
    if mode == "split":
        batch = batch * 12  # type: ignore[operator] # divides over 1 to 4 ranks
    if data not in OWN_BATCHES and mode != "split" and r.random() < 0.15:
        batch = None
    return Case(
        data=data,
        augment=r.random() < 0.5,
        size=r.randint(8 if data in HUB or data == "sharded" else 1, 40),
        batch=batch,
        workers=workers,
        persistent=workers > 0 and r.random() < 0.5,
        mode=mode,
        even=r.random() < 0.8,
        drop_last=r.random() < 0.2,
        prefetch=r.choice((0, 0, 1, 3)),
        world=world,
        new_world=world if r.random() < 0.6 else r.choice((1, 2, 3, 4)),
        every=r.choice((1, 1, 2, 3)),
        stop=r.random(),
        seed=seed,
    )


# -- data -----------------------------------------------------------------------------------------------------------
def noise(augment: bool) -> float:
    """A number drawn from all three libraries."""
    return (
        random.random() + float(np.random.rand()) + float(torch.rand(()))
        if augment
        else 0.0
    )


class Items(Dataset[tuple[int, float]]):
    def __init__(self, size: int, augment: bool) -> None:
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return int(index), noise(self.augment)


class Drawn(Sampler[int]):
    """A sampler that remembers something of its own."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size, self.epoch = kind, size, 0
        self.order = list(range(size))
        kinds: dict[str, Any] = {
            "own numpy": np.random.default_rng(3),
            "own python": random.Random(3),
            "own torch": torch.Generator().manual_seed(3),
        }
        self.rng: Any = kinds.get(kind)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        if self.kind == "own numpy":
            return iter(self.rng.permutation(self.size).tolist())
        if self.kind == "own torch":
            return iter(torch.randperm(self.size, generator=self.rng).tolist())
        if self.kind == "counts epochs":
            self.epoch += 1
            return iter(random.Random(self.epoch).sample(range(self.size), self.size))
        rng: Any = self.rng or random.Random(7)
        rng.shuffle(self.order)
        return iter(list(self.order))


class Batches(Sampler[list[int]]):
    """Batches of growing size."""

    def __init__(self, size: int, has_generator: bool) -> None:
        self.size, self.rng = size, np.random.RandomState(2) if has_generator else None
        self.drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        order = (self.rng or np.random).permutation(self.size).tolist()
        rows = 1
        while order:
            yield order[:rows]
            order, rows = order[rows:], rows % 5 + 1


class Stream(IterableDataset[tuple[int, float]]):
    """A stream that splits itself over workers, and shuffles through a buffer when it draws."""

    def __init__(self, kind: str, size: int, augment: bool) -> None:
        self.kind, self.size, self.augment = kind, size, augment
        self.rng = (
            np.random.default_rng(4)
            if "own" in kind or "stateful draws" in kind
            else None
        )
        self.done = 0

    def elements(self) -> list[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return list(range(first, self.size, step))

    def __iter__(self) -> Iterator[tuple[int, float]]:
        buffer: list[int] = []
        draws = self.kind in ("draws", "draws numpy", "own generator", "stateful draws")
        for element in self.elements()[self.done :]:
            buffer.append(element)
            if len(buffer) > (4 if draws else 0):
                yield self.taken(buffer)
        while buffer:
            yield self.taken(buffer)
        self.done = 0

    def taken(self, buffer: list[int]) -> tuple[int, float]:
        self.done += self.kind == "stateful"
        if self.rng is not None:
            return buffer.pop(int(self.rng.integers(len(buffer)))), noise(self.augment)
        draw_functions: dict[str, Any] = {
            "draws": random.randrange,
            "draws numpy": np.random.randint,
        }
        draw = draw_functions.get(self.kind)
        return buffer.pop(int(draw(len(buffer))) if draw else 0), noise(self.augment)


class Sized(Stream):
    def __len__(self) -> int:
        return self.size


class Stateful(Stream):
    """Its state is lossy when it draws: it forgets the buffer."""

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Sharded(Stream):
    """Cuts uneven parts of itself."""

    shard_spec = (1, 0)

    def shard(self, num_shards: int, index: int) -> Sharded:
        shard = Sharded(self.kind, self.size, self.augment)
        shard.shard_spec = (num_shards, index)
        return shard

    def elements(self) -> list[int]:
        num_shards, index = self.shard_spec
        # not asked for a part: split over workers, as torch wants it
        if num_shards == 1:
            return super().elements()
        cuts = [0] + [
            max(shard_index + 1, self.size * (shard_index + 1) ** 2 // num_shards**2)
            for shard_index in range(num_shards)
        ]
        return list(range(cuts[index], min(cuts[index + 1], self.size)))


class PartStream(Stream):
    """This rank's part of a stream."""

    def __init__(
        self, kind: str, size: int, augment: bool, rank_and_size: tuple[int, int]
    ) -> None:
        super().__init__(kind, size, augment)
        self.place = rank_and_size

    def elements(self) -> list[int]:
        # of this worker: workers draw other numbers, in plain torch too
        order = super().elements()
        if "shuffled" in self.kind:
            random.shuffle(order)
        return order[self.place[0] :: self.place[1]]


class PartSampler(Sampler[int]):
    """Shuffles, and yields this rank's indices."""

    def __init__(self, size: int, rank_and_size: tuple[int, int]) -> None:
        self.size, self.place = size, rank_and_size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist()[self.place[0] :: self.place[1]])

    def __len__(self) -> int:
        return len(range(self.place[0], self.size, self.place[1]))


class PartBatches(Batches):
    """Batches of growing size of this rank's indices."""

    def __init__(self, size: int, rank_and_size: tuple[int, int]) -> None:
        super().__init__(size, False)
        self.place = rank_and_size

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(self.size).tolist()[
            self.place[0] :: self.place[1]
        ]
        rows = 1
        while order:
            yield order[:rows]
            order, rows = order[rows:], rows % 5 + 1

    def __len__(self) -> int:
        left = len(range(self.place[0], self.size, self.place[1]))
        number = 0
        while left > 0:
            left -= number % 5 + 1
            number += 1
        return number


def part_loader(
    case: Case, rank_and_size: tuple[int, int], options: dict[str, Any]
) -> DataLoader[Any]:
    """A loader of the part of rank `rank_and_size[0]` of `rank_and_size[1]`."""
    options = {
        "batch_size": case.batch,
        "drop_last": bool(case.batch) and case.drop_last,
        **options,
    }
    items = Items(case.size, case.augment)
    rows = datasets.Dataset.from_dict({"x": list(range(case.size))})
    if case.data == "hub shard":
        return DataLoader(
            rows.shard(rank_and_size[1], rank_and_size[0]), shuffle=True, **options
        )
    if case.data == "hub split":
        stream = split_dataset_by_node(
            rows.to_iterable_dataset(min(case.size, 1 + case.seed % 9)), *rank_and_size
        )
        return DataLoader(
            stream.map(lambda row: {"noise": noise(case.augment)}), **options
        )
    if "stream" in case.data:
        return DataLoader(
            PartStream(case.data, case.size, case.augment, rank_and_size), **options
        )
    if case.data == "part of a list":
        return DataLoader(
            Subset(items, range(rank_and_size[0], case.size, rank_and_size[1])),
            shuffle=True,
            **options,
        )
    if case.data == "part sampler":
        return DataLoader(
            items, sampler=PartSampler(case.size, rank_and_size), **options
        )
    del options["batch_size"], options["drop_last"]
    return DataLoader(
        items, batch_sampler=PartBatches(case.size, rank_and_size), **options
    )


def hub_stream(case: Case) -> Any:
    shards = min(case.size, 1 + case.seed % 9)
    stream = datasets.Dataset.from_dict(
        {"x": list(range(case.size))}
    ).to_iterable_dataset(num_shards=shards)
    if case.data == "hub shuffled":
        stream = stream.shuffle(seed=case.seed, buffer_size=1 + case.seed % 11)
    if case.data == "hub interleaved":
        extra_rows = datasets.Dataset.from_dict(
            {"x": list(range(1000, 1000 + case.size))}
        ).to_iterable_dataset(shards)
        stream = datasets.concatenate_datasets([stream, extra_rows]).shuffle(
            seed=1, buffer_size=5
        )
    if case.data == "hub mapped":
        stream = stream.map(lambda row: {"x": row["x"] + 500}, batched=False).filter(
            lambda row: row["x"] % 7 != 3
        )
    return stream.map(lambda row: {"noise": noise(case.augment)})


def plain_samples(case: Case) -> list[int] | None:
    """What plain torch reads in one epoch, sorted; None where it draws with replacement."""
    if case.data == "weighted":
        return None
    if case.data in HUB:
        return sorted(row["x"] for row in hub_stream(case))
    return sorted(range(0, case.size, 2) if case.data == "subset" else range(case.size))


def collate(samples: Any) -> dict[str, Tensor]:
    """Time-major first, so that rows cannot be read off the first tensor."""
    rows = samples if isinstance(samples, list) else [samples]
    pairs = [
        (row["x"], row.get("noise", 0.0)) if isinstance(row, dict) else row
        for row in rows
    ]
    ids = torch.tensor([pair[0] for pair in pairs])
    return {
        "time": torch.zeros(3, len(pairs)),
        "x": ids,
        "noise": torch.tensor([pair[1] for pair in pairs], dtype=torch.float64)
        + random.random(),
    }


def user_loader(case: Case, rank_and_size: tuple[int, int] = (0, 1)) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": case.workers, "collate_fn": collate}
    if case.workers:
        options |= {
            "multiprocessing_context": "fork",
            "persistent_workers": case.persistent,
        }
    if case.data in SPLIT_DATA:
        return part_loader(case, rank_and_size, options)
    if case.data in HUB:
        return DataLoader(
            hub_stream(case),
            batch_size=case.batch,
            drop_last=bool(case.batch) and case.drop_last,
            **options,
        )
    kinds = {
        "sized": Sized,
        "stateful": Stateful,
        "stateful draws": Stateful,
        "sharded": Sharded,
    }
    if case.data in STREAMS:
        stream = kinds.get(case.data, Stream)(case.data, case.size, case.augment)
        return DataLoader(
            stream,
            batch_size=case.batch,
            drop_last=bool(case.batch) and case.drop_last,
            **options,
        )
    items = Items(case.size, case.augment)
    if "batch sampler" in case.data:
        return DataLoader(
            items, batch_sampler=Batches(case.size, "own" in case.data), **options
        )
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler([1.0] * case.size, case.size),
        "subset": SubsetRandomSampler(range(0, case.size, 2)),
    }
    if case.data in (
        "own numpy",
        "own python",
        "own torch",
        "counts epochs",
        "shuffles in place",
    ):
        options["sampler"] = Drawn(case.data, case.size)
    elif case.data in samplers:
        options["sampler"] = samplers[case.data]
    else:
        options["shuffle"] = case.data != "in order"
    if case.data == "generator":
        options["generator"] = torch.Generator().manual_seed(9)
    return DataLoader(
        items,
        batch_size=case.batch,
        drop_last=bool(case.batch) and case.drop_last,
        **options,
    )


# -- runs -----------------------------------------------------------------------------------------------------------
Step = tuple[int, list[int], list[float], int, bool, bool, tuple[float, ...]]
"""(epoch, ids, noise, real rows, last, update, what the training drew)."""


def run(
    ctx: ProcessContext, case: Case, folder: Path, stop: int | None, resume: bool
) -> list[Step] | str:
    """Two epochs, or their part before or after the stop, as one rank sees them; or why it was refused."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + ctx.rank if not resume else 999)
    config = DataLoaderConfiguration(
        split_batches=case.mode == "split",
        dispatch_batches=case.mode == "dispatch",
        even_batches=case.even,
        prefetch=case.prefetch,
        use_seedable_sampler=case.data not in ("torch's permutation", "generator"),
        data_seed=None if case.data == "generator" else 31,
        already_sharded=True if case.flagged else None,
    )
    accelerator = Accelerator(
        context=ctx, dataloader_config=config, gradient_accumulation_steps=case.every
    )
    steps: list[Step] = []
    loader: Any = None
    batch = None
    try:
        loader = accelerator.prepare(user_loader(case, (ctx.rank, ctx.world.size)))
        if resume:
            accelerator.load_state(folder)
        while loader.epoch < 2:
            for batch in loader:
                with accelerator.accumulate():
                    update = accelerator.sync_gradients
                steps.append(seen(accelerator, loader, batch, update, case.even))
                if len(steps) == stop and (case.seed % 2 or not loader.cursor.at_end):
                    accelerator.save_state(folder)
                    return steps
            if stop is not None and len(steps) >= stop:
                accelerator.save_state(folder)
                return steps
    except DataError as error:
        return str(error)
    finally:
        loader = batch = None
        accelerator.free_memory()  # ends lasting workers
    return steps


Runs = tuple[list[Step] | str, int, list[Step] | str, list[Step] | str]
"""(uninterrupted, where the other one stops, up to there, from there on)."""


def runs(ctx: ProcessContext, case: Case, folder: Path) -> Runs:
    """The uninterrupted run, the one that stops, and, on as many ranks, the one that goes on."""
    uninterrupted = run(ctx, case, folder, None, False)
    if isinstance(uninterrupted, str):
        return uninterrupted, 0, [], []
    lengths = ctx.world.all_gather_object(
        (len(uninterrupted), sum(step[0] == 0 for step in uninterrupted))
    )
    stop = stop_of(case, lengths)
    if stop == 0:
        return uninterrupted, 0, [], []
    first = run(ctx, case, folder, stop, False)
    return (
        uninterrupted,
        stop,
        first,
        run(ctx, case, folder, None, True) if case.new_world == case.world else [],
    )


def seen(
    accelerator: Accelerator,
    loader: Any,
    batch: dict[str, Tensor],
    update: bool,
    even: bool,
) -> Step:
    ids, cursor = batch["x"], loader.cursor
    real = len(ids) if cursor.num_real is None else cursor.num_real
    if even:  # every rank has a batch
        gathered = accelerator.gather_for_metrics(batch["x"])
        flat = accelerator.gather_for_metrics(batch["x"].repeat_interleave(3))
        assert torch.equal(flat, gathered.repeat_interleave(3)), (
            "flattened outputs are cut alike"
        )
        everyone = accelerator.gather_object([ids[:real].tolist()])
        assert gathered.tolist() == [
            sample_id for rank_ids in everyone for sample_id in rank_ids
        ], "padding is counted or samples are lost"
        time_major(accelerator, ids, gathered)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    return (
        loader.epoch,
        ids.tolist(),
        batch["noise"].tolist(),
        real,
        cursor.at_end,
        update,
        drawn,
    )


def time_major(accelerator: Accelerator, ids: Tensor, gathered: Tensor) -> None:
    """Results of (time, samples): right with `dim=1`; without it right, refused, or reported as ambiguous."""
    for steps in {
        3,
        accelerator.gather_object([len(ids)])[-1],
    }:  # as many as there are samples on the rank that is padded
        cells = ids.repeat(steps, 1)
        assert torch.equal(
            accelerator.gather_for_metrics(cells, dim=1), gathered.repeat(steps, 1)
        ), "cut along time"
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            try:
                unnamed = accelerator.gather_for_metrics(cells).flatten().tolist()
            except (DataError, MismatchError):
                continue
        ambiguous = any(
            accelerator.gather_object(
                [
                    any(
                        "Pass dim=0 or dim=1" in str(caught.message)
                        for caught in caught_warnings
                    )
                ]
            )
        )
        assert ambiguous or sorted(unnamed) == sorted(gathered.tolist() * steps), (
            "silently wrong"
        )


def real_ids(ranks: list[list[Step]], epoch: int) -> list[int]:
    """The samples of an epoch that are not padding, over all ranks."""
    return [
        sample_id
        for steps in ranks
        for step in steps
        if step[0] == epoch
        for sample_id in step[1][: step[3]]
    ]


def in_global_order(ranks: list[list[Step]], epoch: int) -> list[int]:
    """The same, step after step: the order the ranks read together."""
    columns = [[step for step in steps if step[0] == epoch] for steps in ranks]
    longest = max(map(len, columns))
    return [
        sample_id
        for step_index in range(longest)
        for steps in columns
        if step_index < len(steps)
        for sample_id in steps[step_index][1][: steps[step_index][3]]
    ]


def window_start(steps: list[Step], stop: int) -> int:
    """Return the beginning of the window in which a run was saved after `stop` steps: a resume repeats from there."""
    return max(
        (number for number in range(1, stop + 1) if steps[number - 1][5]), default=0
    )


def check(case: Case, pool: Pool) -> str:
    """Compare with plain torch, and the interrupted run with the uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        done = pool.run(runs, case.world, case, Path(folder), timeout_s=PATIENCE_S)
        uninterrupted: list[Any] = [outcome[0] for outcome in done]
        first: list[Any] = [outcome[2] for outcome in done]
        resumed: list[Any] = [outcome[3] for outcome in done]
        stop = done[0][1]
        if case.is_unsaid or any(isinstance(steps, str) for steps in uninterrupted):
            reasons = (
                ("already_sharded=True",)
                if case.is_unsaid
                else ("has no sample", "cannot be split over")
            )
            return refused_by_all(uninterrupted, reasons)
        for epoch in (0, 1):
            compare_with_torch(case, real_ids(uninterrupted, epoch))
        if stop == 0:
            return "too short to stop"
        assert first == [steps[:stop] for steps in uninterrupted], (
            "two runs of one program differ"
        )
        if case.new_world != case.world:
            resumed = pool.run(
                run,
                case.new_world,
                case,
                Path(folder),
                None,
                True,
                timeout_s=PATIENCE_S,
            )
    start = window_start(uninterrupted[0], stop)
    first = [steps[:start] for steps in first]
    inside = start > 0 and (
        not uninterrupted[0][start - 1][4] or case.seed % 2 == 1
    )  # odd ones: with an epoch's last batch in hand
    unsaid = replace(case, world=case.new_world).is_unsaid
    if unsaid or (inside and case.refused):
        return refused_by_all(
            resumed, ("Resume on", *["already_sharded=True"] * unsaid)
        )
    assert not any(isinstance(steps, str) for steps in resumed), f"refused: {resumed}"
    if case.new_world == case.world:
        for rank, (resumed_steps, steps) in enumerate(
            zip(resumed, uninterrupted, strict=True)
        ):
            assert resumed_steps == steps[start:], (
                f"rank {rank} after {start} steps:\n{resumed_steps}\ninstead of\n{steps[start:]}"
            )
        return "exact"
    expected = uninterrupted
    # parts of the dataset's own fit one number of ranks: an epoch that begins there has its order
    if case.refused:
        expected = pool.run(
            run, case.new_world, case, Path(folder), None, False, timeout_s=PATIENCE_S
        )
    for epoch in (0, 1):
        compare_with_torch(case, real_ids(first, epoch) + real_ids(resumed, epoch))
        if not case.workers and not case.drop_last:
            first_order = in_global_order(first, epoch)
            joined_order = first_order + in_global_order(resumed, epoch)
            expected_order = in_global_order(
                uninterrupted if first_order else expected, epoch
            )
            assert joined_order == expected_order, (
                f"epoch {epoch} goes on in another order: {joined_order}"
            )
    return "each sample once on another world"


def refused_by_all(ranks: list[Any], reasons: tuple[str, ...]) -> str:
    assert all(isinstance(rank_steps, str) for rank_steps in ranks), (
        f"refused on some ranks only, or not at all: {ranks}"
    )
    assert any(reason in rank_steps for rank_steps in ranks for reason in reasons), (
        ranks
    )
    return "refused"


def compare_with_torch(case: Case, ids: list[int]) -> None:
    plain = plain_samples(case)
    if plain is None:
        assert len(ids) == case.size or (case.drop_last and len(ids) < case.size), (
            f"{len(ids)} draws"
        )
    elif case.drop_last and case.batch:
        assert len(set(ids) & set(plain)) == len(ids), (
            f"repeated or unknown: {sorted(ids)}"
        )
    else:
        assert sorted(ids) == plain, f"{sorted(ids)} instead of {plain}"


def stop_of(case: Case, lengths: list[tuple[int, int]]) -> int:
    """After how many steps to stop: anywhere, or where all ranks still have batches when they end alone.

    `lengths` are the steps of each rank, of the whole run and of its first epoch.
    """
    if case.even:
        return min(int(case.stop * lengths[0][0]) + 1, lengths[0][0])
    shortest = min(length for _, length in lengths)
    return min(int(case.stop * shortest), shortest - 1) if shortest > 1 else 0


# -- the table in docs/checkpoints.md ---------------------------------------------------------------------------------
DOCS: Final = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN: Final = "<!-- written by tests/laws/test_data_laws.py -->\n"
END: Final = "<!-- end -->\n"


def table() -> str:
    """What resumes how: the verdicts that `check` holds every case to."""
    lines = ["| data | on as many processes | on another number |", "|---|---|---|"]
    for kind, words in {**ORDERS, **STREAMS, **HUB, **SPLIT_DATA}.items():
        case = replace(
            draw(0),
            data=kind,
            mode="shard",
            batch=2,
            size=40,
            world=2,
            new_world=3,
            seed=8,
        )
        once = "each draw once" if kind == "weighted" else "each sample once"
        verdict = "refused inside an epoch"
        if kind not in SPLIT_DATA:
            verdict += "; with `dispatch_batches=True` each sample once"
        lines.append(f"| {words} | exact | {verdict if case.refused else once} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_what_resumes_is_current() -> None:
    text = DOCS.read_text()
    assert text.split(BEGIN)[1].split(END)[0] == table(), (
        "run: python tests/laws/test_data_laws.py --table"
    )


def test_a_seed_draws_one_case() -> None:
    assert draw(17) == draw(17)
    assert {draw(seed).data for seed in range(500)} == {
        *ORDERS,
        *STREAMS,
        *HUB,
        *SPLIT_DATA,
    }, "every kind is drawn"


def law(pool: Pool) -> Law[Case]:
    return Law(draw, lambda case: check(case, pool))


def test_random_loaders_resume_exactly_or_are_refused(rank_pool: Pool) -> None:
    tally = law(rank_pool).search(range(10_000), seconds=6)
    assert tally.verdicts["exact"], str(tally)


ONCE_BROKEN: Final = (
    131,
    271,
    724,
    2114,
    2134,
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (311, 3377)),
)


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_what_the_search_found_stays_mended(rank_pool: Pool, seed: int) -> None:
    assert check(draw(seed), rank_pool) in (
        "exact",
        "each sample once on another world",
    )


def test_a_batch_too_small_to_split_is_refused_by_every_rank(rank_pool: Pool) -> None:
    """One rank alone raised once, and the others waited for it."""
    assert check(draw(10_190), rank_pool) == "refused"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this case alone")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--table", action="store_true", help="write the table into docs/checkpoints.md"
    )
    args = parser.parse_args()
    if args.table:
        page_start, page_rest = DOCS.read_text().split(BEGIN)
        DOCS.write_text(page_start + BEGIN + table() + END + page_rest.split(END)[1])
        sys.exit()
    seeds = (
        range(args.start, args.start + args.cases) if args.seed is None else [args.seed]
    )
    with Pool() as workers:
        tally = law(workers).search(seeds, tell=sys.stderr.write)
    sys.stdout.write(f"{tally}\n")
    sys.exit(bool(tally.broken))
