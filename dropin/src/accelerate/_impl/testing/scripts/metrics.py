"""Checks of `gather_for_metrics`: every sample counts once, whatever the batches were padded with."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.settings.general import DataLoaderConfiguration
from accelerate._impl.testing.cases import torch_device as torch_device
from accelerate._impl.testing.scripts.distributed_data_loop import DummyIterableDataset
from accelerate._impl.testing.training import RegressionDataset, RegressionModel
from hasten.runtime.seeding import set_seed

# Any in this file: what `prepare` returns.


class ListHandler(logging.Handler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logs: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.logs.append(record)


def get_basic_setup(
    accelerator: Any, num_samples: int = 82, batch_size: int = 16
) -> tuple[Any, Any, Any]:
    set_seed(42)
    model = RegressionModel()
    loader = DataLoader(
        RegressionDataset(length=num_samples, seed=1), batch_size=batch_size
    )
    prepared, loader = accelerator.prepare(RegressionModel(), loader)
    return model.to(accelerator.device), prepared, loader


def generate_predictions(
    model: Any, dataloader: Any, accelerator: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        gathered_batches = []
        for batch in dataloader:
            gathered_batches.append(
                accelerator.gather_for_metrics((model(batch["x"]), batch["y"]))
            )
    outputs, targets = zip(*gathered_batches, strict=True)
    return torch.cat(outputs), torch.cat(targets)


def test_torch_metrics(
    accelerator: Any,
    num_samples: int = 82,
    dispatch_batches: bool = False,
    split_batches: bool = False,
    batch_size: int = 16,
) -> None:
    _, model, loader = get_basic_setup(accelerator, num_samples, batch_size)
    outputs, targets = generate_predictions(model, loader, accelerator)
    assert len(outputs) == len(targets) == num_samples, (
        f"{len(outputs)} predictions for {num_samples} samples"
    )


def test_gather_for_metrics_with_iterable_dataset() -> None:
    """Check that a stream's samples are gathered once each, without a warning."""
    accelerator = Accelerator()
    handler = ListHandler()
    logger = logging.getLogger("accelerate")
    logger.addHandler(handler)
    loader = accelerator.prepare(
        DataLoader(
            DummyIterableDataset(list(map(torch.tensor, range(30)))), batch_size=10
        )
    )
    gathered_samples = torch.cat(list(map(accelerator.gather_for_metrics, loader)))
    logger.removeHandler(handler)
    assert gathered_samples.tolist() == list(range(30)), gathered_samples
    assert not handler.logs, handler.logs


def test_gather_for_metrics_with_non_tensor_objects_iterable_dataset() -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
    )
    words = list(map(str, range(30)))
    plain: DataLoader[Any] = DataLoader(
        DummyIterableDataset(words), batch_size=10, collate_fn=list
    )
    loader = accelerator.prepare(plain)
    gathered_words = []
    for batch in loader:
        gathered_words.extend(
            accelerator.gather_for_metrics(batch, use_gather_object=True)
        )
    assert sorted(gathered_words, key=int) == words, gathered_words


def test_gather_for_metrics_drop_last() -> None:
    accelerator = Accelerator()
    size = 5
    n = accelerator.num_processes
    plain: DataLoader[Any] = DataLoader(
        range(2 * size * n + 1),  # type: ignore[arg-type]
        batch_size=size,
        drop_last=True,
    )
    loader = accelerator.prepare(plain)
    *_, last = map(accelerator.gather_for_metrics, loader)
    assert len(last) == size * n, last


def main() -> None:
    for split, dispatch in itertools.product((False, True), repeat=2):
        loader_config = DataLoaderConfiguration(
            split_batches=split, dispatch_batches=dispatch
        )
        accelerator = Accelerator(dataloader_config=loader_config)
        for samples in (82, 99, 512):
            test_torch_metrics(accelerator, samples, dispatch, split)
    test_gather_for_metrics_with_iterable_dataset()
    test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()
    test_gather_for_metrics_drop_last()
