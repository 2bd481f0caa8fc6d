"""Split long sequences over processes: each holds a part of every sequence, and attention spans the parts.

hasten launch --num_processes 2 examples/context_parallel.py --context 8192
hasten launch --cpu --num_processes 4 examples/context_parallel.py --cp_size 2 --steps 20 --width 64 --way ulysses
"""

from __future__ import annotations

import argparse

import torch
from char_lm import ALPHABET, Sources, read_sources
from char_parts import Block, Report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, TorchContextParallelConfig, set_seed


class Writer(nn.Module):
    """A character model that receives its positions, because a process holds a part of each sequence."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(ALPHABET, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.Sequential(*(Block(width, head_dim=16) for _ in range(depth)))
        self.head = nn.Linear(width, ALPHABET, bias=False)

    def forward(self, codes: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        return self.head(self.blocks(self.embed(codes) + self.position(positions)))


def main() -> None:
    """Train a character model on sequences that are split over processes."""
    parser = argparse.ArgumentParser(
        description="Train on sequences that are split over the processes."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument(
        "--cp_size",
        type=int,
        default=-1,
        help="processes that share a sequence (-1: all)",
    )
    parser.add_argument("--way", choices=("allgather", "ulysses"), default="allgather")
    args = parser.parse_args()
    set_seed(0)
    handler = TorchContextParallelConfig(cp_comm_strategy=args.way)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=args.cp_size, cp_handler=handler)
    )

    model = Writer(args.width, args.depth, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Sources(read_sources(1.0), args.context),
        batch_size=args.batch_size,
        shuffle=True,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    report = Report(accelerator)
    # processes that share a sequence get the same
    for step, codes in zip(range(args.steps), loader, strict=False):
        tokens, labels = codes[:, :-1].clone(), codes[:, 1:].clone()
        positions = torch.arange(tokens.shape[1], device=accelerator.device)
        optimizer.zero_grad()
        with accelerator.context_parallel([tokens, labels, positions], [1, 1, 0]):
            if step == 0:
                accelerator.print(
                    f"{tokens.shape[1]} of {codes.shape[1] - 1} tokens on each process"
                )
            loss = F.cross_entropy(
                model(tokens, positions).flatten(0, 1), labels.flatten()
            )
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report.add(loss)
    report.end()
    accelerator.end_training()


if __name__ == "__main__":
    main()
