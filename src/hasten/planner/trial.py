"""The program of one trial of `hasten tune`: a script's first updates under given values, timed. Started by name, imported by nobody.

It changes what the script's Accelerator is built with and what it prepares, as `docs/planning.md` tells, and ends the script
after enough updates, before its own end: nothing is evaluated or saved. All patches of a trial are in this file.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from hasten.accelerator import facade
from hasten.accelerator.preparing import Preparer
from hasten.config.sharding import FullyShardedDataParallelPlugin
from hasten.debug.numbers import NumbersWatch
from hasten.optim.optimizer import PreparedOptimizer
from hasten.planner.tuning import Outcome
from hasten.strategies.wrapping import blocks_to_recompute

_OFTEN: Final = 10
"""Updates between two looks whether a trial is hopeless."""


class Spec(msgspec.Struct):
    """What a trial is told."""

    values: dict[str, Any]  # Any: numbers, names and flags
    result: str
    warmup: int
    updates: int
    hopeless_s: float | None = None


class _Enough(BaseException):
    """Leaves the script: not an Exception, so that no handler of its own keeps it."""


class Timed:
    """The trial inside a running script."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.losses: list[Tensor] = []
        self.marks: list[float] = []
        self.rows = 0
        self.blocks: tuple[str, ...] = ()
        self.convolutions = False
        self.precision = "no"
        self.whole_step = False
        self.gave_up = False
        self._batch_size_done = False

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:  # Any: arguments of an Accelerator
        """What the script gave its Accelerator, with this trial's values in their place."""
        values, own = self.spec.values, dict(given)
        own |= {"log_with": None, "project_dir": None}
        if own.get("numbers") == "off":
            own["numbers"] = "report"  # what notes the losses
        if "mixed_precision" in values:
            own["mixed_precision"] = values["mixed_precision"]
        if values.get("recompute"):
            own["recompute"] = tuple(values["recompute"])
        if values.get("step_graph"):
            own["performance"] = {"mode": "auto", "compile": False}
        ways = {
            "regional": {"backend": "inductor", "use_regional_compilation": True},
            "whole": {"backend": "inductor"},
            "cuda graph": {"backend": "inductor", "mode": "reduce-overhead"},
        }
        if values.get("compile") in ways:
            own["dynamo"] = ways[values["compile"]]
        if "prefetch" in values:
            own["dataloader"] = {"prefetch": values["prefetch"]}
        if "bucket_cap_mb" in values:
            own["ddp"] = {"bucket_cap_mb": values["bucket_cap_mb"]}
        return own

    def changed(self, value: Any) -> Any:  # Any: what the script prepares
        """One of the script's objects, as this trial wants it."""
        values = self.spec.values
        if isinstance(value, nn.Module):
            self.convolutions = any(isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in value.modules())
            found = blocks_to_recompute(value, FullyShardedDataParallelPlugin())
            self.blocks = tuple(sorted({type(block).__name__ for block in found}))
            return value.to(memory_format=torch.channels_last) if values.get("channels_last") else value  # type: ignore[call-overload]
        if isinstance(value, Optimizer) and values.get("fused"):
            for group in value.param_groups:
                if "fused" in group:
                    group["fused"], group["foreach"] = True, False
        if isinstance(value, DataLoader):
            return self._loader(value)
        return value

    def _loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        values = self.spec.values
        if "num_workers" in values:
            loader.num_workers = values["num_workers"]
            loader.prefetch_factor = 2
        wanted = values.get("batch_size")
        if wanted and not self._batch_size_done:  # the first loader is the one that trains
            self._batch_size_done = True
            return DataLoader(
                loader.dataset,
                batch_size=wanted,
                shuffle=isinstance(loader.sampler, RandomSampler),
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                drop_last=loader.drop_last,
            )
        return loader

    def loss(self, loss: Tensor) -> None:
        """Note a loss that is sent backward."""
        self.losses.append(loss.detach())

    def updated(self) -> None:
        """Note an update; the script ends at the last one."""
        done = len(self.marks)
        if done in (self.spec.warmup, self.spec.warmup + self.spec.updates) and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        limit = self.spec.hopeless_s
        measured = self.marks[self.spec.warmup :]
        if limit is not None and measured and len(measured) % _OFTEN == 0:
            self.gave_up = median(b - a for a, b in pairwise(measured)) > limit
        if done >= self.spec.warmup + self.spec.updates or self.gave_up:
            raise _Enough

    def outcome(self, error: str = "") -> Outcome:
        """What was measured."""
        measured = self.marks[self.spec.warmup :]
        step = (measured[-1] - measured[0]) / (len(measured) - 1) if len(measured) > 1 else 0.0
        if not error and not step:
            error = f"it ended after {len(self.marks)} updates, {self.spec.warmup + self.spec.updates} are needed"
        cuda = torch.cuda.is_available()
        return Outcome(
            step_s=step,
            samples_per_s=self.rows / step if step else 0.0,
            peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            losses=tuple(float(loss) for loss in self.losses),
            batch_size=self.rows,
            block_classes=self.blocks,
            convolutions=self.convolutions,
            precision=self.precision,
            whole_step=self.whole_step,
            error=error,
            gave_up=self.gave_up,
        )


def _patch(timed: Timed) -> None:
    """Change hasten for the rest of this process, which is this trial's own."""
    build, prepare = vars(facade)["build"], Preparer.prepare
    seen, step, replayed = NumbersWatch.seen, PreparedOptimizer.step, PreparedOptimizer.replayed
    capture = facade.Accelerator.capture_step
    loader = Preparer.loader

    def built(given: Mapping[str, Any], context: Any = None) -> Any:  # Any: as in the function it stands for
        parts = build(timed.settings(given), context)
        timed.precision = parts.precision.spec
        return parts

    def prepared(self: Preparer, objects: tuple[Any, ...], *rest: Any, **named: Any) -> tuple[Any, ...]:
        return prepare(self, tuple(timed.changed(value) for value in objects), *rest, **named)

    def loaded(self: Preparer, given: Any, *rest: Any, **named: Any) -> Any:  # Any: likewise
        made = loader(self, given, *rest, **named)
        if not timed.rows:
            timed.rows = made.batch_size or 0
        return made

    def noted(self: NumbersWatch, loss: Tensor, weight: Any) -> None:  # Any: likewise
        if not _capturing():
            timed.loss(loss)
        seen(self, loss, weight)

    def captured(self: facade.Accelerator, fn: Any) -> Any:  # Any: likewise
        timed.whole_step = True
        return capture(self, fn)

    def repeated(self: PreparedOptimizer) -> None:
        replayed(self)
        timed.updated()

    def stepped(self: PreparedOptimizer, closure: Any = None) -> Any:  # Any: likewise
        before = self._clock.num_updates
        out = step(self, closure)
        if (self._clock.num_updates != before or self._clock.boundary) and not _capturing():
            timed.updated()
        return out

    for holder, name, function in (
        (facade, "build", built),
        (Preparer, "prepare", prepared),
        (Preparer, "loader", loaded),
        (NumbersWatch, "seen", noted),
        (facade.Accelerator, "capture_step", captured),
        (PreparedOptimizer, "step", stepped),
        (PreparedOptimizer, "replayed", repeated),
    ):
        setattr(holder, name, function)


def _capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing runs then, and its first replay counts."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def main(argv: list[str]) -> int:
    """Run `spec.json script.py [arguments]` and write what was measured."""
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Spec)
    timed = Timed(spec)
    _patch(timed)
    if spec.values.get("tf32"):
        torch.set_float32_matmul_precision("high")
    error = ""
    sys.argv = argv[1:]
    sys.path.insert(0, str(Path(argv[1]).absolute().parent))
    try:
        runpy.run_path(argv[1], run_name="__main__")
    except _Enough:
        pass
    except SystemExit as ended:
        error = f"it ended with exit code {ended.code}" if ended.code else ""
    except Exception as wrong:  # of any kind: the script is the user's own, and the table says what it raised
        error = f"{type(wrong).__name__}: {(str(wrong).strip().splitlines() or ['no message'])[0]}"
    if facade_rank() == 0:
        Path(spec.result).write_bytes(msgspec.json.encode(timed.outcome(error)))
    return 0


def facade_rank() -> int:
    """This process's rank."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
