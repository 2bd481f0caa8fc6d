"""Warnings and log records of a whole loop: those of Accelerate 1.15.0, counted part by part, and no others."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

# Torch itself warns once for each iterator of a loader with pin_memory=True where there is no accelerator. The original, run
# by the same code, makes as many iterators.
PINNED = {
    "train": 2,
    "evaluate": 4,
    "skip": 1,
    "nan": 1,
    "precision": 1,
    "dispatch": 1,
    "stream": 1,
    "workers": 1,
    "break": 2,
}


pytestmark = pytest.mark.usefixtures("fresh_states")


class Stream(IterableDataset[Any]):
    """Eleven samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(11.0)


def _loader(**options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(37, 4), torch.randint(0, 2, (37,)))
    return DataLoader(data, batch_size=4, pin_memory=True, **options)


def _accelerator(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)


def _loop(enter_phase: Callable[[str], None], folder: Path) -> None:
    """Train, evaluate, save, load, skip, and train on losses that are NaN; `enter_phase` is called with the name of each phase."""
    enter_phase("prepare")
    set_seed(0)
    accelerator = _accelerator(gradient_accumulation_steps=2, project_dir=str(folder))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step)
    )
    model, optimizer, train, scheduler = accelerator.prepare(
        model, optimizer, _loader(shuffle=True), scheduler
    )
    evaluation_loaders = (
        accelerator.prepare(_loader()),
        accelerator.prepare_data_loader(_loader(num_workers=1)),
    )

    def passed(factor: float) -> None:
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y) * factor)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    for epoch in range(2):
        enter_phase("train")
        passed(1.0)
        enter_phase("evaluate")
        for x, y in (batch for loader in evaluation_loaders for batch in loader):
            accelerator.gather_for_metrics((model(x).argmax(-1), y))
        enter_phase("save")
        accelerator.save_state(str(folder / str(epoch)))
    enter_phase("load")
    accelerator.load_state(str(folder / "0"))
    enter_phase("skip")
    for _ in accelerator.skip_first_batches(train, 3):
        break
    enter_phase("nan")
    passed(float("nan"))
    enter_phase("end")
    accelerator.save_model(model, str(folder / "model"))
    accelerator.get_state_dict(accelerator.unwrap_model(model))
    accelerator.free_memory()
    accelerator.end_training()


def _kinds(enter_phase: Callable[[str], None]) -> None:
    """Read loaders of several kinds, whole or in part."""
    enter_phase("precision")
    accelerator = _accelerator(mixed_precision="bf16")
    layer = nn.Linear(4, 2)
    model, optimizer, loader = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), 0.1), _loader()
    )
    for x, _ in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    enter_phase("dispatch")
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    list(_accelerator(dataloader_config=config).prepare(_loader()))
    enter_phase("stream")
    accelerator = _accelerator()
    list(accelerator.prepare(DataLoader(Stream(), batch_size=2, pin_memory=True)))
    enter_phase("workers")
    loader = accelerator.prepare(_loader(num_workers=2, persistent_workers=True))
    list(loader), list(loader)
    enter_phase("break")
    loader = accelerator.prepare(_loader(shuffle=True))
    for _ in range(2):
        next(iter(loader))


def test_a_loop_is_as_silent_as_with_the_original(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    phases: list[str] = []
    pin_warnings: Counter[str] = Counter()
    unexpected: list[str] = []

    def shown(
        message: Warning | str,
        category: object,
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        if "'pin_memory' argument is set as true but no accelerator" in str(message):
            pin_warnings[phases[-1]] += 1
        else:
            unexpected.append(f"{phases[-1]}: {message}")

    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        warnings.showwarning = shown
        _loop(phases.append, tmp_path)
        _kinds(phases.append)
    assert unexpected == []
    assert pin_warnings == ({} if torch.accelerator.is_available() else PINNED)
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ] == []


def test_a_warning_of_a_loop_is_shown_once() -> None:
    accelerator = _accelerator()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    )
    with warnings.catch_warnings(record=True) as caught_warnings:
        # each once for its place, while nobody changes the filters
        warnings.simplefilter("default")
        for _ in range(3):
            for features, _ in accelerator.prepare(_loader()):
                accelerator.backward(model(features).sum())
                optimizer.step()
                scheduler.step()
                warnings.warn("of the script", stacklevel=1)
    assert [
        str(caught.message)
        for caught in caught_warnings
        if "of the script" in str(caught.message)
    ] == ["of the script"]
