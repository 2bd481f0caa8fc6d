"""Data loading: splitting samples over ranks, shuffling, prefetching, and resuming from a position.

Start with `batch_plan.py` (the split, as pure functions) and `loader.py` (the prepared loader); `build.py` makes a prepared loader from the
user's. `source.py` reads map-style data, `stream.py` and `stream_shard.py` streams, `dispatch.py` on one rank for all. `build.py` (`_choose_move`) chooses how batches reach the
device: `prefetch.py` (`Prefetch`), a plain copy with `prefetch=0`, or the strategy's transfer; the copy itself is `trees.to_device`.
A resumed loader finds its next sample in `sampler.py` (`Assignment.index_batches`: this rank's next indices, from a position and the order of `order.py`),
for streams in `stream_shard.py` (`_Cutter._seek`); `position.py` is what is saved, with random states (`random_states.py`) and the state of the
user's samplers and streams (`carried_state.py`). `rank_check.py` refuses ranks with different data.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.extensions.packing.packing import (
        PackedBatchSampler as PackedBatchSampler,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.packing.packing import PackedCollator as PackedCollator  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.packing.packing import num_label_tokens as num_label_tokens  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.packing.packing import (
        packed_attention_mask as packed_attention_mask,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.packing.packing import packed_block_mask as packed_block_mask  # type: ignore[import-not-found, unused-ignore]

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str]({})

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC, extensible=True)
