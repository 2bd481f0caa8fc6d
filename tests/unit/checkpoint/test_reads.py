"""Reads of files into tensors: cached or not, cut off, and weights on the host that stay mapped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.checkpoint.export import save_model
from hasten.checkpoint.format.formats import MappedFile
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.errors import CorruptCheckpointError
from hasten.extensions.bigmodel.load import load_checkpoint_in_model

SIZE = 3 * 2**20 + 777


def random_content() -> Tensor:
    return torch.randint(
        0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    path = tmp_path / "data.bin"
    path.write_bytes(random_content().numpy().tobytes())
    return MappedFile(path, SIZE)


def drop_from_cache(path: Path) -> None:
    """Remove a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("cached", ["whole", "none", "returned in short reads"])
def test_tensors_at_unaligned_offsets_equal_the_file(
    file: MappedFile, cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def read_some(fd: int, views: Any, offset: int) -> int:
        return read(fd, [views[0][:100_000]], offset)

    if cached == "returned in short reads":
        monkeypatch.setattr(os, "preadv", read_some)
    if cached != "whole":
        drop_from_cache(file.path)
    targets = [
        torch.zeros(1000, dtype=torch.uint8),
        torch.zeros(2**20, dtype=torch.uint8),
    ]
    run_copies(
        [
            Copy(targets[0], file.data[8:1008], file),
            Copy(targets[1], file.data[3000 : 3000 + 2**20], file),
        ]
    )
    assert torch.equal(targets[0], random_content()[8:1008])
    assert torch.equal(targets[1], random_content()[3000 : 3000 + 2**20])


def test_a_file_that_was_cut_off_is_reported(file: MappedFile) -> None:
    os.truncate(file.path, 8192)
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        run_copies([Copy(torch.zeros(SIZE, dtype=torch.uint8), file.data, file)])


class Net(nn.Module):
    """Layers, the last two of which are equal without sharing their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(31, 31, bias=False) for _ in range(3))


def load(folder: Path, **settings: Any) -> Net:
    with torch.device("meta"):
        model = Net()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, strict=True, **settings)
    return model


def test_weights_on_the_host_stay_mapped_and_writing_to_them_changes_no_file(
    tmp_path: Path,
) -> None:
    source = Net()
    source.layers[2].weight = source.layers[1].weight  # stored once
    save_model(source.state_dict(), tmp_path)
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    (path,) = tmp_path.glob("*.safetensors")
    file_bytes = path.read_bytes()
    with torch.inference_mode():
        model = load(tmp_path)
    mapped = [str(path) in _mapping_of(parameter) for parameter in model.parameters()]
    assert mapped == [True, True, False], (
        "a weight that is stored once has memory for each of its two places"
    )
    assert all(
        torch.equal(value, expected[name]) for name, value in model.state_dict().items()
    )
    path.unlink()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert all(
        torch.equal(value, expected[name] - 1)
        for name, value in model.state_dict().items()
    )
    path.write_bytes(file_bytes)
    reloaded_model = load(tmp_path)
    assert all(
        torch.equal(value, expected[name])
        for name, value in reloaded_model.state_dict().items()
    )
    assert not any(
        "safetensors" in _mapping_of(parameter)
        for parameter in load(tmp_path, dtype="float16").parameters()
    )


def _mapping_of(tensor: Tensor) -> str:
    """Return the line of this process's memory map that holds the tensor."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return line
    return ""
