"""Checkpoints by DeepSpeed (`engine.save_checkpoint`, `load_checkpoint`), with the schedule and options of the loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hasten.errors import CheckpointError
from hasten.extensions.deepspeed.optimizer import DeepSpeedOptimizer

log = logging.getLogger(__name__)

# Any in this file: DeepSpeed is untyped.


def add_schedule_to_checkpoints(optimizer: DeepSpeedOptimizer) -> None:
    """Include the loop's options and schedule in the engine's checkpoints, and restore them at a load."""
    engine = optimizer.engine
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_with_schedule(*args: Any, **kwargs: Any) -> Any:
        _refuse_nvme(optimizer, "save_checkpoint")
        if optimizer.num_passes:
            log.warning(
                "save_checkpoint() of a DeepSpeed engine was called in the middle of an accumulation window; the gradients of its "
                "%d backward passes are not in the checkpoint. Save after optimizer.step() to lose nothing.",
                optimizer.num_passes,
            )
        with _loop_schedule(optimizer):
            return save(*args, **kwargs)

    @functools.wraps(load)
    def load_with_schedule(*args: Any, **kwargs: Any) -> Any:
        _refuse_nvme(optimizer, "load_checkpoint")
        optimizer.zero_grad()  # gradients of the previous weights
        with _loop_schedule(optimizer):
            load_path = load(*args, **kwargs)
        optimizer.take_options()
        if optimizer.schedule is not None and not isinstance(
            optimizer.schedule, LRScheduler
        ):
            show_rates(optimizer.schedule, optimizer)
        return load_path

    engine.save_checkpoint, engine.load_checkpoint = (
        save_with_schedule,
        load_with_schedule,
    )


def show_rates(scheduler: Any, optimizer: DeepSpeedOptimizer) -> None:
    """Make `get_last_lr()` of a DeepSpeed scheduler return the rates in use, also before its first step."""
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


class _Schedule:
    """The loop's scheduler, as an engine saves and loads it; a checkpoint may have been written without a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> Any:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if state is not None:
            self._scheduler.load_state_dict(state)
            return
        log.warning(
            "the DeepSpeed checkpoint has no state of a scheduler, so the schedule continues from its current state (%s); load the "
            "scheduler's state separately if the saved run had one.",
            type(self._scheduler).__name__,
        )


@contextmanager
def _loop_schedule(optimizer: DeepSpeedOptimizer) -> Iterator[None]:
    """Context manager in which the engine uses the loop's schedule and options."""
    engine = optimizer.engine
    optimizer.give_options()
    engine_schedule = engine.lr_scheduler
    if optimizer.schedule is not None:
        engine.lr_scheduler = _Schedule(optimizer.schedule)
    try:
        yield
    finally:
        engine.lr_scheduler = engine_schedule


def _refuse_nvme(optimizer: DeepSpeedOptimizer, call: str) -> None:
    if optimizer.on_nvme:
        raise CheckpointError(
            f"{call}() of a DeepSpeed engine was called while the optimizer's state is on NVMe, in files that DeepSpeed's "
            "checkpoints do not include; a resumed run would be wrong. Use accelerator.save_state() and load_state()."
        )
