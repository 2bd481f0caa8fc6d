"""An exception at any call inside save and load, on any rank: the same error everywhere, no hang, nothing half loaded."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import Accelerator
from hasten.checkpoint.store.local_store import locate
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.runtime.context import ProcessContext
from hasten.state.load_source import is_complete
from hasten.testing.pool import ranks

pytestmark = pytest.mark.timed

HOME: Final = str(Path(hasten.__file__).parent) + "/"
MEETING: Final = ("comm/", "comm/agreement.py", "testing/", "runtime/logs.py")
"""What ranks agree through cannot be used to agree on its own failure; and errors in log records are printed."""
OUTER_CALLS: Final = frozenset(
    {
        *(
            "Accelerator.save_state",
            "Saving.save_state",
            "Accelerator.load_state",
            "Saving.load_state",
        ),
    }
)
"""A rank that fails on its way to the call never arrives: the others name it when checkpoint_arrival_s is over."""
OUTSIDE: Final = frozenset(
    {
        # a thread that was started and does not run at all
        "AsyncWriter.submit.<locals>.run",
        # arithmetic that torch's archive writer calls; it reports a failure there in words of its own
        *(
            f"_BlankArchive.{name}"
            for name in (
                "write",
                "seek",
                "tell",
                "flush",
                "read",
                "close",
                "seekable",
                "writable",
            )
        ),
    }
)
LONGEST_S: Final = 10.0
Site = tuple[str, str, str, int]


class Injected(Exception):
    """A failure that nobody expects."""


class InjectedOnDisk(OSError):
    """A failure of the kind that file systems have."""


class Calls:
    """Notes every call of a function of hasten, on every thread, and raises at one of them."""

    def __init__(
        self, target: Site | None = None, kind: type[Exception] = Injected
    ) -> None:
        self.sites: dict[Site, None] = {}
        self._target = target
        self._kind = kind

    def __enter__(self) -> Calls:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOME):
            return
        file = code.co_filename.removeprefix(HOME)
        if (
            file.startswith(MEETING)
            or code.co_qualname in OUTER_CALLS
            or code.co_qualname in OUTSIDE
        ):
            return
        caller = frame.f_back
        caller_site = (
            ("", 0)
            if caller is None
            else (Path(caller.f_code.co_filename).name, caller.f_lineno)
        )
        site = (file, code.co_qualname, *caller_site)
        self.sites[site] = None
        if site == self._target:
            self._target = None
            raise self._kind(f"injected into {code.co_qualname}")


@dataclass
class Counter:
    """A registered object whose state differs from rank to rank."""

    rank: int
    values: list[int] = field(default_factory=list)
    average: Tensor = field(default_factory=lambda: torch.zeros(3))

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "values": self.values, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank = state["rank"]
        self.values = list(state["values"])
        self.average = state["average"]


class Run:
    """A run in the middle of an epoch and of an accumulation window."""

    def __init__(
        self, ctx: ProcessContext, folder: Path, strategy: str, precision: str
    ) -> None:
        torch.manual_seed(3)
        settings: dict[str, Any] = {}
        if strategy == "fsdp":
            settings = {
                "strategy": "fsdp",
                "fsdp_plugin": FullyShardedDataParallelPlugin(),
            }
        self.accelerator = Accelerator(
            context=ctx,
            project_dir=str(folder),
            mixed_precision=precision,
            gradient_accumulation_steps=2,
            **settings,
        )
        norm = nn.BatchNorm1d(5) if strategy == "ddp" else nn.LayerNorm(5)
        model = nn.Sequential(nn.Linear(4, 5), norm, nn.Dropout(0.1), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(240, 4))
        self.model, self.optimizer, self.scheduler, self.loader = (
            self.accelerator.prepare(
                model,
                optimizer,
                torch.optim.lr_scheduler.StepLR(optimizer, 2),
                DataLoader(data, 4, shuffle=True),
            )
        )
        self.counter = Counter(ctx.rank)
        self.accelerator.register_for_checkpointing(self.counter)
        self.batches = iter(self.loader)

    def train(self, micro_steps: int) -> None:
        for _ in range(micro_steps):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch[0]).pow(2).mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.values.append(self.counter.rank)
            self.counter.average = self.counter.average + 1

    def digest(self) -> dict[str, str]:
        """Every bit that a load changes."""
        inner = self.accelerator.unwrap_model(self.model)
        names = {id(p): name for name, p in inner.named_parameters()}
        clock = self.accelerator._clock
        track = self.loader.parts.iteration
        scaler = self.accelerator._precision.scaler
        state = {
            names[id(p)]: {key: bits(value) for key, value in values.items()}
            for p, values in self.optimizer.state.items()
        }
        groups = [
            {k: bits(v) for k, v in g.items() if k != "params"}
            for g in self.optimizer.param_groups
        ]
        random_states = [
            bits(torch.get_rng_state()),
            repr(random.getstate()),
            repr(np.random.get_state()),
        ]
        return {
            "model": repr(
                {key: bits(value) for key, value in inner.state_dict().items()}
            ),
            "gradients": repr({names[id(p)]: bits(p.grad) for p in inner.parameters()}),
            "optimizer": repr(
                (state, groups, self.optimizer.num_updates, self.optimizer.num_attempts)
            ),
            "scheduler": repr((self.scheduler.state_dict(), self.scheduler._seen)),
            "scaler": repr(
                None
                if scaler is None
                else {k: bits(v) for k, v in sorted(vars(scaler).items())}
            ),
            "generators": hashlib.sha256(repr(random_states).encode()).hexdigest(),
            "loader": repr(
                (self.loader.state_dict(), id(track.start), track.steps, track.fresh)
            ),
            "clock": repr(
                [
                    (name, getattr(clock, name))
                    for name in clock.__slots__
                    if name != "comm"
                ]
            ),
            "registered": repr(
                {key: bits(value) for key, value in self.counter.state_dict().items()}
            ),
        }


def bits(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        raw = (
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        return (
            f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(raw).hexdigest()[:16]}"
        )
    return repr(value)


@dataclass
class Attack:
    """One kind of operation on one run, attacked at every call or at some of them."""

    ctx: ProcessContext
    run: Run
    folder: Path
    operation: str
    loaded: dict[str, str] = field(default_factory=dict)
    """The state after a load that succeeded."""

    def act(self) -> None:
        accelerator = self.run.accelerator
        if self.operation == "load":
            accelerator.load_state(str(self.folder))
        else:
            accelerator.save_state(
                str(self.folder),
                blocking=self.operation == "save",
                metrics={"loss": 0.5},
            )
            # waiting is each rank's own; the thread that writes is still watched
            sys.setprofile(None)
            accelerator.wait_for_saves()

    def survive(self, few: int | None, kind: type[Exception]) -> int:
        """Attack `few` calls (None: all of them), spread over the operation and over the ranks; how many it were."""
        world = self.ctx.world
        with Calls() as calls:
            self.act()
        self.loaded = self.run.digest()
        self.run.train(3)
        sites: list[list[Site]] = world.all_gather_object(sorted(calls.sites))
        plan = [
            (victim, site)
            for victim, rank_sites in enumerate(sites)
            for site in rank_sites
        ]
        if few is not None:
            random.Random(len(plan) + world.size).shuffle(plan)
            plan = plan[:few]
        for victim, site in plan:
            self._attack(victim, site, kind)
        return len(plan)

    def _attack(self, victim: int, site: Site, kind: type[Exception]) -> None:
        world = self.ctx.world
        initial_state = self.run.digest()
        outcome, started = "", time.monotonic()
        with Calls(site if world.rank == victim else None, kind):
            try:
                self.act()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
        took = time.monotonic() - started
        final_state = self.run.digest()
        outcomes: list[str] = world.all_gather_object(outcome)
        where = f"{self.operation}, rank {victim} of {world.size}, {site}"
        assert len(set(outcomes)) == 1, f"{where}: ranks ended differently: {outcomes}"
        assert took < LONGEST_S, f"{where}: took {took:.1f} s"
        if outcome:
            assert "injected into" in outcome, (
                f"{where}: another error than the injected one: {outcome}"
            )
            changed = [
                key for key in initial_state if initial_state[key] != final_state[key]
            ]
            # a rank that failed first may be unchanged while another has applied its state
            has_changed = any(world.all_gather_object(bool(changed)))
            if self.operation == "load" and has_changed:
                self._load_again(outcome, where)
            else:
                assert not changed, (
                    f"{where}: {changed} changed although it failed with {outcome}"
                )
        elif self.operation == "load":
            self.run.train(3)  # it was overcome, so the state is the checkpoint's now
        store, name = locate(str(self.folder))
        assert is_complete(store, name), f"{where}: the checkpoint is damaged"

    def _load_again(self, outcome: str, where: str) -> None:
        """A load that failed after its checks says so, and another one restores everything."""
        self.act()
        restored = self.run.digest()
        changed = [
            key
            for key in restored
            if restored[key] != self.loaded[key]
            and key not in ("loader", "clock", "scaler")
        ]
        assert not changed, (
            f"{where}: {changed} differ after loading again, after {outcome}"
        )
        self.run.train(3)


def attack(
    ctx: ProcessContext,
    folder: Path,
    strategy: str,
    few: int | None,
    precision: str = "no",
    kinds: tuple[str, ...] = ("save", "background", "load"),
    error: type[Exception] = Injected,
) -> int:
    run = Run(ctx, folder, strategy, precision)
    run.train(3)
    run.accelerator.save_state(str(folder / "x"))
    count = 0
    for operation in kinds:
        count += Attack(ctx, run, folder / "x", operation).survive(few, error)
    # a checkpoint is the beginning of a window
    while not run.accelerator.sync_gradients:
        run.train(1)
    run.accelerator.save_state(str(folder / "x"))
    saved_digest = run.digest()
    run.train(3)
    run.accelerator.load_state(str(folder / "x"))
    loaded_digest = run.digest()
    assert [
        key
        for key in saved_digest
        if saved_digest[key] != loaded_digest[key]
        and key not in ("loader", "clock", "scaler")
    ] == [], "all works as before"
    run.accelerator.end_training()
    return count


@ranks(2, exhaustive=(1, 3))
def test_a_failure_at_some_calls_is_raised_by_every_rank(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    attack(ctx, tmp_path, "ddp", 10)


@ranks(2, mesh={"dp_shard": -1}, exhaustive=(1, 3))
def test_a_failure_at_some_calls_with_sharded_state(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    attack(ctx, tmp_path, "fsdp", 10)


@ranks(2)
def test_a_failure_with_a_loss_scaler(ctx: ProcessContext, tmp_path: Path) -> None:
    attack(ctx, tmp_path, "ddp", 16, "fp16", ("load",))


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("error", [Injected, InjectedOnDisk])
@ranks(1, 2, 3, timeout_s=7000)
def test_a_failure_at_every_call_is_raised_by_every_rank(
    ctx: ProcessContext, tmp_path: Path, error: type[Exception]
) -> None:
    assert attack(ctx, tmp_path, "ddp", None, error=error) > 500


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("error", [Injected, InjectedOnDisk])
@ranks(1, 2, 3, timeout_s=7000, mesh={"dp_shard": -1})
def test_a_failure_at_every_call_with_sharded_state(
    ctx: ProcessContext, tmp_path: Path, error: type[Exception]
) -> None:
    assert attack(ctx, tmp_path, "fsdp", None, error=error) > 500
