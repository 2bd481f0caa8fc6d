"""A stream of tar files: WebDataset if it is installed, else an IterableDataset; stop anywhere, and resume at the next batch.

hasten launch --cpu --num_processes 2 examples/stream.py --stop_after 20
hasten launch --cpu --num_processes 2 examples/stream.py
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch
from digits import load_digit_sets
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hasten import Accelerator, set_seed


class Tars(IterableDataset[tuple[Tensor, int]]):
    """Reader of all tar files in order; `prepare` gives each process its share of the samples."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for file in self.files:
            with tarfile.open(file) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    assert content is not None, "the files hold no folders"
                    yield decode_sample(content.read())


def main() -> None:
    """Train on the stream, save every ten steps, and continue from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="Train on a stream of tar files.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop_after", type=int, help="stop after this many steps")
    parser.add_argument("--out", type=Path, default=Path("runs/stream"))
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    with accelerator.main_process_first():
        files = write_tars(args.out / "tars")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(open_stream(files), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpoint = args.out / "checkpoint"
    accelerator.register_for_checkpointing(counter := Counter())
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
        accelerator.print(f"resumed after step {counter.step}")

    for epoch in accelerator.epochs(args.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            counter.step += 1
            if counter.step % 10 == 0:
                accelerator.save_state(checkpoint)  # with the position in the stream
            if counter.step == args.stop_after:
                accelerator.print(f"stopped after step {counter.step}")
                accelerator.end_training()
                return
        accelerator.print(
            f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
        )
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    accelerator.print(f"{counter.step} steps; the weights add up to {total:.12f}")
    accelerator.end_training()


class Counter:
    """Number of steps, saved in checkpoints."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number of steps."""
        self.step = state["step"]


def open_stream(files: list[str]) -> IterableDataset[tuple[Tensor, int]]:
    """Return the samples of the files as a stream."""
    if importlib.util.find_spec("webdataset") is None:
        return Tars(files)
    import webdataset  # optional

    return webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None).map(
        lambda sample: decode_sample(sample["pt"])
    )


def decode_sample(data: bytes) -> tuple[Tensor, int]:
    """Return the image and the label of a file in a tar."""
    image, label = torch.load(io.BytesIO(data), weights_only=True)
    return image, label


def write_tars(folder: Path, num: int = 4) -> list[str]:
    """Write the training digits to tar files, once, and return their names."""
    files = [folder / f"{index}.tar" for index in range(num)]
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        rows = list(load_digit_sets()[0])
        for index, file in enumerate(files):
            with tarfile.open(file, "w") as tar:
                for key, (image, label) in enumerate(rows[index::num]):
                    torch.save((image, int(label)), buffer := io.BytesIO())
                    info = tarfile.TarInfo(f"{index}-{key:05}.pt")
                    info.size = buffer.tell()
                    buffer.seek(0)
                    tar.addfile(info, buffer)
    return [str(file) for file in files]


if __name__ == "__main__":
    main()
