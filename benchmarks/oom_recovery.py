"""A run whose longest batches do not fit into the GPU, beside the same run that fits: losses, splits and time.

    python benchmarks/oom_recovery.py                    # one GPU, about a minute
    python benchmarks/oom_recovery.py --out FOLDER

A small language model trains in float32 on batches of different lengths through `accelerator.run_step`, once with the whole GPU
and once with most of it taken by another tensor, so that the longest batches run out of memory, are split, and go on. Ends with
an error when a loss differs by more than 1e-5 or no batch had to be split.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from loading import versions
from recording import RESULTS, record
from sharding import Size, Writer

from hasten import Accelerator

SIZE = Size(vocab=32000, width=512, heads=8, depth=8, context=2048, rows=16)
LENGTHS = (256, 512, 2048, 128, 1024, 2048, 384, 1536, 2048, 256, 1792, 640)
TOLERANCE = 1e-5


def train(ballast_share: float) -> dict[str, Any]:
    """Losses of a run, the largest batch part it used, and its seconds."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    with accelerator.device:
        net = Writer(SIZE)
    made = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, SIZE.vocab, (SIZE.rows, length), generator=made) for length in LENGTHS]
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-4))
    free = torch.cuda.mem_get_info()[0]
    ballast = torch.empty(int(free * ballast_share), dtype=torch.uint8, device=accelerator.device)
    losses: list[float] = []

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens)
        accelerator.backward(loss)
        return loss.detach()

    torch.cuda.synchronize()
    began = time.perf_counter()
    for tokens in batches * 2:
        loss = accelerator.run_step(step, tokens.to(accelerator.device))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    left = (free - ballast.nbytes) / 2**30
    size = accelerator._retrying.rows or SIZE.rows
    accelerator.end_training()
    return {"losses": losses, "seconds": seconds, "free_gib": left, "samples_at_once": size}


def main() -> None:
    """Run both and write oom_recovery.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave", type=float, default=9.0, help="GiB that the second run finds free")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")
    free = torch.cuda.mem_get_info()[0] / 2**30
    fits = train(0.0)
    gc.collect()
    torch.cuda.empty_cache()
    splits = train(max(0.0, 1 - args.leave / free))
    apart = max(abs(a - b) for a, b in zip(fits["losses"], splits["losses"], strict=True))
    result = {"versions": versions("cuda"), "fits": fits, "does not fit": splits, "largest_difference": apart}
    rows = [
        f"| {name} | {run['free_gib']:.0f} | {run['samples_at_once']} | {run['losses'][0]:.5f} | {run['losses'][-1]:.5f} | {run['seconds']:.1f} |"
        for name, run in (("fits", fits), ("does not fit", splits))
    ]
    page = [
        "# Out of memory in place", "", ", ".join(f"{k} {v}" for k, v in versions("cuda").items()), "",
        f"{len(LENGTHS) * 2} updates, {SIZE.rows} sequences of 128 to 2048 tokens, float32; largest difference of a loss {apart:.1e}.", "",
        "| run | GiB free | samples at once | first loss | last loss | seconds |", "|---|---|---|---|---|---|", *rows,
    ]  # fmt: skip
    record("oom_recovery", "cuda", result, "\n".join(page), versions("cuda"), args.out)
    if apart > TOLERANCE or splits["samples_at_once"] == fits["samples_at_once"]:
        raise SystemExit(
            f"losses {apart:.1e} apart, {splits['samples_at_once']} samples at once: not what was to be shown"
        )


if __name__ == "__main__":
    main()
