"""Preparing loaders: the established names, and how a plain DataLoader becomes one that reads its share."""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.environment.packages import is_datasets_available
from accelerate._impl.loaders.base import (
    DataLoaderDispatcher,
    DataLoaderShard,
    PreparedLoader,
    SkipDataLoader,
)
from accelerate._impl.loaders.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_split,
    get_sampler,
    innermost_sampler,
)
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import like, shown_property
from accelerate._impl.views.logging import get_logger
from accelerate._impl.views.state import PartialState
from hasten.data import skipping as own
from hasten.errors import DataError
from hasten.runtime.mesh_plan import Axis

logger = get_logger("accelerate.data_loader")
rank_check = Deferred("hasten.data.rank_check")
# Any in this file: batches, datasets and samplers are the user's own.
_KEPT: Final = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor persistent_workers pin_memory_device in_order"


def _reader_index(mesh: Any, size: int | None, index: int | None) -> tuple[int, int]:
    process_state = PartialState()
    readers, reader = (
        (process_state.num_processes, process_state.process_index)
        if mesh is None
        else _readers_of(mesh)
    )
    return readers if size is None else size, reader if index is None else index


def _readers_of(mesh: Any) -> tuple[int, int]:
    """Return the number of ranks with different samples in torch's mesh, and this rank's index: not along `tp` and `cp`."""
    dim_names = mesh.mesh_dim_names or ("",) * mesh.ndim
    dims = [
        dim
        for dim, dim_name in enumerate(dim_names)
        if dim_name not in (Axis.TP, Axis.CP)
    ]
    sizes = list(map(mesh.size, dims))
    positions = list(map(mesh.get_local_rank, dims))
    return math.prod(sizes), sum(
        position * math.prod(sizes[index + 1 :])
        for index, position in enumerate(positions)
    )


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Return the loader, reading this process's share. Ranks: every rank."""
    if dispatch_batches is None:  # quirk: STREAMS_ARE_DISPATCHED
        dispatch_batches = put_on_device and isinstance(
            dataloader.dataset, IterableDataset
        )
    if dispatch_batches and not put_on_device:
        raise ValueError("Using `dispatch_batches=True` requires `put_on_device=True`.")
    num_readers, reader_index = _reader_index(
        torch_device_mesh, num_processes, process_index
    )
    share_options = (
        split_batches,
        even_batches,
        bool(dispatch_batches),
        use_stateful_dataloader,
        use_seedable_sampler,
    )
    share = Share(dataloader, num_readers, reader_index, *share_options)
    share.compare_with_other_ranks()
    order = share.order(data_seed)
    return share.loader(
        order,
        device if put_on_device else None,
        rng_types,
        slice_fn_for_dispatch,
        non_blocking,
    )


@like(own.skip_first_batches)
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
    skipping_loader: Any = own.skip_first_batches(dataloader, num_batches)
    # hasten's classes, under the names of the original's
    if type(skipping_loader) is own.SkippingLoader:
        skipping_loader, loader_state = (
            SkipDataLoader.__new__(SkipDataLoader),
            vars(skipping_loader),
        )
        skipping_loader.__dict__.update(loader_state)
    elif type(skipping_loader.batch_sampler) is own.SkippedBatches:
        skipping_loader.batch_sampler.__class__ = SkipBatchSampler
    return skipping_loader


@dataclass(frozen=True, slots=True)
class Share:
    plain: DataLoader[Any]
    size: int
    index: int
    split: bool
    even: bool
    dispatch: bool
    stateful: bool
    seedable: bool

    def __post_init__(self) -> None:
        batches = self.plain.batch_sampler
        batch_size = self.plain.batch_size or getattr(batches, "batch_size", None)
        if self.split and not batch_size:
            raise ValueError(
                message("no_batch_size", self.plain.batch_size, type(batches))
            )
        if self.split:
            check_split("a `DataLoader`", batch_size, self.size)

    stream = shown_property(
        lambda self: isinstance(self.plain.dataset, IterableDataset),
        "Whether the dataset is a stream.",
    )

    def compare_with_other_ranks(self) -> None:
        """Raise an error if notebook processes, which each read a part, have different data. Ranks: every rank."""
        if not AMBIENT.compares_data or self.dispatch:
            return
        world = ambient.start().world
        if world.size == 1:
            return
        try:
            rank_check.agree_on_loader(
                self.plain, {}, None, 0, world, reads_samples=True
            )
        except DataError as error:
            raise DataError(message("data_of_ranks_differs", world.size)) from error

    def order(self, data_seed: int | None) -> tuple[Any, Any]:
        """Return the sampler of the plain loader and the batches made of it; when seedable, a random one depends on seed and epoch."""
        sampler: Any = get_sampler(self.plain)
        batches: Any = self.plain.batch_sampler
        if (
            not self.seedable
            or not isinstance(sampler, RandomSampler)
            or type(sampler) is SeedableRandomSampler
        ):
            return sampler, batches
        generator = sampler.generator or torch.Generator(
            device=torch.get_default_device()
        )
        drawn = (
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,
            generator,
        )
        sampler = SeedableRandomSampler(*drawn, data_seed=data_seed)
        if batches is not None:
            batches = copy.copy(batches)
            batches.sampler = sampler
        return sampler, batches

    def _shared_generator(self, sampler: Any) -> torch.Generator | None:
        """Return the generator that orders the loader, made where ranks would draw differently."""
        # quirk: SHUFFLE_FOLLOWS_TORCH
        drawn: Any = self.plain.dataset if self.stream else innermost_sampler(sampler)
        # None: one that draws from torch's generator
        generator = getattr(drawn, "generator", False)
        needed = isinstance(drawn, RandomSampler) or not (self.seedable or self.stream)
        if (
            generator is None
            and needed
            and (max(self.size, ambient.start().world.size) > 1 or self.stateful)
        ):
            generator = drawn.generator = torch.Generator(
                device=torch.get_default_device()
            )
            generator.manual_seed(
                int(torch.empty((), dtype=torch.int64).random_().item())
            )
        if isinstance(generator, torch.Generator):
            return generator
        return None

    def loader(
        self,
        order: tuple[Any, Any],
        device: Any,
        rng_types: Any,
        slice_fn: Any,
        non_blocking: bool,
    ) -> PreparedLoader:
        # the main process alone draws the order of batches that it hands out
        if self.dispatch:
            generator = None
        else:
            generator = self._shared_generator(order[0])
        dataset, batches = self._cut_dataset(order[1])
        kwargs = {
            **self._loader_arguments(order[0], batches),
            "_non_blocking": non_blocking,
        }
        is_single_process = self.size == ambient.start().world.size == 1
        if is_single_process or isinstance(order[0], SeedableRandomSampler):
            equalised = None
        else:
            equalised = generator
        if self.dispatch:
            # seeds of workers come from torch's own then, on every process alike
            kwargs.pop("generator", None)
            prepared: PreparedLoader = DataLoaderDispatcher(
                dataset, slice_fn=slice_fn, **kwargs
            )
        else:
            types = rng_types and [
                rng_type
                for rng_type in rng_types
                if equalised is not None or str(rng_type) != "generator"
            ]
            prepared = DataLoaderShard(
                dataset, rng_types=types, synchronized_generator=equalised, **kwargs
            )
            prepared.order_generator = generator
            if (
                self.size > 1
                and getattr(innermost_sampler(order[0]), "generator", False) is None
            ):
                prepared.drawn_from_torch = innermost_sampler(order[0])
        prepared.device = device
        prepared.num_processes = self.size
        prepared.process_index = self.index
        prepared.split_batches = self.split
        prepared.even_batches = (
            self.even or self.dispatch or isinstance(dataset, IterableDatasetShard)
        )
        return prepared

    def _cut_dataset(self, batches: Any) -> tuple[Any, Any]:
        dataset: Any = self.plain.dataset
        if self.size == 1 or self.dispatch:
            return dataset, batches
        if not self.stream:
            # items without batches are shared as batches
            if batches is None:
                source_sampler = self.plain.sampler
            else:
                source_sampler = batches
            return dataset, BatchSamplerShard(
                source_sampler, self.size, self.index, self.split, self.even
            )
        sharded = is_datasets_available() and getattr(
            sys.modules.get("datasets"), "IterableDataset", None
        )
        if (
            sharded
            and isinstance(dataset, sharded)
            and not self.split
            and dataset.num_shards >= self.size
        ):
            return dataset.shard(num_shards=self.size, index=self.index), batches
        rows = self.plain.batch_size or 1
        drop_last = bool(self.plain.drop_last)
        return IterableDatasetShard(
            dataset, rows, drop_last, self.size, self.index, self.split
        ), batches

    def _loader_arguments(self, sampler: Any, batches: Any) -> dict[str, Any]:
        loader_options = {}
        for argument_name in _KEPT.split():
            if hasattr(self.plain, argument_name):
                loader_options[argument_name] = getattr(self.plain, argument_name)
        if not loader_options.get("num_workers"):
            loader_options.pop("prefetch_factor", None)
        loader_options |= self._batch_arguments(sampler, batches)
        return {
            **loader_options,
            "_drop_last": bool(self.plain.drop_last),
            "use_stateful_dataloader": self.stateful,
        }

    def _batch_arguments(self, sampler: Any, batches: Any) -> dict[str, Any]:
        """Return the prepared loader's arguments for batches, as torch's DataLoader takes them."""
        if self.stream:
            rows = self.plain.batch_size
            if rows is not None and self.split and not self.dispatch:
                rows //= self.size
            return {
                "batch_size": rows,
                "drop_last": bool(self.plain.drop_last) if rows is not None else False,
            }
        if self.plain.batch_sampler is not None:
            return {"batch_sampler": batches}
        if sampler is not None:
            plain_sampler = sampler
        else:
            plain_sampler = self.plain.sampler
        return {
            "sampler": batches
            if isinstance(batches, BatchSamplerShard)
            else plain_sampler,
            "batch_size": None,
        }
