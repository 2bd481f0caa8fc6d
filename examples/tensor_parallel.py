"""Split the layers of a model over processes: each holds a part of every wide weight and computes that part.

hasten launch --num_processes 2 examples/tensor_parallel.py
hasten launch --cpu --num_processes 4 --tp_size 2 examples/tensor_parallel.py --steps 20 --width 64
"""

from __future__ import annotations

import argparse

import torch
from char_lm import ALPHABET, Sources, read_sources
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, set_seed


class Block(nn.Module):
    """Attention and a perceptron; `-1` heads in a view, because a process sees only its share of them."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after this block."""
        h = self.norm_1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Writer(nn.Module):
    """A character model of such blocks."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(ALPHABET, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, head_dim=16) for _ in range(depth)))
        self.head = nn.Linear(width, ALPHABET, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        positions = torch.arange(codes.shape[-1], device=codes.device)
        return self.head(self.blocks(self.embed(codes) + self.position(positions)))


def main() -> None:
    """Train a character model whose layers are split over processes."""
    parser = argparse.ArgumentParser(description="Train a model whose layers are split over the processes.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--tp_size", type=int, default=-1, help="processes that share a layer (-1: all)")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=args.tp_size))

    model = Writer(args.width, args.depth, args.context)
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Sources(read_sources(1.0), args.context), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    accelerator.print(f"{whole:,} parameters, {held:,} of them ({held / whole:.0%}) on each process")

    first = last = 0.0
    for step, codes in zip(range(args.steps), loader, strict=False):  # processes that share layers get the same codes
        optimizer.zero_grad()
        loss = F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = accelerator.reduce(loss.detach(), "mean").item()
        first = first or last
        if step % 20 == 0:
            accelerator.print(f"step {step}: loss {last:.3f} (a guess among {ALPHABET} letters is 4.852)")
    accelerator.print(f"loss {first:.3f} -> {last:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
