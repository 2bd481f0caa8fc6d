"""Streams of webdataset, litdata and mosaicml-streaming are read as they split themselves; where they are installed."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import optional
from hasten.data.foreign import split_by_itself
from hasten.errors import DataError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.loaders import prepared

# Any in this file: datasets of other packages.


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


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


def check(ctx: ProcessContext, build: Callable[[], Any], size: int, **options: Any) -> None:
    """Every sample once over the ranks, and an exact resume."""

    def fresh() -> Any:
        return prepared(DataLoader(build(), batch_size=3, **options), ctx=ctx)

    whole = read(fresh())
    everyone = ctx.world.all_gather_object(list(itertools.chain(*whole)))
    assert sorted(itertools.chain(*everyone)) == list(range(size))
    first = fresh()
    assert read(first, 1) == whole[:1]
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert read(second) == whole[1:]


@needs("webdataset")
@ranks(2, exhaustive=(3, 4))
def test_webdataset_splits_by_node(ctx: ProcessContext, tmp_path: Path) -> None:
    wds = optional.need("webdataset", ">=0.2")
    urls = tars(ctx_folder(ctx, tmp_path), 5, 4)

    def build(**settings: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wds.WebDataset(urls, shardshuffle=False, empty_check=False, **settings).map(to_number)

    assert split_by_itself(build(nodesplitter=wds.split_by_node)) is not None
    assert split_by_itself(build(nodesplitter=None)) is None
    check(ctx, lambda: build(nodesplitter=wds.split_by_node), 20)
    check(ctx, lambda: build(nodesplitter=None), 20)

    def every_second(source: Any) -> Any:
        return itertools.islice(source, ctx.rank, None, ctx.world.size)

    with pytest.raises(DataError, match="already_sharded=True"):
        list(prepared(DataLoader(build(nodesplitter=every_second), batch_size=3), ctx=ctx))


@pytest.fixture
def chunks(tmp_path: Path) -> Path:
    """A folder that litdata reads."""
    cache = optional.need("litdata", ">=0.2").streaming.Cache(str(tmp_path), chunk_size=3)
    for number in range(24):
        cache[number] = number
    cache.done()
    cache.merge()
    return tmp_path


@needs("litdata")
@ranks(2)
def test_litdata_splits_by_rank(ctx: ProcessContext, chunks: Path) -> None:
    litdata = optional.need("litdata", ">=0.2")
    assert split_by_itself(litdata.StreamingDataset(str(chunks))) is not None
    check(ctx, lambda: litdata.StreamingDataset(str(chunks)), 24, collate_fn=torch.tensor)


def ctx_folder(ctx: ProcessContext, tmp_path: Path) -> Path:
    return Path(ctx.world.broadcast_object(str(tmp_path)))


@needs("streaming")
def test_mosaicml_streaming_is_known_by_its_class() -> None:
    streaming = optional.need("streaming", ">=0.8")
    made = streaming.StreamingDataset.__new__(streaming.StreamingDataset)
    assert split_by_itself(made) is not None
