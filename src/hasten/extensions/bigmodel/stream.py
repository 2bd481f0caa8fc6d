"""Streaming of offloaded weights: while one block computes, the next ones are copied to the device.

A block's weights are in host memory or in files. Before its forward they are copied into one buffer on the device, on a
separate stream, and the block's parameters are replaced by views of that buffer; afterwards the resting parameters are
restored. The buffer is allocated once and holds a few blocks. A copy waits for the computations that were queued before it, and a block for
its copy, so the host never waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.extensions.bigmodel.packs import Pack
from hasten.extensions.bigmodel.staging import BlockOrder, Ring, Span, spread_residents
from hasten.extensions.bigmodel.units import (
    Unit,
    largest_window_bytes,
    put_loose,
    refresh_weight_lists,
)
from hasten.runtime.host_pool import HostPool
from hasten.runtime.streams import HostLanes, Mark, lanes_for

BLOCKS_AT_ONCE = 3
"""Number of blocks in the buffer: the computing one, the next one, and one more to smooth out uneven times."""
# number of units considered when fetching ahead; some of them may be resident
_LOOK_AHEAD = 8
_LAST_UNPACKED = 2  # packs that backward has unpacked last and may be about to use


@dataclass(slots=True, eq=False)
class _PackState:
    """Current location and status of a pack."""

    users: int = 0
    home: Tensor | None = None
    """Dedicated memory, for packs that stay on the device."""
    span: Span | None = None
    coming: Future[Mark] | None = None
    """The read of a file or of pageable memory that has to end before the copy is queued."""
    ready: Mark = None
    stamp: tuple[int, ...] = ()
    """Versions of the weights on the device; empty if they are not there."""


class Streamer:
    """Manager that copies the packs of units to a device ahead of their use, and evicts them afterwards."""

    def __init__(
        self,
        device: torch.device,
        units: Sequence[Unit],
        resident_bytes: int = 0,
        blocks_at_once: int = BLOCKS_AT_ONCE,
        lanes: HostLanes | None = None,
    ) -> None:
        """Keep `resident_bytes` of weights on the device; the buffer for the others is allocated in addition.

        `lanes` default to those of the device.
        """
        self.device = device
        self.units = list(units)
        self._lock = threading.RLock()
        self._lanes = lanes or lanes_for(device)
        self._packs = list(dict.fromkeys(pack for unit in units for pack in unit.packs))
        self._states: dict[Pack, _PackState] = {
            pack: _PackState() for pack in self._packs
        }
        self._unpacked: list[Pack] = []
        self._order = BlockOrder(len(self.units))
        self._thread: ThreadPoolExecutor | None = None
        self._keep_some(resident_bytes)
        streamed_packs = [
            pack for pack in self._packs if self._states[pack].home is None
        ]
        self._ring = Ring(
            largest_window_bytes(self.units, streamed_packs, blocks_at_once)
        )
        self._arena = self._allocate_memory(self._ring.capacity)
        self._staging_buffers: list[StagingBuffer] = []
        self._storages = {self._arena.untyped_storage().data_ptr()}
        for pack_state in self._states.values():
            if pack_state.home is not None:
                self._storages.add(pack_state.home.untyped_storage().data_ptr())
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Device memory held for weights."""
        home_sizes = []
        for pack_state in self._states.values():
            if pack_state.home is not None:
                home_sizes.append(pack_state.home.numel())
        return self._arena.numel() + sum(home_sizes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that are streamed."""
        return sum(
            entry.num_bytes
            for pack in self._packs
            for entry in (*pack.entries, *pack.loose)
        )

    def _keep_some(self, budget: int) -> None:
        outer_packs = []
        for unit in self.units:
            if unit.resident:
                outer_packs += unit.packs
        for pack in outer_packs:
            self._give_home(pack)
        unplaced_packs = [
            pack for pack in self._packs if self._states[pack].home is None
        ]
        for index in spread_residents(
            [pack.num_bytes for pack in unplaced_packs], budget
        ):
            self._give_home(unplaced_packs[index])

    def _give_home(self, pack: Pack) -> Tensor:
        """Return dedicated memory for the pack."""
        pack_state = self._states[pack]
        if pack_state.home is None:
            pack_state.home = self._allocate_memory(pack.num_bytes)
            pack.views.clear()
        return pack_state.home

    def _allocate_memory(self, num_bytes: int) -> Tensor:
        """Allocate memory for weights on the device."""
        with torch.inference_mode(False):
            return self._lanes.empty(num_bytes, outlives_copies=True)

    # ---------------------------------------------------------------------------------------------- use and release
    def acquire_unit(self, index: int) -> None:
        """Make the weights of a unit available, and start to fetch those of the next ones."""
        unit = self.units[index]
        self._lock.acquire()
        entered_packs: list[Pack] = []
        try:
            if self._closed:
                raise PrepareError(
                    f"{unit.name or type(unit.module).__name__} was called after its offloading was removed; dispatch the model again."
                )
            self._lanes.follow_current_stream()
            self._order.record_use(index)
            unit.move_others(self.device)
            for pack in unit.packs:
                self._states[pack].users += 1
                entered_packs.append(pack)
            for pack in unit.packs:
                self._demand_pack(pack)
            self._prefetch_packs(unit.packs)
            for pack in unit.packs:
                self._await_pack(pack)
                self._swap_in(pack)
            refresh_weight_lists(unit.recurrent)
        except BaseException:
            self._leave_unit(unit, entered_packs)
            raise

    def release_unit(self, index: int) -> None:
        """Restore the resting weights; the unit's memory may be overwritten once it has computed."""
        unit = self.units[index]
        self._leave_unit(unit, unit.packs)

    def _leave_unit(self, unit: Unit, entered_packs: Sequence[Pack]) -> None:
        try:
            for pack in entered_packs:
                pack_state = self._states[pack]
                pack_state.users -= 1
                if pack_state.users == 0:
                    for entry in (*pack.entries, *pack.loose):
                        entry.replace_in_model(entry.resting_tensor)
            refresh_weight_lists(unit.recurrent)
        finally:
            self._lock.release()

    def _swap_in(self, pack: Pack) -> None:
        pack_state = self._states[pack]
        for entry, view in zip(
            pack.entries, self._make_views(pack, pack_state), strict=True
        ):
            entry.replace_in_model(view)
        for entry in pack.loose:
            put_loose(entry, self.device)

    def _make_views(self, pack: Pack, pack_state: _PackState) -> list[Tensor]:
        if pack_state.home is not None:
            return pack.views_at(pack_state.home, 0)
        assert pack_state.span is not None, "the pack is on the device"
        return pack.views_at(self._arena, pack_state.span.start)

    # ---------------------------------------------------------------------------------------------------- fetching
    def _demand_pack(self, pack: Pack) -> None:
        """Ensure that the pack is on the device or being copied, evicting others if necessary."""
        pack_state = self._states[pack]
        if self._is_current(pack, pack_state):
            return
        _finish_read(pack_state)
        if (
            pack_state.home is None
            and pack_state.span is None
            and not self._take_span(pack, self._fixed_packs(()))
        ):
            # nested units that the buffer cannot hold together
            home_memory = self._give_home(pack)
            self._storages.add(home_memory.untyped_storage().data_ptr())
        self._fetch_pack(pack, pack_state)

    def _prefetch_packs(self, using: Sequence[Pack]) -> None:
        """Fetch the next packs while there is space that is not needed sooner."""
        sooner_packs: list[Pack] = list(using)
        for index in islice(self._order.expected_blocks(), _LOOK_AHEAD):
            for pack in self.units[index].packs:
                pack_state = self._states[pack]
                if pack in sooner_packs:
                    continue
                sooner_packs.append(pack)
                if self._is_current(pack, pack_state):
                    continue
                if pack_state.users:
                    return
                _finish_read(pack_state)
                if (
                    pack_state.home is None
                    and pack_state.span is None
                    and not self._take_span(pack, self._fixed_packs(sooner_packs))
                ):
                    return
                self._fetch_pack(pack, pack_state)

    def _is_current(self, pack: Pack, pack_state: _PackState) -> bool:
        """Return whether the copy on the device, or the one in progress, equals the pack's current weights."""
        return bool(pack_state.stamp) and pack_state.stamp == (
            0,
            *pack.weight_versions(),
        )

    def _fixed_packs(self, sooner_packs: Sequence[Pack]) -> set[Pack]:
        """Return the packs that must not be evicted."""
        used_packs = set()
        for pack, pack_state in self._states.items():
            if pack_state.span is not None and pack_state.users:
                used_packs.add(pack)
        return used_packs | set(self._unpacked) | set(sooner_packs)

    def _take_span(self, pack: Pack, fixed_packs: set[Pack]) -> bool:
        placed_span = self._ring.reserve_range(pack, pack.num_bytes, fixed_packs)
        if placed_span is None:
            return False
        self._states[pack].span, evicted_packs = placed_span
        for evicted_pack in evicted_packs:
            evicted_state = self._states[evicted_pack]  # type: ignore[index]  # keys of the ring are packs
            _finish_read(evicted_state)
            evicted_state.span = None
            evicted_state.stamp = ()
        return True

    def _fetch_pack(self, pack: Pack, pack_state: _PackState) -> None:
        """Queue the copy of a pack after the computations so far, which include all uses of the memory that it overwrites."""
        pack_state.stamp = (0, *pack.weight_versions())
        if pack_state.home is not None:
            target_memory = pack_state.home
        else:
            assert pack_state.span is not None, "the pack has a place"
            target_memory = self._arena[pack_state.span.start : pack_state.span.stop]
        if not pack.num_bytes:
            return
        computed_mark = self._lanes.mark()
        if pack.segments:
            copy_pairs = []
            for pack_offset, source in pack.segments:
                copy_pairs.append(
                    (target_memory[pack_offset : pack_offset + source.numel()], source)
                )
            pack_state.ready = self._lanes.fetch(copy_pairs, computed_mark)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hasten-stream")
        pack_state.coming = self._thread.submit(
            _read_in_thread,
            weakref.ref(self),
            pack,
            target_memory[: pack.num_bytes],
            computed_mark,
        )

    def read_pack(self, pack: Pack, target_memory: Tensor, computed_mark: Mark) -> Mark:
        """Fill a pack's memory on the device from files or pageable memory; runs on the fetching thread."""
        with torch.inference_mode(False), torch.no_grad():
            if target_memory.is_cpu:
                pack.read_into(target_memory)
                return None
            staging_buffer = self._next_staging_buffer()
            self._lanes.host_waits(staging_buffer.sent)
            staging_memory = staging_buffer.memory[: pack.num_bytes]
            pack.read_into(staging_memory)
            staging_buffer.sent = self._lanes.fetch(
                [(target_memory, staging_memory)], computed_mark
            )
            return staging_buffer.sent

    def _next_staging_buffer(self) -> StagingBuffer:
        """Return the buffer that was filled before the last one; both are allocated on first use."""
        if not self._staging_buffers:
            num_bytes = max(pack.num_bytes for pack in self._packs if not pack.segments)
            host_pool = HostPool(pinned=True)
            host_pool.reserve_bytes(2 * num_bytes)
            self._staging_buffers = [
                StagingBuffer(host_pool.cut_bytes(num_bytes)[2]) for _ in range(2)
            ]
        self._staging_buffers.reverse()
        return self._staging_buffers[0]

    def _await_pack(self, pack: Pack) -> None:
        """Make the device compute only after the pack's copy is complete."""
        pack_state = self._states[pack]
        if pack_state.coming is not None:
            pending_read = pack_state.coming
            pack_state.coming = None
            try:
                pack_state.ready = pending_read.result()
            except BaseException:
                pack_state.stamp = ()
                raise
        self._lanes.compute_waits(pack_state.ready)

    # ---------------------------------------------------------------------------------------------------- autograd
    def locate_tensor(self, tensor: Tensor) -> tuple[Pack, int] | None:
        """Return the pack in use that holds a tensor's memory, and the byte offset; None if there is none."""
        address = tensor.data_ptr()
        for pack, pack_state in self._states.items():
            base_address = None
            if pack_state.home is not None:
                base_address = pack_state.home.data_ptr()
            elif pack_state.span is not None:
                base_address = self._arena.data_ptr() + pack_state.span.start
            if (
                base_address is not None
                and pack_state.users
                and 0 <= address - base_address < max(pack.num_bytes, 1)
            ):
                return pack, address - base_address
        return None

    @contextmanager
    def looking_into(self, pack: Pack) -> Iterator[Tensor]:
        """Context manager that yields the bytes of a pack, copied to the device for use in backward."""
        with self._lock:
            pack_state = self._states[pack]
            self._lanes.follow_current_stream()
            self._unpacked = [
                *(
                    other_pack
                    for other_pack in self._unpacked
                    if other_pack is not pack
                ),
                pack,
            ][-_LAST_UNPACKED:]
            self._demand_pack(pack)
            self._await_pack(pack)
            if pack_state.home is not None:
                yield pack_state.home
            else:
                assert pack_state.span is not None, "the pack is on the device"
                yield self._arena[pack_state.span.start : pack_state.span.stop]

    def holds_tensor(self, tensor: Tensor) -> bool:
        """Return whether a tensor refers to memory that other weights will overwrite."""
        if (
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_meta
        ):
            return False
        return (
            tensor.device.type == self.device.type
            and tensor.untyped_storage().data_ptr() in self._storages
        )

    # -------------------------------------------------------------------------------------------------------- end
    def close(self) -> None:
        """Stop fetching and free the device memory; the resting weights stay in the model."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            for pack, pack_state in self._states.items():
                pack.views.clear()
                pack_state.home = None
                pack_state.span = None
                pack_state.stamp = ()
            self._ring = Ring(0)
            self._arena = torch.empty(0, dtype=torch.uint8, device=self.device)

    def __reduce__(self) -> NoReturn:
        raise PrepareError(
            "a model whose weights are streamed cannot be copied or pickled, because its buffers and streams belong to it and to this "
            "process. Copy it before it is dispatched, or remove the offloading first (remove_hook_from_submodules)."
        )


@dataclass(slots=True)
class StagingBuffer:
    """Host memory through which weights of files pass."""

    memory: Tensor
    sent: Mark = None
    """Mark of the last copy from it."""


def _finish_read(pack_state: _PackState) -> None:
    """Wait for a read into memory that is about to be reused; its failure no longer matters."""
    if pack_state.coming is not None:
        pack_state.coming.exception()
        pack_state.coming = None


def _read_in_thread(
    streamer: weakref.ref[Streamer],
    pack: Pack,
    target_memory: Tensor,
    computed_mark: Mark,
) -> Mark:
    """Run a read on the fetching thread, without keeping the streamer alive."""
    owner = streamer()
    return (
        None if owner is None else owner.read_pack(pack, target_memory, computed_mark)
    )
