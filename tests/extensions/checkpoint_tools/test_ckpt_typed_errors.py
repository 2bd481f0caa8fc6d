"""Wrong arguments, full disks and forged values end in typed errors that say what to do."""

from __future__ import annotations

import math
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hasten import Accelerator
from hasten.checkpoint.export import parse_size, save_model, save_object
from hasten.checkpoint.format.manifest import decode_manifest
from hasten.cli.main import main
from hasten.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    UnsafeCheckpointError,
)
from hasten.extensions.bigmodel import get_max_memory


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A block in which the system refuses to write larger files, as a full disk or a quota does."""
    previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, previous_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)


def _writers(folder: Path) -> dict[str, Callable[[], object]]:
    big = {"w": torch.randn(300_000)}
    return {
        "torch": lambda: save_object(big, folder / "x"),
        "pickled": lambda: save_object(
            [f"text {n}" for n in range(200_000)], folder / "x"
        ),
        "safetensors": lambda: save_object(big, folder / "x", safe_serialization=True),
        "model": lambda: save_model(big, folder),
        "model in shards": lambda: save_model(
            {str(n): torch.randn(100_000) for n in range(4)}, folder, "600KB"
        ),
        "state": lambda: Accelerator(cpu=True, project_dir=str(folder)).save_state(),
    }


@pytest.mark.parametrize(
    "writer", ["torch", "pickled", "safetensors", "model", "model in shards", "state"]
)
def test_a_disk_without_room_is_named_and_keeps_what_it_has(
    writer: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "model.safetensors").write_bytes(b"old")
    with (
        largest_file(500 if writer == "state" else 100_000),
        pytest.raises(
            CheckpointError,
            match=r"may have \d+ bytes at most \(ulimit -f\).* Raise the limit",
        ),
    ):
        _writers(tmp_path)[writer]()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / "x",
        tmp_path / "model.safetensors",
    ]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for call in (
        lambda: save_object({}, tmp_path / "file" / "x.pt"),
        lambda: save_object(
            {"a": torch.ones(1)}, tmp_path / "file" / "x", safe_serialization=True
        ),
        lambda: save_model({"a": torch.ones(1)}, tmp_path / "file" / "model"),
    ):
        with pytest.raises(
            CheckpointError, match="Give a folder that can be written to"
        ):
            call()


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    for call in (
        lambda: accelerator.save_state(path),
        lambda: accelerator.load_state(path),
        lambda: accelerator.save_model(model, path),
        lambda: accelerator.load_model(model, path),
        lambda: accelerator.save({}, path),
        lambda: accelerator.load(path),
    ):
        with pytest.raises(ArgumentError, match="got the empty path"):
            call()
    assert not list(tmp_path.iterdir())


def test_sizes_are_ints_floats_and_text() -> None:
    for size, expected in (
        (18716532571.8, 18716532571),
        (7, 7),
        (0, 0),
        (0.0, 0),
        ("1.5GiB", 3 * 2**29),
        (" 2 MB", 2_000_000),
    ):
        assert parse_size(size) == expected
    assert get_max_memory({"cpu": 18716532571.8, "disk": "10GB"}) == {
        "cpu": 18716532571,
        "disk": 10**10,
    }
    wrong: list[Any] = [
        -1,
        -0.5,
        math.nan,
        math.inf,
        "-1GB",
        "nanGB",
        "infGB",
        "10",
        "GB",
        "",
        "junk",
        None,
        [5],
        True,
        2**70,
    ]
    for size in wrong:
        with pytest.raises(ConfigError, match="write it as 10GB"):
            parse_size(size)


@pytest.mark.parametrize("size", [0, -1, 0.5, math.nan, "0GB", "-1GB", "junk"])
def test_shards_without_room_are_refused(size: float | str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"max_shard_size|is not a file size"):
        accelerator.save_model(
            accelerator.prepare(nn.Linear(1, 1)), tmp_path / "out", max_shard_size=size
        )
    assert not (tmp_path / "out").exists()
    accelerator.save_model(
        accelerator.prepare(nn.Linear(1, 1)),
        tmp_path / "out",
        max_shard_size=18716532571.8,
    )


@pytest.mark.parametrize(
    "forged",
    [
        {"created_s": 1e300},
        {"created_s": -1e18},
        {"created_s": 1e13},
        {"step": -3},
        {"number": -1},
        {"created_s": "now"},
    ],
)
def test_forged_times_do_not_end_a_list(
    forged: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    accelerator.save_state()
    accelerator.save_state()
    path = tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json"
    plain = {
        **msgspec.json.decode(
            msgspec.json.encode(decode_manifest(path.read_bytes(), "x"))
        ),
        **forged,
    }
    body = msgspec.json.encode(plain)
    path.write_bytes(b'{"crc32":"%08x","manifest":' % zlib.crc32(body) + body + b"}")
    for words in ([], ["--json"]):
        assert main(["ckpt", "list", str(tmp_path), *words]) == 0
        text = capsys.readouterr().out
        assert "checkpoint_1" in text
        assert "manifest" in text, "what is wrong with the first is said"


def test_control_characters_of_a_checkpoint_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "a\x1b[31m")
    assert main(["ckpt", "list", str(tmp_path)]) == 0
    assert "a\\x1b[31m" in capsys.readouterr().out


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(20.0)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_forged_states_of_loaders(kind: str) -> None:
    accelerator = Accelerator(cpu=True)

    def fresh() -> Any:
        data: Any = torch.arange(20.0) if kind == "map" else Stream()
        return accelerator.prepare(DataLoader(data, batch_size=2))

    loader = fresh()
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    state |= {
        "witness": None,
        "generator": None,
        "ahead": False,
        "batches": 3,
    }
    del state["witness"]
    checked = fresh()
    checked.load_state_dict(state)
    remaining = [batch.tolist() for batch in checked]
    for key in (*state, "witness"):
        for value in ("x", -1, 3.5, [1], {"a": 1}, [[1, 2]], 2**70, object()):
            forged = fresh()
            try:
                forged.load_state_dict({**state, key: value})
            except DataError:
                continue
            assert key in ("seed", "size", "unit", "generator"), (
                f"{key}={value!r} was taken"
            )
    junks: list[Any] = [None, 3, "x", [], {}, {"version": 1}]
    for junk in junks:
        with pytest.raises(DataError):
            fresh().load_state_dict(junk)
    restored = fresh()
    restored.load_state_dict(state)
    assert [batch.tolist() for batch in restored] == remaining


def test_a_forged_loader_in_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    data: Any = torch.randn(8, 1)
    model, loader = accelerator.prepare(net, DataLoader(data, batch_size=2))
    accelerator.register_for_checkpointing(_Forged(loader))
    accelerator.save_state(tmp_path / "a")
    with torch.no_grad():
        model.weight.fill_(5.0)
    with pytest.raises((CheckpointError, DataError), match="epoch"):
        accelerator.load_state(tmp_path / "a")
    assert float(model.weight.detach()) == 5.0


class _Forged:
    """Hands a forged state to a loader when it is loaded, as an edited file would."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {**self._loader.state_dict(), "epoch": "soon"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def test_objects_that_would_run_code_are_not_taken_for_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True"):
        Accelerator(cpu=True).load(tmp_path / "x")
