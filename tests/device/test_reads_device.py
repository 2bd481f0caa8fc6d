"""Reads of files into tensors on an accelerator: a buffer is not filled again before its copies have finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.checkpoint import reshard
from hasten.checkpoint.format.formats import encode_safetensors, read_safetensors
from hasten.checkpoint.reshard import plan_copies, run_copies
from hasten.checkpoint.store.disk import Disk, write_files

pytestmark = pytest.mark.device

SIZES = (1, 3, 70_000, 9_000_000, 5, 250_000, 40_000_000, 17, 2_000_000)


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The driver's handles stay for the life of the process; they are no test's leak."""
    if torch.cuda.is_available():
        torch.zeros(2, device="cuda").sum().item()


@pytest.mark.parametrize("threads", [1, 4])
def test_tensors_on_the_device_equal_the_file(tmp_path: Path, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{i}": torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
        for i, size in enumerate(SIZES)
    }
    write_files(tmp_path, {"f.safetensors": encode_safetensors(values)}, Disk())
    pieces = read_safetensors(tmp_path / "f.safetensors").pieces
    device = torch.accelerator.current_accelerator()
    live = {
        name: torch.zeros_like(value, device=device) for name, value in values.items()
    }
    for turn in range(3):
        for tensor in live.values():
            tensor.zero_()
        copies = [
            copy
            for name in values
            for copy in plan_copies(name, live[name], [pieces[name]])
        ]
        run_copies(copies, threads=threads)
        for name, value in values.items():
            assert torch.equal(live[name].cpu(), value), (
                f"turn {turn}: {name} of {value.numel()} bytes"
            )


def test_slow_copies_do_not_see_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "CHUNK_BYTES", 1_000_000)
    value = torch.arange(64_000_000, dtype=torch.int32)
    write_files(tmp_path, {"f.safetensors": encode_safetensors({"w": value})}, Disk())
    piece = read_safetensors(tmp_path / "f.safetensors").pieces["w"]
    device = torch.accelerator.current_accelerator()
    live = torch.zeros_like(value, device=device)
    link_traffic = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    for _ in range(8):  # the link is busy while the reads run
        link_traffic.to(device, non_blocking=True)
    run_copies(plan_copies("w", live, [piece]), threads=2)
    assert torch.equal(live.cpu(), value)
