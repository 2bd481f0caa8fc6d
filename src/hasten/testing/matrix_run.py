"""Program of one cell of `hasten test --matrix`: a small training in hasten and in plain torch, and their difference.

Run as `hasten launch … -m hasten.testing.matrix_run FILE`; the first process writes FILE.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hasten.accelerator.facade import Accelerator
from hasten.progress.meter import MemoryGauge
from hasten.runtime.mesh_plan import BATCH, Axis
from hasten.testing.toys import TinyLM, next_token_loss, seeded

STEPS: Final = 8
ROWS: Final = 8
LENGTH: Final = 16
VOCAB: Final = 32
# For a loss of about 3.5: fp32 differs by the order of sums, the others by their number of digits.
TOLERANCES: Final = (("no", 2e-5), ("bf16", 5e-2), ("fp16", 2e-2))


def _model() -> TinyLM:
    return seeded(lambda: TinyLM(vocab=VOCAB, width=16, heads=4, depth=2, context=LENGTH))


def _batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return tokens, next tokens and positions of each batch."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    places = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous(), places) for row in rows]


def _loss_of(model: Any, batch: Any) -> Tensor:  # Any: the prepared model; a tuple of tensors
    tokens, labels, places = batch
    return next_token_loss(model(tokens, places).float(), labels)


def plain() -> list[float]:
    """Return the losses in plain torch, in this process alone, in full precision."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for batch in _batches():
        loss = _loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained(accelerator: Accelerator) -> list[float]:
    """Return the losses of the same loop under the settings of this run. Ranks: every rank."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer)  # Any: the prepared model and optimizer
    net, stepper = prepared
    mesh, losses = accelerator.ctx.mesh, []
    readers, reader = mesh.size(*BATCH), mesh.index(accelerator.process_index, *BATCH)
    for whole in _batches():
        batch = [part.chunk(readers)[reader].to(accelerator.device, copy=True) for part in whole]
        with accelerator.accumulate(net), accelerator.context_parallel(batch, [1, 1, 1], labels=None):
            loss = accelerator.forward_backward(net, tuple(batch), _loss_of)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def main(out: str) -> int:
    """Train, compare, and write the results."""
    accelerator = Accelerator()
    gauge = MemoryGauge(accelerator.device)
    began = time.perf_counter()
    losses = trained(accelerator)
    seconds = time.perf_counter() - began
    expected = plain()
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    used = gauge.used_bytes() or 0
    found = {
        "losses": losses,
        "expected": expected,
        "difference": worst,
        "tolerance": dict(TOLERANCES)[accelerator.config.mixed_precision],
        "seconds": seconds,
        "megabytes": used / 1e6,
        "axes": {str(axis): accelerator.ctx.mesh.size(axis) for axis in Axis},
        "strategy": accelerator.strategy,
    }
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
