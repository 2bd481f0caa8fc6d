"""Evaluation and prediction: every sample once, on any number of processes, in the order of the dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten import trees
from hasten.accelerator.facade import Accelerator
from hasten.data.loader import Loader
from hasten.extensions.trainer.collate import IGNORED
from hasten.extensions.trainer.interface import TrainerInterface
from hasten.extensions.trainer.loss import (
    labels_in,
    loss_or_none,
    num_items,
    outputs_besides_loss,
    run_model,
)
from hasten.runtime.mesh_plan import BATCH

# Any in this file: batches, outputs and arrays in any nesting.


@dataclass(frozen=True, slots=True)
class EvalPrediction:
    """Argument of `compute_metrics`: the predictions and labels of all samples as arrays; also unpacks as a pair."""

    predictions: Any
    label_ids: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))


class PredictionOutput(NamedTuple):
    """Result of `predict`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


@dataclass
class _Collected:
    loss_sum: float = 0.0
    weight: float = 0.0
    num_samples: int = 0
    predictions: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)


def run_evaluation(
    trainer: TrainerInterface, loader: Loader, prefix: str, loss_only: bool
) -> PredictionOutput:
    """Return predictions, labels and metrics over a loader; arrays are None with `loss_only`. Ranks: every rank."""
    began_s = time.perf_counter()
    model = trainer.model_for_evaluation()
    accelerator = trainer.accelerator
    was_training = model.training
    model.eval()
    collected = _Collected()
    num_batches = 0
    try:
        with torch.no_grad():
            for batch in loader:
                _evaluate_batch(trainer, model, batch, loader, loss_only, collected)
                num_batches += 1
                trainer.callbacks.call("on_prediction_step")
    finally:
        model.train(was_training)
    sums = torch.tensor(
        [collected.loss_sum, collected.weight, float(collected.num_samples)],
        dtype=torch.float64,
    )
    loss_sum, weight, num_samples = accelerator.reduce(sums, "sum", axes=BATCH).tolist()
    predictions = _join_batches(collected.predictions)
    labels = _join_batches(collected.labels)
    metrics: dict[str, float] = {}
    if weight:
        metrics["loss"] = loss_sum / weight
    if trainer.compute_metrics is not None and labels is not None and not loss_only:
        computed_metrics = trainer.compute_metrics(EvalPrediction(predictions, labels))
        for metric_name, metric_value in computed_metrics.items():
            if hasattr(metric_value, "item"):
                metric_value = metric_value.item()
            metrics[metric_name] = metric_value
    seconds = slowest_rank_s(accelerator, time.perf_counter() - began_s)
    metrics |= {
        "runtime": round(seconds, 4),
        "samples_per_second": round(num_samples / seconds, 3),
        "steps_per_second": round(num_batches / seconds, 3),
    }
    prefixed_metrics = {}
    for metric_name, metric_value in metrics.items():
        bare_name = metric_name.removeprefix(f"{prefix}_")
        prefixed_metrics[f"{prefix}_{bare_name}"] = metric_value
    return PredictionOutput(predictions, labels, prefixed_metrics)


def slowest_rank_s(accelerator: Accelerator, seconds: float) -> float:
    """Return the time of the slowest rank, so that logs are equal on all ranks, as checkpoints require. Ranks: every rank."""
    return max(
        float(
            accelerator.reduce(torch.tensor([seconds], dtype=torch.float64), "max")[0]
        ),
        1e-9,
    )


def _evaluate_batch(
    trainer: TrainerInterface,
    model: Any,
    batch: Any,
    loader: Loader,
    loss_only: bool,
    collected: _Collected,
) -> None:
    cursor = loader.cursor
    num_real = cursor.num_real
    num_rows = trees.batch_size(batch) or 0
    # one row stays even if none is real: every rank takes part in the forward
    if num_real is not None and num_real < num_rows:
        batch = trees.slice_rows(batch, slice(0, max(num_real, 1)))
    num_real_rows = num_rows if num_real is None else min(num_real, num_rows)
    labels = labels_in(batch, trainer.label_names)
    if labels is not None:
        loss, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    else:
        outputs = run_model(model, batch)
        loss = loss_or_none(outputs)
    if loss is not None and num_real_rows:
        items = num_items(labels, trainer.shifted)
        weight = float(num_real_rows if items is None else items)
        collected.loss_sum += float(loss) * weight if weight else 0.0
        collected.weight += weight
    collected.num_samples += num_real_rows
    if loss_only:
        return
    logits = outputs_besides_loss(outputs, loss is not None)
    if trainer.preprocess_logits_for_metrics is not None and logits is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    _collect_rows(trainer, collected.predictions, logits, num_real_rows)
    _collect_rows(trainer, collected.labels, labels, num_real_rows)


def _collect_rows(
    trainer: TrainerInterface, collected: list[Any], values: Any, num_rows: int
) -> None:
    """Gather the rows of all ranks, padded to one width, and append them to `kept` on the host."""
    if values is None:
        return
    accelerator = trainer.accelerator
    rows = trees.map_tensors(
        lambda tensor: tensor.reshape(1) if tensor.ndim == 0 else tensor[:num_rows],
        values,
    )
    if accelerator.num_processes > 1:
        widths = []
        for tensor in trees.tensors(rows):
            widths.append(tensor.shape[1] if tensor.ndim > 1 else 0)
        target_lengths = iter(
            accelerator.reduce(
                torch.tensor(widths, device=accelerator.device), "max", axes=BATCH
            ).tolist()
        )
        rows = trees.map_tensors(
            lambda tensor: _pad_columns(tensor, next(target_lengths)), rows
        )
        rows = accelerator.gather_ragged(rows, axes=BATCH)
    collected.append(trees.map_tensors(_to_numpy, rows))


def _pad_columns(tensor: Tensor, padded_width: int) -> Tensor:
    if tensor.ndim < 2 or tensor.shape[1] == padded_width:
        return tensor
    padded = tensor.new_full(
        (tensor.shape[0], padded_width, *tensor.shape[2:]), IGNORED
    )
    padded[:, : tensor.shape[1]] = tensor
    return padded


def _to_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def _join_batches(batches: list[Any]) -> Any:
    """Return all batches concatenated, with arrays padded with -100 to the widest."""
    if not batches:
        return None
    if isinstance(batches[0], (tuple, list)):
        return tuple(
            _join_batches([batch[index] for batch in batches])
            for index in range(len(batches[0]))
        )
    if isinstance(batches[0], Mapping):
        return {
            key: _join_batches([batch[key] for batch in batches]) for key in batches[0]
        }
    if batches[0].ndim < 2 or len({batch.shape[1] for batch in batches}) == 1:
        return np.concatenate(batches)
    padded_width = max(batch.shape[1] for batch in batches)
    return np.concatenate([_widen_array(batch, padded_width) for batch in batches])


def _widen_array(array: Any, padded_width: int) -> Any:
    padding_widths = [(0, 0), (0, padded_width - array.shape[1])] + [(0, 0)] * (
        array.ndim - 2
    )
    return np.pad(array, padding_widths, constant_values=IGNORED)


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]
