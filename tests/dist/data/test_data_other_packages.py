"""Streams of webdataset, litdata and mosaicml-streaming are read as they split themselves; where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import optional
from hasten.data.foreign import find_own_split
from hasten.errors import DataError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import prepared

# Any in this file: datasets of other packages.


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


def tars(folder: Path, num: int, rows: int) -> list[str]:
    """Shards of `rows` numbers each."""
    for shard in range(num):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in range(rows):
                data = str(shard * rows + row).encode()
                info = tarfile.TarInfo(f"{shard * rows + row:05}.txt")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return [str(folder / f"{shard}.tar") for shard in range(num)]


def to_number(sample: Any) -> int:
    return int(sample["txt"])


def read(loader: Any, limit: int | None = None) -> list[list[int]]:
    out = []
    for batch in loader:
        out.append(batch.tolist()[: loader.cursor.num_real])
        if len(out) == limit:
            break
    return out


def check(
    ctx: ProcessContext,
    build: Callable[[], Any],
    size: int,
    repeats: bool = False,
    **options: Any,
) -> None:
    """Every sample once over the ranks, and an exact resume in the first and in the second epoch."""

    def fresh() -> Any:
        return prepared(DataLoader(build(), batch_size=3, **options), ctx=ctx)

    loader = fresh()
    epochs = [read(loader), read(loader)]
    for epoch_rows in epochs:
        read_samples = sorted(
            itertools.chain(
                *ctx.world.all_gather_object(list(itertools.chain(*epoch_rows)))
            )
        )
        assert (sorted(set(read_samples)) if repeats else read_samples) == list(
            range(size)
        )
        assert len(read_samples) < size + ctx.world.size
    for epoch, epoch_rows in enumerate(epochs):
        for stop in {1, len(epoch_rows) - 1} - {0}:
            first = fresh()
            for earlier in epochs[:epoch]:
                assert read(first) == earlier
            assert read(first, stop) == epoch_rows[:stop]
            saved = json.loads(json.dumps(first.state_dict()))
            second = fresh()
            second.load_state_dict(saved)
            assert read(second) == epoch_rows[stop:]
            if not epoch:
                assert read(second) == epochs[1]
                left = fresh()
                left.load_state_dict(saved)
                # a loop left after a resume
                assert read(left, 1) == epoch_rows[stop : stop + 1]
                left.set_epoch(1)
                assert read(left) == epochs[1]


@needs("webdataset")
@ranks(2, exhaustive=(3, 4))
def test_webdataset_splits_by_node(ctx: ProcessContext, tmp_path: Path) -> None:
    wds = optional.need("webdataset", ">=0.2")
    urls = tars(ctx_folder(ctx, tmp_path), 5, 4)

    def build(**settings: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wds.WebDataset(
                urls, shardshuffle=False, empty_check=False, **settings
            ).map(to_number)

    assert find_own_split(build(nodesplitter=wds.split_by_node)) is not None
    assert find_own_split(build(nodesplitter=None)) is None
    check(ctx, lambda: build(nodesplitter=wds.split_by_node), 20)
    check(ctx, lambda: build(nodesplitter=None), 20)

    def every_second(source: Any) -> Any:
        return itertools.islice(source, ctx.rank, None, ctx.world.size)

    with pytest.raises(DataError, match="already_sharded=True"):
        list(
            prepared(
                DataLoader(build(nodesplitter=every_second), batch_size=3), ctx=ctx
            )
        )


@pytest.fixture
def chunks(tmp_path: Path) -> Path:
    """A folder that litdata reads."""
    cache = optional.need("litdata", ">=0.2").streaming.Cache(
        str(tmp_path), chunk_size=3
    )
    for number in range(24):
        cache[number] = number
    cache.done()
    cache.merge()
    return tmp_path


@needs("litdata")
@ranks(1, 2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_litdata_splits_by_rank(
    ctx: ProcessContext, chunks: Path, shuffle: bool
) -> None:
    litdata = optional.need("litdata", ">=0.2")
    folder = str(ctx_folder(ctx, chunks))
    assert find_own_split(litdata.StreamingDataset(folder)) is not None

    def build() -> Any:
        return litdata.StreamingDataset(folder, shuffle=shuffle)

    check(ctx, build, 24, collate_fn=torch.tensor)
    check(ctx, build, 24, collate_fn=torch.tensor, num_workers=2)


def ctx_folder(ctx: ProcessContext, tmp_path: Path) -> Path:
    return Path(ctx.world.broadcast_object(str(tmp_path)))


@contextlib.contextmanager
def launched(ctx: ProcessContext) -> Iterator[None]:
    """Set the variables of a launcher, from which mosaicml-streaming learns the ranks."""
    rank, size = str(ctx.rank), str(ctx.world.size)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", size),
            ("LOCAL_WORLD_SIZE", size),
        ):
            patch.setenv(name, value)
        yield


def mosaicml() -> Any:
    """Return the package. It imports torchvision, whose build for CUDA has no operators next to a torch for the CPU."""
    try:
        importlib.import_module("torchvision")
    # operator torchvision::nms does not exist; nothing here calls it
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    return optional.need("streaming", ">=0.8")


def to_tensor(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([int(sample["x"]) for sample in samples])


@needs("streaming")
@ranks(1, 2)
@pytest.mark.parametrize("size", [25, 26])
def test_mosaicml_streaming_splits_by_rank(
    ctx: ProcessContext, tmp_path: Path, size: int
) -> None:
    """A size that the ranks do not divide makes the package itself repeat samples, so that all ranks have as many."""
    streaming = mosaicml()
    folder = ctx_folder(ctx, tmp_path)
    if ctx.rank == 0:
        with streaming.MDSWriter(
            out=str(folder), columns={"x": "int"}, size_limit=200
        ) as writer:
            for number in range(size):
                writer.write({"x": number})
    ctx.world.barrier("written")
    streaming_datasets: list[Any] = []

    def build() -> Any:
        streaming_datasets.append(
            streaming.StreamingDataset(
                local=str(folder), shuffle=True, shuffle_seed=3, batch_size=3
            )
        )
        return streaming_datasets[-1]

    with launched(ctx):
        divided = size % ctx.world.size == 0
        check(ctx, build, size, repeats=not divided, collate_fn=to_tensor)
        if ctx.world.size == 1:
            check(ctx, build, size, collate_fn=to_tensor, num_workers=2)
    assert find_own_split(streaming_datasets[0]) is not None
