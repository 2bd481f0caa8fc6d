"""Runs of Ray Train for the tests, each in a process of its own: python -m tests.on_ray.programs NAME FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

import hasten.ray
from hasten import Accelerator
from hasten.errors import PeerFailedError
from tests.on_ray.toy import Numbered, network

BATCH: Final = 4
EPOCHS: Final = 2
SAVE_EVERY: Final = 2


def train_loop(config: Mapping[str, Any]) -> None:
    """Train with a checkpoint every two updates; `die_at` and `rank` say who is killed once, after which update."""
    folder = Path(config["folder"])
    accelerator = Accelerator(strategy=config.get("strategy", "auto"))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    was_resumed = hasten.ray.resume(accelerator)
    rank, size = accelerator.process_index, accelerator.num_processes
    note(
        folder / "starts.jsonl",
        rank=rank,
        size=size,
        resumed=was_resumed,
        step=optimizer.num_updates,
    )
    for epoch in accelerator.epochs(EPOCHS):
        for inputs, labels, indices in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            step = optimizer.num_updates
            note(
                folder / f"steps-{rank}.jsonl",
                step=step,
                epoch=epoch,
                rank=rank,
                size=size,
                samples=indices.tolist(),
            )
            if step % SAVE_EVERY == 0:
                hasten.ray.report(accelerator, {"loss": loss, "step": step}, save=True)
            die_once(config, folder, rank, step)
    hasten.ray.report(
        accelerator, {"loss": loss, "step": optimizer.num_updates}, save=True
    )
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(weights, folder / "weights.pt")
    accelerator.end_training()


def die_once(config: Mapping[str, Any], folder: Path, rank: int, step: int) -> None:
    """Kill this worker without a word, the first time it gets here; or wait until its machine is taken away."""
    if step != config.get("die_at") or (folder / "died").exists():
        return
    if rank == 1:
        (folder / "died").touch()
        if config.get("machine_goes"):
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


def note(file: Path, **facts: object) -> None:
    """Append one line to a file."""
    with file.open("a") as stream:
        stream.write(json.dumps(facts) + "\n")


def run(
    folder: Path,
    workers: int | tuple[int, int] = 2,
    max_failures: int = 0,
    **config: object,
) -> dict[str, Any]:
    """Fit a trainer and return its metrics and number of checkpoints."""
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = hasten.ray.fit(trainer)
    return {
        "metrics": result.metrics,
        "checkpoint": str(result.checkpoint.path),
        "kept": len(result.best_checkpoints),
    }


def plain(folder: Path) -> dict[str, Any]:
    """Two workers, nothing goes wrong."""
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    return run(folder)


def killed(folder: Path) -> dict[str, Any]:
    """Rank 1 is killed in the middle of the first epoch, between two checkpoints."""
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    return run(folder, max_failures=1, die_at=5)


def lost(folder: Path) -> dict[str, Any]:
    """Rank 1 is killed and nothing may be restarted."""
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        run(folder, die_at=3)
    except PeerFailedError as error:
        return {"error": str(error), "cause": type(error.__cause__).__name__}
    return {}


def elastic(folder: Path) -> dict[str, Any]:
    """One of two machines goes away; one worker continues with sharded weights of two."""
    # Ray may count the machine that has just gone, and waits this long for two workers before it starts one
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "60"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)

    def take_away() -> None:
        while not (folder / "died").exists():
            time.sleep(0.1)
        cluster.remove_node(second)

    thread = threading.Thread(target=take_away, daemon=True)
    thread.start()
    try:
        return run(
            folder,
            workers=(1, 2),
            max_failures=2,
            strategy="fsdp",
            die_at=5,
            machine_goes=True,
        )
    finally:
        thread.join(30)
        ray.shutdown()
        cluster.shutdown()


PROGRAMS: Final[tuple[Callable[[Path], dict[str, Any]], ...]] = (
    plain,
    killed,
    lost,
    elastic,
)


if __name__ == "__main__":
    # workers import the training loop by the name of this file
    programs, where = import_module("tests.on_ray.programs").PROGRAMS, Path(sys.argv[2])
    selected_program = next(
        program for program in programs if program.__name__ == sys.argv[1]
    )
    (where / "result.json").write_text(json.dumps(selected_program(where)))
