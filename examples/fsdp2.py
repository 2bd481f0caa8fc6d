"""Shard a model over processes with FSDP2: each holds a part of every weight, gradient and optimizer state.

hasten launch --num_processes 2 examples/fsdp2.py
hasten launch --cpu --num_processes 4 examples/fsdp2.py --steps 20 --width 128
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from char_lm import ALPHABET, Sources, Writer, read_sources
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, FullyShardedDataParallelPlugin, set_seed


def main() -> None:
    """Train a sharded character model, and save whole weights that plain torch can load."""
    parser = argparse.ArgumentParser(
        description="Train a model that is sharded over the processes."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fsdp2"), help="folder for the weights"
    )
    args = parser.parse_args()
    set_seed(0)
    # the classes named here are gathered, used and freed one by one
    sharding = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=("TransformerEncoderLayer",),
    )
    accelerator = Accelerator(
        strategy="fsdp", fsdp_plugin=sharding, project_dir=args.out
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
    num_local_parameters = sum(
        local_shard(parameter).numel() for parameter in model.parameters()
    )
    accelerator.print(
        f"{num_parameters:,} parameters, {num_local_parameters:,} of them ({num_local_parameters / num_parameters:.0%}) on each process"
    )

    model.train()
    first = last = 0.0
    for step, codes in zip(range(args.steps), loader, strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten()
        )
        accelerator.backward(loss)
        # the norm of the whole gradient, not of a shard
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = accelerator.reduce(loss.detach(), "mean").item()
        first = first or last
        if step % 20 == 0:
            accelerator.print(
                f"step {step}: loss {last:.3f} (a guess among {ALPHABET} letters is 4.852)"
            )
    # unsharded while they are written
    accelerator.save_model(model, args.out / "model")
    accelerator.print(
        f"loss {first:.3f} -> {last:.3f}; whole weights are in {args.out / 'model'}"
    )
    accelerator.end_training()


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process holds."""
    shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    assert isinstance(shard, torch.Tensor)
    return shard


if __name__ == "__main__":
    main()
