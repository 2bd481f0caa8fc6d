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
from hasten.extensions.bigmodel.staging import BlockOrder, Ring, Span, spread
from hasten.extensions.bigmodel.units import Unit, put_loose, relist, window
from hasten.runtime.host_pool import HostPool
from hasten.runtime.streams import HostLanes, Mark, lanes_for

BLOCKS_AT_ONCE = 3
"""Number of blocks in the buffer: the computing one, the next one, and one more to smooth out uneven times."""
# number of units considered when fetching ahead; some of them may be resident
_LOOK_AHEAD = 8
_LAST_UNPACKED = 2  # packs that backward has unpacked last and may be about to use


@dataclass(slots=True, eq=False)
class _State:
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
        self._states: dict[Pack, _State] = {pack: _State() for pack in self._packs}
        self._unpacked: list[Pack] = []
        self._order = BlockOrder(len(self.units))
        self._thread: ThreadPoolExecutor | None = None
        self._keep_some(resident_bytes)
        streamed = [pack for pack in self._packs if self._states[pack].home is None]
        self._ring = Ring(window(self.units, streamed, blocks_at_once))
        self._arena = self._memory(self._ring.capacity)
        self._staging_buffers: list[StagingBuffer] = []
        self._storages = {self._arena.untyped_storage().data_ptr()}
        for state in self._states.values():
            if state.home is not None:
                self._storages.add(state.home.untyped_storage().data_ptr())
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Device memory held for weights."""
        homes = (
            state.home.numel()
            for state in self._states.values()
            if state.home is not None
        )
        return self._arena.numel() + sum(homes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that are streamed."""
        return sum(
            entry.num_bytes
            for pack in self._packs
            for entry in (*pack.entries, *pack.loose)
        )

    def _keep_some(self, budget: int) -> None:
        outer = [pack for unit in self.units if unit.resident for pack in unit.packs]
        for pack in outer:
            self._give_home(pack)
        rest = [pack for pack in self._packs if self._states[pack].home is None]
        for index in spread([pack.num_bytes for pack in rest], budget):
            self._give_home(rest[index])

    def _give_home(self, pack: Pack) -> Tensor:
        """Return dedicated memory for the pack."""
        state = self._states[pack]
        if state.home is None:
            state.home = self._memory(pack.num_bytes)
            pack.views.clear()
        return state.home

    def _memory(self, num_bytes: int) -> Tensor:
        """Allocate memory for weights on the device."""
        with torch.inference_mode(False):
            return self._lanes.empty(num_bytes, outlives_copies=True)

    # ---------------------------------------------------------------------------------------------- use and release
    def acquire(self, index: int) -> None:
        """Make the weights of a unit available, and start to fetch those of the next ones."""
        unit = self.units[index]
        self._lock.acquire()
        entered: list[Pack] = []
        try:
            if self._closed:
                raise PrepareError(
                    f"{unit.name or type(unit.module).__name__} was called after its offloading was removed; dispatch the model again."
                )
            self._lanes.follow_current_stream()
            self._order.saw(index)
            unit.move_others(self.device)
            for pack in unit.packs:
                self._states[pack].users += 1
                entered.append(pack)
            for pack in unit.packs:
                self._demand(pack)
            self._prefetch(unit.packs)
            for pack in unit.packs:
                self._await(pack)
                self._swap_in(pack)
            relist(unit.recurrent)
        except BaseException:
            self._leave(unit, entered)
            raise

    def release(self, index: int) -> None:
        """Restore the resting weights; the unit's memory may be overwritten once it has computed."""
        unit = self.units[index]
        self._leave(unit, unit.packs)

    def _leave(self, unit: Unit, entered: Sequence[Pack]) -> None:
        try:
            for pack in entered:
                state = self._states[pack]
                state.users -= 1
                if state.users == 0:
                    for entry in (*pack.entries, *pack.loose):
                        entry.put(entry.rest)
            relist(unit.recurrent)
        finally:
            self._lock.release()

    def _swap_in(self, pack: Pack) -> None:
        state = self._states[pack]
        for entry, view in zip(pack.entries, self._views(pack, state), strict=True):
            entry.put(view)
        for entry in pack.loose:
            put_loose(entry, self.device)

    def _views(self, pack: Pack, state: _State) -> list[Tensor]:
        if state.home is not None:
            return pack.views_at(state.home, 0)
        assert state.span is not None, "the pack is on the device"
        return pack.views_at(self._arena, state.span.start)

    # ---------------------------------------------------------------------------------------------------- fetching
    def _demand(self, pack: Pack) -> None:
        """Ensure that the pack is on the device or being copied, evicting others if necessary."""
        state = self._states[pack]
        if self._is_current(pack, state):
            return
        _end_read(state)
        if (
            state.home is None
            and state.span is None
            and not self._take_span(pack, self._fixed(()))
        ):
            # nested units that the buffer cannot hold together
            home = self._give_home(pack)
            self._storages.add(home.untyped_storage().data_ptr())
        self._fetch(pack, state)

    def _prefetch(self, using: Sequence[Pack]) -> None:
        """Fetch the next packs while there is space that is not needed sooner."""
        sooner: list[Pack] = list(using)
        for index in islice(self._order.ahead(), _LOOK_AHEAD):
            for pack in self.units[index].packs:
                state = self._states[pack]
                if pack in sooner:
                    continue
                sooner.append(pack)
                if self._is_current(pack, state):
                    continue
                if state.users:
                    return
                _end_read(state)
                if (
                    state.home is None
                    and state.span is None
                    and not self._take_span(pack, self._fixed(sooner))
                ):
                    return
                self._fetch(pack, state)

    def _is_current(self, pack: Pack, state: _State) -> bool:
        """Return whether the copy on the device, or the one in progress, equals the pack's current weights."""
        return bool(state.stamp) and state.stamp == (0, *pack.stamp())

    def _fixed(self, sooner: Sequence[Pack]) -> set[Pack]:
        """Return the packs that must not be evicted."""
        held = {
            pack
            for pack, state in self._states.items()
            if state.span is not None and state.users
        }
        return held | set(self._unpacked) | set(sooner)

    def _take_span(self, pack: Pack, fixed: set[Pack]) -> bool:
        found = self._ring.take(pack, pack.num_bytes, fixed)
        if found is None:
            return False
        self._states[pack].span, lost = found
        for other in lost:
            evicted = self._states[other]  # type: ignore[index]  # keys of the ring are packs
            _end_read(evicted)
            evicted.span, evicted.stamp = None, ()
        return True

    def _fetch(self, pack: Pack, state: _State) -> None:
        """Queue the copy of a pack after the computations so far, which include all uses of the memory that it overwrites."""
        state.stamp = (0, *pack.stamp())
        if state.home is not None:
            target = state.home
        else:
            assert state.span is not None, "the pack has a place"
            target = self._arena[state.span.start : state.span.stop]
        if not pack.num_bytes:
            return
        computed = self._lanes.mark()
        if pack.segments:
            pairs = [
                (target[at : at + source.numel()], source)
                for at, source in pack.segments
            ]
            state.ready = self._lanes.fetch(pairs, computed)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hasten-stream")
        state.coming = self._thread.submit(
            _read, weakref.ref(self), pack, target[: pack.num_bytes], computed
        )

    def read(self, pack: Pack, target: Tensor, computed: Mark) -> Mark:
        """Fill a pack's memory on the device from files or pageable memory; runs on the fetching thread."""
        with torch.inference_mode(False), torch.no_grad():
            if target.is_cpu:
                pack.read_into(target)
                return None
            buffer = self._next_staging_buffer()
            self._lanes.host_waits(buffer.sent)
            memory = buffer.memory[: pack.num_bytes]
            pack.read_into(memory)
            buffer.sent = self._lanes.fetch([(target, memory)], computed)
            return buffer.sent

    def _next_staging_buffer(self) -> StagingBuffer:
        """Return the buffer that was filled before the last one; both are allocated on first use."""
        if not self._staging_buffers:
            num_bytes = max(pack.num_bytes for pack in self._packs if not pack.segments)
            pool = HostPool(pinned=True)
            pool.reserve(2 * num_bytes)
            self._staging_buffers = [
                StagingBuffer(pool.cut(num_bytes)[2]) for _ in range(2)
            ]
        self._staging_buffers.reverse()
        return self._staging_buffers[0]

    def _await(self, pack: Pack) -> None:
        """Make the device compute only after the pack's copy is complete."""
        state = self._states[pack]
        if state.coming is not None:
            coming, state.coming = state.coming, None
            try:
                state.ready = coming.result()
            except BaseException:
                state.stamp = ()
                raise
        self._lanes.compute_waits(state.ready)

    # ---------------------------------------------------------------------------------------------------- autograd
    def locate(self, tensor: Tensor) -> tuple[Pack, int] | None:
        """Return the pack in use that holds a tensor's memory, and the byte offset; None if there is none."""
        address = tensor.data_ptr()
        for pack, state in self._states.items():
            base = None
            if state.home is not None:
                base = state.home.data_ptr()
            elif state.span is not None:
                base = self._arena.data_ptr() + state.span.start
            if (
                base is not None
                and state.users
                and 0 <= address - base < max(pack.num_bytes, 1)
            ):
                return pack, address - base
        return None

    @contextmanager
    def looking_into(self, pack: Pack) -> Iterator[Tensor]:
        """Context manager that yields the bytes of a pack, copied to the device for use in backward."""
        with self._lock:
            state = self._states[pack]
            self._lanes.follow_current_stream()
            self._unpacked = [
                *(other for other in self._unpacked if other is not pack),
                pack,
            ][-_LAST_UNPACKED:]
            self._demand(pack)
            self._await(pack)
            if state.home is not None:
                yield state.home
            else:
                assert state.span is not None, "the pack is on the device"
                yield self._arena[state.span.start : state.span.stop]

    def holds(self, tensor: Tensor) -> bool:
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
            for pack, state in self._states.items():
                pack.views.clear()
                state.home, state.span, state.stamp = None, None, ()
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


def _end_read(state: _State) -> None:
    """Wait for a read into memory that is about to be reused; its failure no longer matters."""
    if state.coming is not None:
        state.coming.exception()
        state.coming = None


def _read(
    streamer: weakref.ref[Streamer], pack: Pack, target: Tensor, computed: Mark
) -> Mark:
    """Run a read on the fetching thread, without keeping the streamer alive."""
    owner = streamer()
    return None if owner is None else owner.read(pack, target, computed)
