"""Objects written by `accelerator.save` come back through `accelerator.load`, and a harmful or damaged file does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hasten import Accelerator
from hasten.errors import ConfigError, CorruptCheckpointError, UnsafeCheckpointError


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    values: list[Any] = [
        {
            "x": torch.arange(6).reshape(2, 3),
            "n": 3,
            "names": ["a", None],
            "deep": {"y": torch.ones(2, dtype=torch.bool)},
        },
        torch.randn(4),
        [1, "two", 3.0],
    ]
    for number, value in enumerate(values):
        accelerator.save(value, tmp_path / f"{number}.pt")
        loaded = accelerator.load(tmp_path / f"{number}.pt")
        assert str(loaded) == str(value)
        assert (
            torch.equal(loaded, value)
            if isinstance(value, torch.Tensor)
            else type(loaded) is type(value)
        )


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.bin"])
def test_safetensors_are_known_by_their_content(name: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    accelerator.save(tensors, tmp_path / name, safe_serialization=True)
    loaded = accelerator.load(tmp_path / name)
    assert sorted(loaded) == ["a", "b"]
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())
    loaded["a"].add_(1)  # memory of its own, not the file's
    assert torch.equal(accelerator.load(tmp_path / name)["a"], tensors["a"])
    with pytest.raises(ConfigError, match="flat dict of tensors"):
        accelerator.save([1], tmp_path / "list", safe_serialization=True)


def test_code_in_a_file_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save({"x": Harmful()}, tmp_path / "file.pt")
    with pytest.raises(UnsafeCheckpointError):
        accelerator.load(tmp_path / "file.pt")
    assert capsys.readouterr().out == ""
    accelerator.load(tmp_path / "file.pt", allow_pickle=True)
    assert "this ran" in capsys.readouterr().out


@pytest.mark.parametrize("safe", [False, True])
def test_a_cut_off_file_is_named(safe: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    path = tmp_path / "cut.bin"
    accelerator.save({"x": torch.randn(1000)}, path, safe_serialization=safe)
    complete_bytes = path.read_bytes()
    for size in (9, 100, len(complete_bytes) // 2, len(complete_bytes) - 1):
        path.write_bytes(complete_bytes[:size])
        with pytest.raises(
            (CorruptCheckpointError, UnsafeCheckpointError), match=r"cut\.bin"
        ):
            accelerator.load(path)
