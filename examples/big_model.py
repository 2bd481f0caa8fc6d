"""Run a model larger than the device: built without weights, placed by a budget, streamed from host memory and files.

python examples/big_model.py                              # an accelerator with 1 GB for weights
python examples/big_model.py --budget 2MB --host 2MB      # most of it on the disk
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hasten import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from hasten.bigmodel import infer_auto_device_map


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(torch.relu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """A stack of blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def main() -> None:
    """Read the arguments, and compare the models in a folder that is deleted afterwards."""
    parser = argparse.ArgumentParser(
        description="Run a model that does not fit on the device."
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument(
        "--budget",
        default="1GB",
        help="memory for weights on the accelerator, if there is one",
    )
    parser.add_argument(
        "--host",
        default="4MB",
        help="memory for weights on the host; the rest stays on the disk",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-big-") as folder:
        compare_dispatched_model(args, Path(folder))


def compare_dispatched_model(args: argparse.Namespace, folder: Path) -> None:
    """Save a model, load it again within the budget, and compare what both compute."""
    torch.manual_seed(0)
    reference_model = Tower(args.width, args.depth).eval()
    # any folder in the Hub layout will do
    Accelerator().save_model(reference_model, folder / "model")
    ids = torch.randint(0, 1000, (1, 16))

    with init_empty_weights():  # takes no memory, whatever the size
        model = Tower(args.width, args.depth).eval()
    memory: dict[int | str, int | str] = {"cpu": args.host}
    if torch.accelerator.is_available():
        memory = {0: args.budget, "cpu": args.host}
    device_map = infer_auto_device_map(model, memory, no_split_module_classes=["Block"])
    print("device map:", device_map)
    load_checkpoint_and_dispatch(
        model, folder / "model", device_map, offload_folder=folder / "offload"
    )
    with torch.inference_mode():
        expected_output = reference_model(ids)
        for turn in range(3):
            start_time = time.perf_counter()
            dispatched_output = model(ids)
            # kernels of a GPU add in another order
            equal = torch.allclose(dispatched_output, expected_output, atol=1e-4)
            print(
                f"forward {turn}: {time.perf_counter() - start_time:.3f} s, equal to the whole model: {equal}"
            )


if __name__ == "__main__":
    main()
