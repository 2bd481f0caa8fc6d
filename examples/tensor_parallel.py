"""Split the layers of a model over processes: each holds a part of every wide weight and computes that part.

hasten launch --num_processes 2 examples/tensor_parallel.py
hasten launch --cpu --num_processes 4 --tp_size 2 examples/tensor_parallel.py --steps 20 --width 64
"""

from __future__ import annotations

import argparse

import torch
from char_lm import ALPHABET, Sources, read_sources
from char_parts import Block, Report, print_share
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, set_seed

PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
"""Layers that are split by their outputs, each followed by a layer that is split by its inputs."""


class Writer(nn.Module):
    """A character model of such blocks."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(ALPHABET, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.Sequential(*(Block(width, head_dim=16) for _ in range(depth)))
        self.head = nn.Linear(width, ALPHABET, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        positions = torch.arange(codes.shape[-1], device=codes.device)
        return self.head(self.blocks(self.embed(codes) + self.position(positions)))


def main() -> None:
    """Train a character model whose layers are split over processes."""
    parser = argparse.ArgumentParser(
        description="Train a model whose layers are split over the processes."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--tp_size", type=int, default=-1, help="processes that share a layer (-1: all)"
    )
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(tp_size=args.tp_size, tp_plan=PLAN)
    )

    model = Writer(args.width, args.depth, args.context)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Sources(read_sources(1.0), args.context),
        batch_size=args.batch_size,
        shuffle=True,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    print_share(accelerator, model, num_parameters)

    report = Report(accelerator)
    # processes that share layers get the same codes
    for _, codes in zip(range(args.steps), loader, strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten()
        )
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report.add(loss)
    report.end()
    accelerator.end_training()


if __name__ == "__main__":
    main()
