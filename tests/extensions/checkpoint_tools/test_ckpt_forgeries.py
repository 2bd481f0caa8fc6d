"""Forged folders and files end in a CheckpointError: none hangs, leaves its folder, takes all memory or raises a raw error."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from hasten import Accelerator
from hasten.checkpoint.export import load_object, read_model, save_model
from hasten.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from hasten.extensions.bigmodel.offload_files import (
    OffloadedWeightsLoader,
    offload_state_dict,
)
from hasten.extensions.checkpoint_tools.inspect import convert_folder, merge_shards
from hasten.extensions.checkpoint_tools.torch_folder import whole_tensors

Edit = Callable[[Metadata, Path], Any]
W = "model.w"


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "good"
    state: dict[str, dict[str, Any]] = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3), "steps": 5}
    }
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(whole_tensors(folder)[W], state["model"]["w"])
    return folder


def entry(table: Metadata) -> Any:
    return table.state_dict_metadata[W]


def names(table: Any) -> Any:
    return table.state_dict_metadata


def place(table: Metadata) -> Any:
    return table.storage_data[MetadataIndex(W, (0, 0))]


def resized(*size: int) -> Edit:
    def edit(table: Metadata, _: Path) -> None:
        entry(table).size = torch.Size(size)
        entry(table).chunks = [
            ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        ]
        table.storage_data[MetadataIndex(W, [0] * len(size))] = place(table)

    return edit


def _outside(table: Metadata, folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder.parent / "secret")
    place(table).relative_path = "../secret"


def _absolute(table: Metadata, folder: Path) -> None:
    _outside(table, folder)
    place(table).relative_path = str(folder.parent / "secret")


def _linked(table: Metadata, folder: Path) -> None:
    _outside(table, folder)
    (folder / "inner").symlink_to(folder.parent / "secret")
    place(table).relative_path = "inner"


def _pipe(table: Metadata, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    place(table).relative_path = "pipe"


def _device(table: Metadata, folder: Path) -> None:
    (folder / "zero").symlink_to("/dev/zero")
    place(table).relative_path = "zero"


def _sparse(table: Metadata, folder: Path) -> None:
    """A file that says it has 4 TB, and a tensor as large as that."""
    with (folder / "sparse").open("wb") as file:
        file.truncate(4 * 10**12)
    resized(10**12)(table, folder)
    place(table).relative_path, place(table).length = "sparse", 4 * 10**12


TABLES: dict[str, Edit] = {
    "path with dots": _outside,
    "absolute path": _absolute,
    "path through a link": _linked,
    "a pipe": _pipe,
    "a device": _device,
    "a folder": lambda t, f: setattr(place(t), "relative_path", "."),
    "path is a number": lambda t, f: setattr(place(t), "relative_path", 3),
    "path is absent": lambda t, f: setattr(place(t), "relative_path", "gone.distcp"),
    "path with NUL": lambda t, f: setattr(place(t), "relative_path", "a\0b"),
    "offset after the end": lambda t, f: setattr(place(t), "offset", 10**15),
    "offset negative": lambda t, f: setattr(place(t), "offset", -8),
    "offset text": lambda t, f: setattr(place(t), "offset", "8"),
    "length huge": lambda t, f: setattr(place(t), "length", 2**62),
    "length negative": lambda t, f: setattr(place(t), "length", -1),
    "length zero": lambda t, f: setattr(place(t), "length", 0),
    "offset inside another": lambda t, f: setattr(
        place(t), "offset", place(t).offset + 7
    ),
    "four terabytes": resized(10**12),
    "four terabytes in a sparse file": _sparse,
    "overflow": resized(2**40, 2**40),
    "another number of dims": resized(2, 2, 3),
    "negative dimension": lambda t, f: setattr(entry(t), "size", (-3, 4)),
    "size is text": lambda t, f: setattr(entry(t), "size", "34"),
    "size is None": lambda t, f: setattr(entry(t), "size", None),
    "more rows than chunks": lambda t, f: setattr(
        entry(t), "size", torch.Size([300, 4])
    ),
    "no chunks": lambda t, f: setattr(entry(t), "chunks", []),
    "chunks None": lambda t, f: setattr(entry(t), "chunks", None),
    "chunks of text": lambda t, f: setattr(entry(t), "chunks", ["x"]),
    "chunk outside": lambda t, f: setattr(
        entry(t).chunks[0], "offsets", torch.Size([9, 9])
    ),
    "chunk of other dims": lambda t, f: setattr(
        entry(t).chunks[0], "sizes", torch.Size([12])
    ),
    "chunk twice": lambda t, f: entry(t).chunks.append(entry(t).chunks[0]),
    "dtype text": lambda t, f: setattr(entry(t).properties, "dtype", "float32"),
    "no properties": lambda t, f: delattr(entry(t), "properties"),
    "properties None": lambda t, f: setattr(entry(t), "properties", None),
    "entry is None": lambda t, f: names(t).update({W: None}),
    "entry is bytes": lambda t, f: t.state_dict_metadata.update(
        {W: BytesStorageMetadata(), "x": BytesStorageMetadata()}
    ),
    "name is a number": lambda t, f: names(t).update({3: entry(t)}),
    "names are a list": lambda t, f: setattr(t, "state_dict_metadata", []),
    "no names": lambda t, f: delattr(t, "state_dict_metadata"),
    "no storage": lambda t, f: setattr(t, "storage_data", None),
    "storage without keys": lambda t, f: t.storage_data.clear(),
    "storage of text": lambda t, f: t.storage_data.update(
        {MetadataIndex(W, (0, 0)): "x"}
    ),
    "storage keys of text": lambda t, f: t.storage_data.update({"x": place(t)}),
    "storage meta text": lambda t, f: setattr(t, "storage_meta", "x"),
    "planner data text": lambda t, f: setattr(t, "planner_data", "x"),
    "the file holds other tensors": lambda t, f: (f / "__0_0.distcp").write_bytes(
        (f / "__0_0.distcp").read_bytes()[::-1]
    ),
}


@pytest.mark.parametrize("label", sorted(TABLES))
def test_forged_tables_of_torch_folders(
    label: str, torch_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(torch_folder, folder)
    table = pickle.loads((folder / ".metadata").read_bytes())
    TABLES[label](table, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"\w+ \w+.*\w+") as caught:
        merge_shards(str(folder), tmp_path / "out")
    assert len(str(caught.value)) > 60
    if "path" in label and label.split()[-1] in ("dots", "path", "link"):
        assert isinstance(caught.value, UnsafeCheckpointError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"text",
        b"\x80\x02.",
        b"N.",
        b"]" * 3,
        b"\x80\x04X\xff\xff\xff\x7f",
        b"(" * 100_000,
        pickle.dumps(3),
        pickle.dumps(os.system),
    ],
)
def test_tables_that_are_none(raw: bytes, torch_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(torch_folder, folder)
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        merge_shards(str(folder), tmp_path / "out")


def test_a_table_too_large_to_be_one_is_not_read(
    torch_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(torch_folder, folder)
    with (folder / ".metadata").open("ab") as file:
        file.truncate(5 * 10**9)
    with pytest.raises(CorruptCheckpointError, match="more than the"):
        merge_shards(str(folder), tmp_path / "out")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    accelerator, objects = _run()
    accelerator.prepare(*objects)
    folder = tmp_path_factory.mktemp("ours") / "good"
    accelerator.save_state(folder)
    return folder


def _run() -> tuple[Accelerator, tuple[Any, ...]]:
    net = nn.Linear(3, 2)
    data: Any = torch.randn(8, 3)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    return Accelerator(cpu=True), (net, torch.optim.AdamW(net.parameters()), loader)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "optimizer.bin",
        "model.safetensors",
        "random_states_0.safetensors",
    ],
)
@pytest.mark.parametrize("obstacle", ["pipe", "device", "folder"])
def test_no_file_of_a_checkpoint_is_anything_but_a_file(
    name: str, obstacle: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(checkpoint, folder)
    _replace(folder / name, obstacle)
    accelerator, objects = _run()
    prepared = accelerator.prepare(*objects)
    initial_parameters = [p.clone() for p in prepared[0].parameters()]
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        accelerator.load_state(folder)
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        merge_shards(str(folder), tmp_path / "out")
    assert all(
        torch.equal(a, b)
        for a, b in zip(initial_parameters, prepared[0].parameters(), strict=True)
    )
    # the next save puts a file in its place
    if name == "manifest.json" and obstacle != "folder":
        accelerator.save_state(folder)
        accelerator.load_state(folder)


def _replace(path: Path, obstacle: str) -> None:
    path.unlink(missing_ok=True)
    if obstacle == "pipe":
        os.mkfifo(path)
    elif obstacle == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("obstacle", ["pipe", "device"])
def test_a_lock_that_is_no_file_is_not_waited_for(
    obstacle: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(checkpoint, folder)
    _replace(folder / ".hasten-lock", obstacle)
    accelerator, objects = _run()
    accelerator.prepare(*objects)
    accelerator.load_state(folder)
    if obstacle == "pipe":
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        return
    with pytest.raises(CheckpointError, match="hasten-lock"):
        accelerator.save_state(folder)


@pytest.mark.parametrize("obstacle", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    "name", ["optimizer.bin", "scaler.pt", "model.safetensors", "model_1.safetensors"]
)
def test_other_tools_folders_hold_files_only(
    name: str, obstacle: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    save_model({"w": torch.ones(2)}, folder)
    torch.save({"state": {}, "param_groups": []}, folder / "scheduler.bin")
    _replace(folder / name, obstacle)
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match="theirs"):
            read_model(folder)
        return
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        convert_folder(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("obstacle", ["pipe", "device", "folder"])
def test_single_objects_are_files_only(obstacle: str, tmp_path: Path) -> None:
    _replace(tmp_path / "object.pt", obstacle)
    with pytest.raises(UnsafeCheckpointError, match=r"object\.pt is a "):
        load_object(tmp_path / "object.pt")


@pytest.mark.parametrize(
    "text",
    [
        b"hello",
        b"epoch,loss\n1,2\n",
        b"Xabc",
        b"h\x00",
        b"",
        b"{}",
        b"# notes\n",
        "für".encode(),
        b"PK\x03\x04hello",
        b"N.",
    ],
)
def test_text_is_no_object(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"notes\.txt: "):
        Accelerator(cpu=True).load(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Accelerator(cpu=True).load(tmp_path / "absent.pt")


@pytest.mark.parametrize(
    "index",
    [
        {"w": 3},
        {"w": {}},
        {"w": {"dtype": "float32", "shape": [-1, -2]}},
        {"w": {"dtype": "float32", "shape": [2**40, 2**40]}},
        {"w": {"dtype": "float32", "shape": "2"}},
        {"w": {"dtype": "nothing", "shape": [2]}},
        {"../w": {"dtype": "float32", "shape": [2]}},
        [],
    ],
)
def test_forged_indexes_of_offloaded_weights(index: Any, tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "offload", {"w": torch.ones(2)})
    shutil.copy(tmp_path / "offload" / "w.dat", tmp_path / "w.dat")
    (tmp_path / "offload" / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="offload"):
        dict(OffloadedWeightsLoader(save_folder=tmp_path / "offload"))


def test_models_in_the_hubs_cache_are_links(tmp_path: Path) -> None:
    snapshot, blobs = (
        tmp_path / "models--x" / "snapshots" / "0f",
        tmp_path / "models--x" / "blobs",
    )
    blobs.mkdir(parents=True)
    save_model({name: torch.ones(100) for name in "abc"}, snapshot, "500B")
    for path in list(snapshot.iterdir()):
        target = blobs / f"{zlib.crc32(path.name.encode()):x}"
        path.rename(target)
        path.symlink_to(Path("../../blobs") / target.name)
    assert read_model(snapshot).keys() == {"a", "b", "c"}
    shutil.copytree(snapshot, tmp_path / "elsewhere" / "0f", symlinks=True)
    (tmp_path / "blobs").symlink_to(blobs)
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        read_model(tmp_path / "elsewhere" / "0f")
