"""A program that saves and resumes a run at a URL; run as a script, on an S3 server of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.places import locate
from hasten.errors import CheckpointError
from hasten.optional import need


def resumes(place: str) -> None:
    """A whole run saved at a URL, by number, in the background, and loaded again."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=place)
    model, optimizer = accelerator.prepare(*_pair())

    def hook(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        (Path(folder) / "note.txt").write_text("from a hook")

    accelerator.register_save_state_pre_hook(hook)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state()
    where = accelerator.save_state(blocking=False)
    accelerator.wait_for_saves()
    assert where.endswith("checkpoints/checkpoint_1")
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state()
    assert all(torch.equal(a, b) for a, b in zip(saved, model.parameters(), strict=True))
    store, name = locate(where)
    assert "note.txt" in {file.name for file in store.manifest(name).files}
    accelerator.end_training()


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def main() -> None:
    server = need("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    need("fsspec").filesystem("s3").mkdir("bucket")
    resumes("s3://bucket/run")
    try:
        Accelerator(cpu=True).save_state("s3://absent-bucket/run/out")
    except CheckpointError:
        sys.stdout.write("resumed\n")
    server.stop()


if __name__ == "__main__":
    main()
