"""Blocks that the page cache does not hold are read past it where this is faster, with the same bytes and the same errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hasten.bigmodel import load as bigmodel_load
from hasten.bigmodel.load import load_checkpoint_in_model
from hasten.checkpoint.export import save_model
from hasten.checkpoint.format.formats import MappedFile
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.reshard import Copy, _grouped, run_copies
from hasten.checkpoint.store import cold_reads
from hasten.checkpoint.store.cold_reads import ColdReads, is_cached, read_directly, room_for
from hasten.checkpoint.store.disk import default_threads
from hasten.errors import CorruptCheckpointError

SIZE = 3 * 2**20 + 777


def content(size: int = SIZE) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    """A file of random bytes; the test is skipped where the file system has no direct reads."""
    path = tmp_path / "data.bin"
    path.write_bytes(content().numpy().tobytes())
    found = MappedFile(path, SIZE)
    if read_directly(found, 0, 1, torch.empty(room_for(1), dtype=torch.uint8)) is None:
        pytest.skip("this file system has no direct reads")
    return found


def drop(path: Path) -> None:
    """Remove a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def forced(way: Any) -> ColdReads:
    """A choice that is made already, for every block as if it were not in the page cache."""
    reads = ColdReads()
    reads.chosen = way
    return reads


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, SIZE), (0, 4096), (1, 4096), (4095, 4097), (5000, 2**20 + 1), (SIZE - 1, SIZE), (SIZE - 5000, SIZE)],
)
@pytest.mark.parametrize("shift", [0, 1, 4095])
def test_any_range_is_read_into_any_memory(file: MappedFile, start: int, stop: int, shift: int) -> None:
    memory = torch.empty(room_for(stop - start) + shift, dtype=torch.uint8)[shift:]
    found = read_directly(file, start, stop, memory)
    assert found is not None
    assert torch.equal(found, content()[start:stop])


def test_direct_reads_leave_the_page_cache_as_it_is(file: MappedFile) -> None:
    drop(file.path)
    if is_cached(file, 0, SIZE):
        pytest.skip("this system does not drop files from its page cache, or does not tell")
    read_directly(file, 0, SIZE, torch.empty(room_for(SIZE), dtype=torch.uint8))
    assert not is_cached(file, 0, SIZE)
    file.path.read_bytes()
    assert is_cached(file, 0, SIZE)


def test_copies_are_equal_in_both_ways(file: MappedFile) -> None:
    """Tensors at unaligned offsets, with a gap between them that no tensor wants."""
    for way in ("plain", "direct"):
        targets = [torch.zeros(1000, dtype=torch.uint8), torch.zeros(2**20, dtype=torch.uint8)]
        copies = [Copy(targets[0], file.data[8:1008], file), Copy(targets[1], file.data[3000 : 3000 + 2**20], file)]
        with (
            mock.patch.object(cold_reads, "is_cached", return_value=False),
            mock.patch("hasten.checkpoint.reshard.read_directly", wraps=read_directly) as directly,
        ):
            run_copies(copies, cold=forced(way))
        assert directly.called == (way == "direct")
        assert torch.equal(targets[0], content()[8:1008])
        assert torch.equal(targets[1], content()[3000 : 3000 + 2**20])


def test_no_read_needs_more_memory_than_a_chunk() -> None:
    """torch page-locks powers of two: a read of some bytes more than a chunk would take twice its memory and time."""
    for sizes in ([5 * CHUNK_BYTES + 3], [CHUNK_BYTES // 4 + 1] * 9, [1, CHUNK_BYTES - 1, 7, 2 * CHUNK_BYTES]):
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        file, start, copies = mock.Mock(path="f"), 0, []
        for size in sizes:
            file.place = lambda source: source.storage_offset()
            copies.append(Copy(torch.empty(size, dtype=torch.uint8), data[start : start + size], file))
            start += size
        _, ranges = _grouped(copies)
        assert max(room_for(one.stop - one.start) for one in ranges) <= CHUNK_BYTES
        assert [(one.start, one.stop) for one in ranges] == sorted((one.start, one.stop) for one in ranges)
        assert sum(high - low for one in ranges for _, _, low, high in one.targets) == sum(sizes)


def test_a_file_system_without_direct_reads_is_read_plainly(file: MappedFile) -> None:
    opened, flag = os.open, os.O_DIRECT

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & flag:
            raise OSError(errno.EINVAL, "no direct reads")
        return opened(path, flags, *rest)

    target, reads = torch.zeros(SIZE, dtype=torch.uint8), ColdReads()
    with mock.patch.object(cold_reads, "is_cached", return_value=False), mock.patch("os.open", refusing):
        run_copies([Copy(target, file.data, file)], cold=reads)
    assert torch.equal(target, content())
    assert reads.chosen == "plain"


def test_a_file_that_was_cut_off_is_reported_as_for_plain_reads(file: MappedFile) -> None:
    os.truncate(file.path, 8192)
    with (
        mock.patch.object(cold_reads, "is_cached", return_value=False),
        pytest.raises(CorruptCheckpointError, match="cut off"),
    ):
        run_copies([Copy(torch.zeros(SIZE, dtype=torch.uint8), file.data, file)], cold=forced("direct"))


@pytest.mark.parametrize(("direct_s", "chosen"), [(1.0, "direct"), (1.9, "plain"), (2.0, "plain"), (4.0, "plain")])
def test_the_first_blocks_decide(file: MappedFile, direct_s: float, chosen: str) -> None:
    """Both ways one after the other, but for two blocks of each thread; direct reads must be clearly faster, since plain ones fill the cache."""
    first = 2 * default_threads()
    now = 0.0

    def clock() -> float:
        return now

    reads, ways = ColdReads(), []
    with (
        mock.patch.object(cold_reads, "perf_counter", clock),
        mock.patch.object(cold_reads, "is_cached", return_value=False),
    ):
        for number in range(first + 44):
            if (way := reads.way(file, 0, SIZE)) is None:
                break
            ways.append(way)
            with reads.timed(way, SIZE):
                now += 100.0 if number < first - 1 else direct_s if way == "direct" else 2.0
    assert ways[: first + 40] == ["direct"] * (first + 32) + ["plain"] * 8
    assert ways[first + 40 :] == (["direct"] * 4 if chosen == "direct" else [])
    assert reads.chosen == chosen


def test_direct_reads_that_were_refused_are_not_chosen_by_blocks_that_end_later(file: MappedFile) -> None:
    now = 0.0

    def clock() -> float:
        return now

    reads = ColdReads()
    with (
        mock.patch.object(cold_reads, "perf_counter", clock),
        mock.patch.object(cold_reads, "is_cached", return_value=False),
    ):
        last = 2 * default_threads() + 39
        for number in range(last + 1):
            way = reads.way(file, 0, SIZE)
            with reads.timed(way, SIZE):
                now += 1.0 if way == "direct" else 2.0
                if number == last:  # another thread finds a file without direct reads meanwhile
                    reads.refuse()
    assert reads.chosen == "plain"


def test_blocks_in_the_page_cache_are_not_part_of_the_trial(file: MappedFile) -> None:
    file.path.read_bytes()
    reads = ColdReads()
    assert [reads.way(file, 0, SIZE) for _ in range(20)] == [None] * 20
    assert reads.chosen is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(301, 777) for _ in range(3))


@pytest.mark.parametrize("way", ["plain", "direct", None])
def test_a_checkpoint_that_is_not_in_the_page_cache_is_loaded(tmp_path: Path, way: str | None) -> None:
    source = Net()
    save_model(source.state_dict(), tmp_path / "model", max_shard_size="1MB")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        drop(path)
    with torch.device("meta"):
        model = Net()
    with mock.patch.object(bigmodel_load, "ColdReads", return_value=forced(way)):
        load_checkpoint_in_model(model, tmp_path / "model", {"": "cpu"}, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]), name


@pytest.mark.parametrize(
    ("place", "alone"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            True,
        ),
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, False),
    ],
)
def test_processes_that_share_a_machine_share_its_page_cache(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, str], alone: bool
) -> None:
    """Direct reads fill no cache: each of several processes would read the whole file from the disk."""
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert bigmodel_load._reads_alone() is alone
