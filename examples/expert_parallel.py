"""Divide the experts of a mixture among processes: tokens are sent to the process that holds the experts chosen for them.

hasten launch --num_processes 2 examples/expert_parallel.py
hasten launch --cpu --num_processes 4 examples/expert_parallel.py --ep_size 2 --steps 20 --width 32
"""

from __future__ import annotations

import argparse

import torch
from char_lm import ALPHABET, Sources, read_sources
from char_parts import Report, print_share
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, set_seed


class Experts(nn.Module):
    """Perceptrons whose weights are stacked: the experts are the first dimension of each parameter."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 4 * width, width) * width**-0.5)
        self.down = nn.Parameter(
            torch.randn(number, width, 4 * width) * (4 * width) ** -0.5
        )

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token."""
        out = torch.zeros_like(hidden)
        for expert in expert_ids.unique().tolist():
            tokens, slots = torch.where(expert_ids == expert)
            expert_outputs = F.linear(
                F.gelu(F.linear(hidden[tokens], self.up[expert])), self.down[expert]
            )
            out = out.index_add(
                0, tokens, (expert_outputs * weights[tokens, slots, None]).to(out.dtype)
            )
        return out


class Block(nn.Module):
    """Causal mixing of neighbouring characters, and a router that sends each of them to two experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, kernel_size=4)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after this block."""
        x = x + self.mix(F.pad(self.norm_1(x).transpose(1, 2), (3, 0))).transpose(1, 2)
        hidden = self.norm_2(x).flatten(0, 1)
        weights, expert_ids = self.router(hidden).softmax(-1).topk(2, -1)
        return x + self.experts(hidden, expert_ids, weights).view_as(x)


class Writer(nn.Module):
    """A character model of such blocks."""

    def __init__(self, width: int, depth: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, width)
        self.blocks = nn.Sequential(*(Block(width, experts) for _ in range(depth)))
        self.head = nn.Linear(width, ALPHABET, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        return self.head(self.blocks(self.embed(codes)))


def main() -> None:
    """Train a character model whose experts are divided among processes."""
    parser = argparse.ArgumentParser(
        description="Train a mixture whose experts are divided among the processes."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--ep_size",
        type=int,
        default=-1,
        help="processes that share the experts (-1: all)",
    )
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(ep_size=args.ep_size)
    )

    model = Writer(args.width, args.depth, args.experts)
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
