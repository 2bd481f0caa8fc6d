"""Divide the layers of a model over processes: each holds a stage, and micro-batches pass through all of them.

hasten launch --num_processes 2 examples/pipeline_parallel.py
hasten launch --cpu --num_processes 4 examples/pipeline_parallel.py --pp_size 2 --schedule zbv_zero_bubble --steps 20
"""

from __future__ import annotations

import argparse

import torch
from char_lm import Sources, read_sources
from char_parts import Report
from tensor_parallel import Writer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import Accelerator, ParallelismConfig, PipelineParallelConfig, set_seed


def loss_of(model: nn.Module, codes: Tensor) -> Tensor:
    """Return the loss of a batch, as in any loop; the accelerator calls it for every micro-batch."""
    return F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())


def main() -> None:
    """Train a character model whose blocks are divided over processes."""
    parser = argparse.ArgumentParser(
        description="Train a model whose blocks are divided over the processes."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument(
        "--pp_size",
        type=int,
        default=-1,
        help="processes the blocks are divided over (-1: all)",
    )
    parser.add_argument(
        "--schedule",
        default="1f1b",
        help="gpipe, 1f1b, interleaved_1f1b, zbv_zero_bubble, ...",
    )
    args = parser.parse_args()
    set_seed(0)
    handler = PipelineParallelConfig(schedule=args.schedule)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=args.pp_size, pp_handler=handler)
    )

    model = Writer(args.width, args.depth, args.context)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Sources(read_sources(1.0), args.context)
    loader = DataLoader(text, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_local_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"process {accelerator.process_index} holds {num_local_parameters:,} of {num_parameters:,} parameters ({num_local_parameters / num_parameters:.0%})",
        flush=True,
    )

    report = Report(accelerator)
    # processes of one pipeline get the same codes
    for _, codes in zip(range(args.steps), loader, strict=False):
        optimizer.zero_grad()
        # instead of model(...) and backward
        loss = accelerator.forward_backward(model, codes, loss_of)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report.add(loss)
    report.end()

    # a call without gradients passes through the stages too; every process gets the result
    with torch.no_grad():
        best = model(codes[:1, :-1]).argmax(-1)
    accelerator.print(
        "it reads on:", "".join(map(chr, best[0, -20:].tolist())).encode()
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
