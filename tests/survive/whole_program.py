"""Program of a replica under test: a loop with evaluation, metrics, a tracker and checkpoints."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from tests.survive.replica_program import Numbered, model_of, whole


def main() -> None:
    """Train with an evaluation and a checkpoint after each epoch."""
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    accelerator = Accelerator(
        cpu=True, project_dir=str(folder / "project"), log_with="jsonl"
    )
    accelerator.init_trackers("run")
    model = model_of(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(Numbered(240), batch_size=4, shuffle=True)
    test = DataLoader(Numbered(22), batch_size=4)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    name = os.environ["HASTEN_SURVIVE_REPLICA"]
    if accelerator.num_processes > 1:
        name = f"{name}.{accelerator.process_index}"
    log = (folder / f"replica-{name}-{os.getpid()}.jsonl").open("a", buffering=1)
    evaluations: list[tuple[int, float]] = []
    for _ in range(epochs):
        for x, y, _ in train:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            log.write("{}\n")
            # until a lost replica is back
            time.sleep(0.8 if (folder / "slow").exists() else 0.03)
        rows: list[int] = []
        losses: list[float] = []
        for x, y, index in test:
            with torch.no_grad():
                error = (model(x) - y).square().mean(1)
            gathered = accelerator.gather_for_metrics({"index": index, "error": error})
            rows += gathered["index"].tolist()
            losses += gathered["error"].tolist()
        assert sorted(rows) == list(range(22))
        evaluations.append((len(rows), sum(losses)))
        accelerator.log({"evaluation": sum(losses)}, step=len(evaluations))
        accelerator.save_state(folder / f"epoch-{len(evaluations)}")
    accelerator.end_training()
    weights = [whole(parameter).tolist() for parameter in model.parameters()]
    result = {
        "weights": weights,
        "evaluations": evaluations,
        "leads": accelerator.is_main_process,
    }
    (folder / f"result-{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
