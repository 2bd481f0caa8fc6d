"""States in the memory of machines: whatever one machine loses, all ranks go on from the newest step that everyone can have, to the bit.

Here a machine is a folder that some ranks share; real machines are killed in test_memory_copies.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, GradScalerKwargs
from hasten.checkpoint.format.manifest import MANIFEST_NAME
from hasten.errors import ConfigError
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 14


def settings_of(name: str) -> dict[str, Any]:
    match name:
        case "fsdp":
            return {"strategy": "fsdp"}
        case "hsdp":
            return {
                "strategy": "fsdp",
                "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2},
            }
        case "fp16":
            return {
                "mixed_precision": "fp16",
                "kwargs_handlers": [GradScalerKwargs(init_scale=128.0)],
            }
        case _:
            return {}


@dataclass
class Run:
    """A run from scratch, as a process begins it."""

    ctx: ProcessContext
    layout: str
    folder: Path
    every: int | None = 1
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.accelerator = Accelerator(
            context=self.ctx,
            project_dir=str(self.folder / "project"),
            checkpoint_in_memory=self.every,
            gradient_accumulation_steps=2,
            **settings_of(self.layout),
        )
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        g = torch.Generator().manual_seed(3)
        data = TensorDataset(
            torch.randn(48, 6, generator=g), torch.randn(48, 1, generator=g)
        )
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.net, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            net, optimizer, schedule, loader
        )

    def train(self, until: int, save_at: int = 0) -> None:
        """Go on to so many micro-steps, and ask for the batch after the last one; save on the way, if asked to."""
        while len(self.losses) < until:
            for x, y in self.loader:
                if len(self.losses) == until:
                    return
                with self.accelerator.accumulate(self.net):
                    loss = nn.functional.mse_loss(self.net(x), y)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
                if len(self.losses) == save_at:
                    self.accelerator.save_state()

    def fingerprint(self) -> list[Tensor]:
        """Everything that must be equal."""
        tensors = list(self.accelerator.unwrap_model(self.net).state_dict().values())
        tensors += [
            value for state in self.optimizer.state.values() for value in state.values()
        ]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [
            *(t.detach().clone() for t in local),
            torch.tensor(self.schedule.get_last_lr()),
        ]


@contextmanager
def on_machines(
    ctx: ProcessContext, folder: Path, count: int = 2
) -> Iterator[list[Path]]:
    """Machines for the ranks, in equal parts, with their folders in memory."""
    roots = [folder / f"memory-{i}" for i in range(count)]
    with env.restored_environment():
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
        os.environ["HASTEN_MEMORY_FOLDER"] = str(
            roots[ctx.rank * count // ctx.world.size]
        )
        yield roots


def die(ctx: ProcessContext, roots: list[Path], lost: list[int]) -> None:
    """End all processes; with some machines, their memory is gone as well. Ranks: every rank."""
    ctx.world.barrier("the end of the processes")
    if ctx.rank == 0:
        for root in roots:
            # the claims of processes that are no more
            for mark in root.glob("*/.user-*"):
                mark.unlink()
        for machine in lost:
            shutil.rmtree(roots[machine])
    ctx.world.barrier("the restart")


def updates(run: Run) -> int:
    return int(run.optimizer.num_updates)


def goes_on_like(uninterrupted: Run, run: Run) -> None:
    run.losses[:] = uninterrupted.losses[: 2 * updates(run)]
    run.train(STEPS)
    assert run.losses == uninterrupted.losses
    for actual, expected in zip(
        run.fingerprint(), uninterrupted.fingerprint(), strict=True
    ):
        assert torch.equal(actual, expected)


def one_machine_is_lost(ctx: ProcessContext, folder: Path, layout: str) -> None:
    if layout.endswith("sdp"):
        ctx = Accelerator(**settings_of(layout)).ctx  # with the mesh that shards need
    uninterrupted = Run(ctx, layout, folder, every=None)
    uninterrupted.train(STEPS)
    for stop, lost in ((2, [1]), (7, [0]), (12, [])):
        with on_machines(ctx, folder / f"at{stop}") as roots:
            first = Run(ctx, layout, folder / f"at{stop}")
            first.train(stop)
            assert updates(first) == stop // 2
            die(ctx, roots, lost)
            torch.manual_seed(999 + ctx.rank)
            second = Run(ctx, layout, folder / f"at{stop}")
            assert second.accelerator.load_state(must_exist=False)
            # not one update is lost when it was over
            assert updates(second) == stop // 2
            goes_on_like(uninterrupted, second)


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_lost_machine_costs_nothing_that_was_copied(
    ctx: ProcessContext, tmp_path: Path, layout: str
) -> None:
    one_machine_is_lost(ctx, tmp_path, layout)


@ranks(4)
@pytest.mark.exhaustive
def test_the_same_with_shards_and_replicas(ctx: ProcessContext, tmp_path: Path) -> None:
    one_machine_is_lost(ctx, tmp_path, "hsdp")


@ranks(2)
def test_the_same_with_a_loss_scale(ctx: ProcessContext, tmp_path: Path) -> None:
    one_machine_is_lost(ctx, tmp_path, "fp16")


@ranks(2)
def test_a_damaged_copy_leaves_the_one_before(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """Cut off while it was copied, or changed in memory: what is not as it was written is no copy."""
    uninterrupted = Run(ctx, "ddp", tmp_path, every=None)
    uninterrupted.train(STEPS)
    for kind in ("cut", "changed", "no manifest"):
        with on_machines(ctx, tmp_path / kind) as roots:
            Run(ctx, "ddp", tmp_path / kind).train(8)
            if ctx.rank == 0:
                for folder in (tmp_path / kind).glob(
                    "memory-*/0/ranks_0-0/checkpoint_4"
                ):
                    file = folder / "random_states_0.safetensors"
                    raw = file.read_bytes()
                    if kind == "no manifest":
                        (folder / MANIFEST_NAME).unlink()
                    else:
                        file.write_bytes(
                            raw[:-1]
                            if kind == "cut"
                            else raw[:-1] + bytes([raw[-1] ^ 1])
                        )
            die(ctx, roots, [])
            second = Run(ctx, "ddp", tmp_path / kind)
            assert second.accelerator.load_state(must_exist=False)
            assert updates(second) == 3
            goes_on_like(uninterrupted, second)


@ranks(2)
def test_without_copies_the_disk_is_taken_and_the_reason_logged(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    uninterrupted = Run(ctx, "ddp", tmp_path, every=None)
    uninterrupted.train(STEPS)
    with on_machines(ctx, tmp_path) as roots:
        first = Run(ctx, "ddp", tmp_path)
        # nothing yet, neither here nor there
        assert not first.accelerator.load_state(must_exist=False)
        first.train(10, save_at=6)
        die(ctx, roots, [])
        if ctx.rank == 0:
            shutil.rmtree(roots[0] / "0" / "ranks_1-1")
            shutil.rmtree(roots[1] / "0" / "ranks_1-1")
        ctx.world.barrier("lost")
        second = Run(ctx, "ddp", tmp_path)
        logger = logging.getLogger("hasten.extensions.memory_copies.part")
        logger.addHandler(handler)
        assert second.accelerator.load_state(must_exist=False)
        logger.removeHandler(handler)
        assert updates(second) == 3
        if ctx.rank == 0:
            assert any(
                "no machine holds the state that machine 1 had after update 5" in line
                for line in messages
            ), messages
        goes_on_like(uninterrupted, second)


@ranks(2)
def test_the_newer_one_is_taken_and_the_others_are_forgotten(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with on_machines(ctx, tmp_path) as roots:
        first = Run(ctx, "ddp", tmp_path, every=3)
        first.train(6)
        saved_path = first.accelerator.save_state()
        first.train(8)
        first.accelerator.save_state()  # update 4; the copy is of update 3
        die(ctx, roots, [])
        second = Run(ctx, "ddp", tmp_path, every=3)
        assert second.accelerator.load_state(must_exist=False)
        assert updates(second) == 4
        ctx.world.barrier("loaded")
        assert not list(tmp_path.glob("memory-*/0/ranks_*/checkpoint_*"))
        second.train(10)
        # back to update 3 by hand: what lies ahead is no longer this run's
        second.accelerator.load_state(saved_path)
        ctx.world.barrier("loaded again")
        die(ctx, roots, [])
        third = Run(ctx, "ddp", tmp_path, every=3)
        third.accelerator.load_state()
        assert updates(third) == 4


@ranks(2)
def test_two_accelerators_of_a_process_keep_their_own(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with on_machines(ctx, tmp_path) as roots:
        first, second = (
            Run(ctx, "ddp", tmp_path / "one"),
            Run(ctx, "ddp", tmp_path / "two"),
        )
        first.train(4)
        second.train(10)
        first.train(6)
        die(ctx, roots, [1])
        reloaded_runs = [Run(ctx, "ddp", tmp_path / name) for name in ("one", "two")]
        assert [
            bool(run.accelerator.load_state(must_exist=False)) for run in reloaded_runs
        ] == [True, True]
        assert [updates(run) for run in reloaded_runs] == [3, 5]


@ranks(1, 2)
def test_one_machine_keeps_copies_for_its_own_processes(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with on_machines(ctx, tmp_path, count=1) as roots:
        Run(ctx, "ddp", tmp_path).train(6)
        die(ctx, roots, [])
        second = Run(ctx, "ddp", tmp_path)
        assert second.accelerator.load_state(must_exist=False)
        assert updates(second) == 3


@ranks(2)
def test_too_little_memory_is_refused_with_the_numbers(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    small = tmp_path / "memory-0"
    small.mkdir(exist_ok=True)
    if (
        ctx.rank == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(small)]
        ).returncode
    ):
        small = Path()
    try:
        if not all(ctx.world.all_gather_object(small != Path())):
            return  # not root
        with (
            on_machines(ctx, tmp_path),
            pytest.raises(
                ConfigError,
                match=r"checkpoint_in_memory needs up to 0\.\d MB .* where 0\.0 MB are free",
            ),
        ):
            Run(ctx, "ddp", tmp_path).train(4)
    finally:
        ctx.world.barrier("done")
        if ctx.rank == 0:
            subprocess.run(["umount", str(tmp_path / "memory-0")], capture_output=True)
