"""A program that loads mutated and malicious checkpoints and counts what happens. Run as a script.

Blind mutations (truncations, bit flips, swapped files) must be caught by sizes and checksums. Mutations by somebody who
knows the format come with checksums that fit, so that the readers themselves meet them: pickles that would run code,
headers that lie, paths that lead outside. Every load must end in a typed error, or in a sound result for a harmless
change; the model must be untouched after an error; and nothing may ever run.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    Manifest,
    checksum,
    decode_manifest,
    encode_manifest,
)
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.local_store import LocalStore
from hasten.comm.agreement import agreeing
from hasten.comm.local import LocalComm
from hasten.errors import HastenError
from hasten.optim.clock import StepClock
from hasten.precision.base import FullPrecision
from hasten.state.restore import plan_restore
from hasten.state.run_state import Randomness, RunObjects, collect_state

NAME = "victim"
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
# may also leave the content as it was
HARMLESS = ("fuzz", "manifest: rank file gone")
Mutation = tuple[str, Callable[[Path], None]]


class TinyRun:
    """A run small enough to load hundreds of times."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        self.models = [model]
        self.optimizers = [optimizer]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
        self.loaders: list[Any] = []

    def fingerprint(self) -> list[torch.Tensor]:
        tensors = [t.detach().clone() for t in self.models[0].state_dict().values()]
        return tensors + [
            v.clone() for s in self.optimizers[0].state.values() for v in s.values()
        ]


# Any: unprepared objects, in place of prepared ones
def run_objects_of(objects: Any) -> RunObjects:
    return RunObjects(
        objects,
        lambda model: model,
        StepClock(),
        FullPrecision(),
        Randomness(torch.device("cpu")),
    )


def write_victim(root: Path) -> None:
    run_objects = run_objects_of(TinyRun())
    tree = collect_state(
        run_objects, "safetensors", [None], run_objects.saved_position()
    )
    save_tree(LocalStore(root), NAME, tree, Manifest(number=1, step=1), LocalComm())


def reseal(folder: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Make sizes and checksums fit again, as somebody who knows the format would."""
    path = folder / MANIFEST_NAME
    manifest = decode_manifest(path.read_bytes(), "x")
    files = []
    for file in manifest.files:
        raw = (folder / file.name).read_bytes()
        sums = tuple(
            checksum(raw[i : i + CHUNK_BYTES]) for i in range(0, len(raw), CHUNK_BYTES)
        )
        files.append(msgspec.structs.replace(file, size=len(raw), sums=sums))
    manifest = msgspec.structs.replace(manifest, files=tuple(files))
    if edit is None:
        path.write_bytes(encode_manifest(manifest))
        return
    plain = msgspec.json.decode(msgspec.json.encode(manifest))
    edit(plain)
    body = msgspec.json.encode(plain)
    path.write_bytes(b'{"crc32":"%08x","manifest":' % zlib.crc32(body) + body + b"}")


class Payload:
    """Pickles to a call of os.system."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._canary}",)


class Opener(Payload):
    """Pickles to a call of open()."""

    def __reduce__(self) -> tuple[Any, Any]:
        return open, (str(self._canary), "w")


class Evaluator(Payload):
    """Pickles to a call of eval()."""

    def __reduce__(self) -> tuple[Any, Any]:
        return eval, (f"open({str(self._canary)!r}, 'w').close()",)


def blind_mutations(files: list[str]) -> Iterator[Mutation]:
    rng = random.Random(0)

    def mutation_of_file(
        name: str, change: Callable[[bytes], bytes]
    ) -> Callable[[Path], None]:
        def mutate(folder: Path) -> None:
            (folder / name).write_bytes(change((folder / name).read_bytes()))

        return mutate

    for name in [*files, MANIFEST_NAME]:
        for share in (0.0, 0.2, 0.5, 0.9, 0.999):
            yield (
                f"truncate {name} to {share}",
                mutation_of_file(name, partial(_cut, share)),
            )
        for _ in range(6):
            spot = rng.random()
            yield (
                f"flip {name} at {spot:.3f}",
                mutation_of_file(name, partial(_flip, spot)),
            )
        yield f"grow {name}", mutation_of_file(name, lambda raw: raw + b"\0")
        yield f"zero {name}", mutation_of_file(name, lambda raw: bytes(len(raw)))
        yield (
            f"noise {name}",
            mutation_of_file(name, lambda raw: random.Random(1).randbytes(len(raw))),
        )
        yield f"delete {name}", partial(_delete, name)
    for a, b in itertools.pairwise(files):
        yield f"swap {a} and {b}", partial(_swap, a, b)


def _cut(share: float, raw: bytes) -> bytes:
    return raw[: int(len(raw) * share)]


def _delete(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _flip(spot: float, raw: bytes) -> bytes:
    byte_index = int(spot * (len(raw) - 1))
    return raw[:byte_index] + bytes([raw[byte_index] ^ 0x10]) + raw[byte_index + 1 :]


def _swap(a: str, b: str, folder: Path) -> None:
    first, second = (folder / a).read_bytes(), (folder / b).read_bytes()
    (folder / a).write_bytes(second)
    (folder / b).write_bytes(first)


def pickles(canary: Path) -> Iterator[Mutation]:
    for target in ("optimizer.bin", "scheduler.bin"):
        for kind in (Payload, Opener, Evaluator):
            load = kind(canary)
            for label, raw in (
                ("torch.save", _torch_saved(load)),
                (
                    "torch.save nested",
                    _torch_saved({"state": {"a": [load]}, "param_groups": []}),
                ),
                ("legacy torch.save", _torch_saved(load, legacy=True)),
                ("bare pickle", pickle.dumps(load)),
                ("old pickle", pickle.dumps(load, protocol=0)),
                ("zip with pickle", _zipped(pickle.dumps(load, protocol=2))),
            ):
                yield f"{label} of {kind.__name__} as {target}", _replaced(target, raw)
        yield (
            f"stack bomb in {target}",
            _replaced(target, _zipped(b"\x80\x02" + b"(" * 100_000 + b".")),
        )
        yield (
            f"endless memo in {target}",
            _replaced(target, _zipped(b"\x80\x02]q\x00" + b"h\x00" * 50_000 + b".")),
        )
        yield (
            f"huge string in {target}",
            _replaced(target, _zipped(b"\x80\x02X\xff\xff\xff\x7f" + b"a" * 50 + b".")),
        )
        yield f"huge storage in {target}", _replaced(target, _huge_storage())
        yield f"only a zip in {target}", _replaced(target, _zipped(None))
    for target in ("model.safetensors", "random_states_0.safetensors"):
        yield f"pickle as {target}", _replaced(target, _torch_saved(Payload(canary)))


def _torch_saved(value: object, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def _zipped(data: bytes | None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        if data is not None:
            archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def _huge_storage() -> bytes:
    """A torch file whose tensor claims far more numbers than its storage has."""
    raw = _torch_saved({"state": {}, "x": torch.zeros(7)})
    return raw.replace(b"K\x07", b"K\xff")


def _replaced(target: str, raw: bytes) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        (folder / target).write_bytes(raw)
        reseal(folder)

    return mutate


def headers() -> Iterator[Mutation]:
    huge = 2**63 - 1
    edits: dict[str, Callable[[dict[str, Any]], Any]] = {
        "shape lies": lambda h: h["0.weight"].update(shape=[600, 5]),
        "shape negative": lambda h: h["0.weight"].update(shape=[-6, -5]),
        "shape huge": lambda h: h["0.weight"].update(shape=[huge, huge]),
        "shape text": lambda h: h["0.weight"].update(shape="55"),
        "shape float": lambda h: h["0.weight"].update(shape=[5.0, 6.0]),
        "shape transposed": lambda h: h["0.weight"].update(shape=[6, 5]),
        "shape flat": lambda h: h["0.weight"].update(shape=[30]),
        "offsets outside": lambda h: h["0.weight"].update(data_offsets=[0, huge]),
        "offsets negative": lambda h: h["0.weight"].update(data_offsets=[-120, 0]),
        "offsets swapped": lambda h: h["0.weight"].update(
            data_offsets=h["0.weight"]["data_offsets"][::-1]
        ),
        "offsets overlap": lambda h: h["0.weight"].update(
            data_offsets=h["2.weight"]["data_offsets"]
        ),
        "offsets one": lambda h: h["0.weight"].update(data_offsets=[0]),
        "dtype unknown": lambda h: h["0.weight"].update(dtype="F31"),
        "dtype other": lambda h: h["0.weight"].update(dtype="I32"),
        "dtype list": lambda h: h["0.weight"].update(dtype=["F32"]),
        "entry list": lambda h: h.update({"0.weight": []}),
        "entry gone": lambda h: h.pop("0.weight"),
        "entry renamed": lambda h: h.update({"0.weird": h.pop("0.weight")}),
        "metadata list": lambda h: h.update(__metadata__=[]),
        "metadata broken": lambda h: h.update(__metadata__={"hasten": "{"}),
        "alias of nothing": lambda h: h.update(
            __metadata__={"hasten": '{"aliases":{"0.weight":"gone"}}'}
        ),
        "slice outside": lambda h: h.update(
            __metadata__={"hasten": '{"slices":{"0.weight":[[5,6],[3,0]]}}'}
        ),
        "slice of more": lambda h: h.update(
            __metadata__={"hasten": '{"slices":{"0.weight":[[10,6],[5,0]]}}'}
        ),
        "slice huge": lambda h: h.update(
            __metadata__={"hasten": f'{{"slices":{{"0.weight":[[{huge},6],[0,0]]}}}}'}
        ),
        "slice text": lambda h: h.update(
            __metadata__={"hasten": '{"slices":{"0.weight":"x"}}'}
        ),
    }
    for label, edit in edits.items():
        yield f"header: {label}", _header_edit(edit)
    for length in (0, 1, 7, 2**20, 2**62, 2**64 - 1):
        yield f"header length {length}", _header_raw(partial(_with_length, length))
    for label, text in (
        ("deep", b"[" * 100_000),
        ("number", b"1"),
        ("null", b"null"),
        ("not utf8", b'{"\xff\xfe":1}'),
        (
            "big int",
            b'{"a":{"dtype":"F32","shape":['
            + b"9" * 5000
            + b'],"data_offsets":[0,4]}}',
        ),
        ("nan", b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'),
    ):
        yield f"header text {label}", _header_raw(partial(_only_header, text))


def _with_length(length: int, raw: bytes) -> bytes:
    return length.to_bytes(8, "little") + raw[8:]


def _only_header(text: bytes, raw: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _header_raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        reseal(folder)

    return mutate


def _header_edit(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return _header_raw(change)


def manifests() -> Iterator[Mutation]:
    for name in (
        "../x",
        "/etc/passwd",
        "a/../../x",
        "C:\\x",
        "..",
        ".",
        "",
        "a//b",
        "x\0y",
        "\\\\host\\x",
        "a\nb",
        "~/x/",
    ):
        yield f"manifest path {name!r}", partial(_rename_in_manifest, name)
    huge = 2**62
    edits: dict[str, Callable[[dict[str, Any]], Any]] = {
        "version 1": lambda m: m.update(version=1),
        "version text": lambda m: m.update(version="1"),
        "no version": lambda m: m.pop("version"),
        "unknown key": lambda m: m.update(surprise=1),
        "world size 0": lambda m: m.update(world_size=0),
        "world size text": lambda m: m.update(world_size="two"),
        "ranks outside": lambda m: m.update(ranks=[5]),
        "size huge": lambda m: m["files"][0].update(size=huge),
        "size negative": lambda m: m["files"][0].update(size=-1),
        "sums short": lambda m: m["files"][0].update(sums=[]),
        "sums number": lambda m: m["files"][0].update(sums=[1]),
        "file twice": lambda m: m["files"].append(m["files"][0]),
        "file case": lambda m: m["files"].append(
            {**m["files"][0], "name": m["files"][0]["name"].upper()}
        ),
        "file is manifest": lambda m: m["files"][0].update(name=MANIFEST_NAME),
        "file of stranger": lambda m: m["files"][0].update(component="stranger"),
        "file of rank 9": lambda m: m["files"][0].update(rank=9),
        "component without file": lambda m: m["components"].update(
            ghost={"kind": "model"}
        ),
        "component kind": lambda m: m["components"]["model"].update(kind=3),
        "component gone": lambda m: m["components"].pop("model"),
        "rank file gone": lambda m: m["components"]["model"].update(per_rank=True),
        "more ranks": lambda m: m.update(world_size=3, ranks=[0, 1, 2]),
        "files text": lambda m: m.update(files="all"),
        "no files": lambda m: m.update(files=[]),
        "components list": lambda m: m.update(components=[]),
        "missing file": lambda m: m["files"].append(
            {**m["files"][0], "name": "absent.bin"}
        ),
    }
    for label, edit in edits.items():
        yield f"manifest: {label}", partial(_reseal_with, edit)
    for label, raw in (
        ("deep", b"[" * 200_000),
        ("empty", b""),
        ("text", b"hello"),
        ("null", b"null"),
        ("list", b"[]"),
    ):
        yield f"manifest is {label}", partial(_write_manifest, raw)
    yield "file links outside", _link_outside


def _rename_in_manifest(name: str, folder: Path) -> None:
    reseal(folder, lambda m: m["files"][0].update(name=name))


def _reseal_with(edit: Callable[[dict[str, Any]], None], folder: Path) -> None:
    reseal(folder, edit)


def _write_manifest(raw: bytes, folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes(raw)


def _link_outside(folder: Path) -> None:
    path = folder / "model.safetensors"
    shutil.copy(path, folder.parent / "outside")
    path.unlink()
    path.symlink_to(folder.parent / "outside")


def fuzzed_data(rounds: int) -> Iterator[Mutation]:
    """Bytes changed at random inside files whose checksums fit afterwards."""
    for seed in range(rounds):
        rng = random.Random(seed)
        name = rng.choice(
            [
                "optimizer.bin",
                "scheduler.bin",
                "model.safetensors",
                "random_states_0.safetensors",
            ]
        )

        def mutate(folder: Path, name: str = name, rng: random.Random = rng) -> None:
            raw = bytearray((folder / name).read_bytes())
            for _ in range(rng.choice((1, 2, 8, 64))):
                raw[
                    rng.randrange(
                        len(raw) if rng.random() < 0.5 else min(len(raw), 1500)
                    )
                ] = rng.randrange(256)
            (folder / name).write_bytes(bytes(raw))
            reseal(folder)

        yield f"fuzz {seed} of {name}", mutate


def try_loading(root: Path, objects: TinyRun) -> str:
    """What loading comes to: the name of the typed error, or "loaded"."""
    initial_fingerprint = objects.fingerprint()
    try:
        with open_checkpoint(LocalStore(root), NAME, LocalComm()) as checkpoint:
            plan = plan_restore(
                run_objects_of(objects), objects.models, checkpoint, 0, 1, strict=True
            )
            current_fingerprint = objects.fingerprint()
            assert all(
                torch.equal(a, b)
                for a, b in zip(initial_fingerprint, current_fingerprint, strict=True)
            ), "planning changed the model"
            del plan
            restored_objects = TinyRun()
            with agreeing(LocalComm(), "loading") as together:
                plan_restore(
                    run_objects_of(restored_objects),
                    restored_objects.models,
                    checkpoint,
                    0,
                    1,
                    strict=True,
                ).apply(together)
        return "loaded"
    except HastenError as error:
        current_fingerprint = objects.fingerprint()
        assert all(
            torch.equal(a, b)
            for a, b in zip(initial_fingerprint, current_fingerprint, strict=True)
        ), "an error changed the model"
        return (
            type(error).__name__
            if len(str(error)) > 30
            else f"too short to help: {error}"
        )


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    outcomes: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=FAST) as scratch:
        canary = Path(scratch) / "code-was-executed"
        good = Path(scratch) / "good"
        write_victim(good)
        objects = TinyRun()
        assert try_loading(good, objects) == "loaded"
        files = sorted(
            p.name for p in (good / NAME).iterdir() if p.name != MANIFEST_NAME
        )
        mutations = [
            *blind_mutations(files),
            *pickles(canary),
            *headers(),
            *manifests(),
            *fuzzed_data(rounds),
        ]
        for label, mutate in mutations:
            root = Path(scratch) / "now"
            shutil.copytree(good, root)
            mutate(root / NAME)
            try:
                outcome = try_loading(root, objects)
            except BaseException as error:
                problems.append(f"{label}: {type(error).__name__}: {error}")
                outcome = "PROBLEM"
            if outcome == "loaded" and not label.startswith(HARMLESS):
                problems.append(f"{label}: loaded")
            outcomes[outcome] += 1
            shutil.rmtree(root)
            if canary.exists():
                problems.append(f"{label}: CODE WAS EXECUTED")
                canary.unlink()
    json.dump(
        {"files": sum(outcomes.values()), "outcomes": outcomes, "problems": problems},
        sys.stdout,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
