"""Checks of a run with lost replicas: the account of its samples, and its weights against a run on one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.data.position import Position
from hasten.extensions.survive.exchange import weighted_sum
from hasten.extensions.survive.ledger_plan import list_positions, rank_positions
from tests.survive.reading import Row, results, rows
from tests.survive.replica_program import Numbered, evaluated, model_of


def chain(folder: Path, lineage: str) -> list[dict[str, Any]]:
    """Return the updates that led to this history, first to last."""
    applied = {row["lineage"]: row for row in rows(folder) if row["applied"]}
    updates = []
    while lineage:
        updates.append(applied[lineage])
        lineage = applied[lineage]["parent"]
    return updates[::-1]


def check_account(updates: Sequence[Row], size: int, epochs: int) -> None:
    """Raise unless the applied updates have used each position of each epoch exactly once."""
    for epoch in range(epochs):
        used = [
            position
            for update in updates
            if update["epoch"] == epoch
            for round_ranges in update["rounds"]
            for name in update["contributors"]
            for position in list_positions(round_ranges.get(name, []))
        ]
        assert sorted(used) == list(range(size)), (epoch, len(used), len(set(used)))
    assert [update["step"] for update in updates] == list(range(1, len(updates) + 1))


def check_indices(
    folder: Path, updates: Sequence[Row], options: Mapping[str, Any], seed: int
) -> None:
    """Raise unless the loops have seen the samples that the ledger names."""
    lineages = {update["lineage"] for update in updates}
    for row in rows(folder):
        if row["lineage"] in lineages and row["applied"]:
            name, _, rank = row["name"].partition(".")
            ranges = [
                rank_positions(round_ranges[name], int(rank or 0), options["ranks"])
                for round_ranges in row["rounds"]
            ]
            assert row["window"] == [
                _indices(round_ranges, row["epoch"], options, seed)
                for round_ranges in ranges
            ]


@lru_cache
def _order(size: int, epoch: int, seed: int) -> list[int]:
    """Return the indices of an epoch in the order in which hasten shuffles them."""
    loader = DataLoader(Numbered(size), batch_size=1, shuffle=True)
    # Any: the source of map-style data
    source: Any = Accelerator(cpu=True).prepare(loader).parts.source
    indices: list[int] = source.assignment.order.seek(Position(epoch=epoch, seed=seed))(
        np.arange(size)
    ).tolist()
    return indices


def _indices(
    ranges: Sequence[tuple[int, int]], epoch: int, options: Mapping[str, Any], seed: int
) -> list[int]:
    order = _order(options["size"], epoch, seed)
    return [order[position] for position in list_positions(ranges)]


def check_run(
    folder: Path, options: Mapping[str, Any], tolerance: float = 0.0
) -> list[dict[str, Any]]:
    """Check the samples and the weights of a finished run; return its updates. The weights of all replicas are equal bit by bit."""
    replica_results = results(folder)
    assert replica_results, "a replica has reached the end"
    ledger = next(iter(replica_results.values()))["ledger"]
    updates = chain(folder, ledger["lineage"])
    check_account(updates, options["size"], options["epochs"])
    check_indices(folder, updates, options, ledger["seed"])
    expected_weights = _with_evaluations(folder, updates, options, ledger["seed"])
    weights = next(iter(replica_results.values()))["weights"]
    assert tolerance or weights == expected_weights  # bit by bit
    for actual, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(
            torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance
        )
    for result in replica_results.values():
        assert result["ledger"] == ledger
        assert result["ledger"]["unused"] == {}
        assert result["weights"] == weights  # bit by bit
        # those of the process after a resume
        assert result["updates"] == len(updates) or options.get("preemptible")
    return updates


def _with_evaluations(
    folder: Path, updates: Sequence[Row], options: Mapping[str, Any], seed: int
) -> list[Any]:
    """Return the weights of the run on one process; raise unless each evaluation of the run was that of its weights at the time.

    An evaluation of a replica that was cut off after an update, which the others have made without it, is not one of the run.
    """
    lines = [
        line
        for path in folder.glob("evaluation-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    evaluations = [json.loads(line) for line in lines if line.endswith("}")]
    evaluated_lineages = {row["lineage"] for row in evaluations}
    losses: dict[str, float] = {}

    def evaluate(update: Row, model: nn.Module) -> None:
        if update["lineage"] in evaluated_lineages:
            losses[update["lineage"]] = evaluation_of(model)

    weights = reference(updates, options, seed, evaluate)
    for row in evaluations:
        assert row["loss"] == losses.get(row["lineage"], row["loss"])  # bit by bit
    return weights


def evaluation_of(model: nn.Module) -> float:
    """Return the loss of the samples that are not trained on."""
    with torch.no_grad():
        return float(
            sum(
                (nn.functional.mse_loss(model(x), y) for x, y, _ in evaluated()),
                torch.zeros(()),
            )
        )


def reference(
    updates: Sequence[Row],
    options: Mapping[str, Any],
    seed: int,
    after_update: Callable[[Row, nn.Module], None] = lambda update, model: None,
) -> list[Any]:
    """Return the weights of a run on one process, in plain torch, whose updates have these members and samples.

    `after_update` is called after each update with the model.
    """
    model = model_of(5 + int(updates[0]["first"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    dataset = Numbered(options["size"])
    for update in updates:
        replica_gradients: list[list[Tensor]] = []
        weights: list[tuple[float, float]] = []
        for name in update["contributors"]:
            of_ranks: list[list[list[int]]] = []
            for rank in range(options["ranks"]):
                ranges = [
                    rank_positions(round_ranges[name], rank, options["ranks"])
                    for round_ranges in update["rounds"]
                ]
                of_ranks.append(
                    [
                        _indices(round_ranges, update["epoch"], options, seed)
                        for round_ranges in ranges
                    ]
                )
            replica_gradients.append(
                _mean_of_ranks(
                    [
                        _gradients(model, dataset, batches, options)
                        for batches in of_ranks
                    ]
                )
            )
            batches = [batch for several in of_ranks for batch in several]
            real = sum(map(bool, batches))
            rows_ = float(sum(map(len, batches)))
            weights.append(
                (rows_, rows_)
                if options["weighted"]
                else (float(len(batches)), float(real))
            )
        total = sum(share for _, share in weights)
        factors = [weight / total if share else 0.0 for weight, share in weights]
        for parameter, several in zip(
            model.parameters(), zip(*replica_gradients, strict=True), strict=True
        ):
            parameter.grad = weighted_sum(several, factors)
        if options["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        after_update(update, model)
    return [parameter.tolist() for parameter in model.parameters()]


def _mean_of_ranks(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the mean gradients of a replica's ranks, as DDP and FSDP2 compute them: each divided first, then summed."""
    mean_gradients = [gradient / len(of_ranks) for gradient in of_ranks[0]]
    for rank_gradients in of_ranks[1:]:
        mean_gradients = [
            gradient + rank_gradient / len(of_ranks)
            for gradient, rank_gradient in zip(
                mean_gradients, rank_gradients, strict=True
            )
        ]
    return mean_gradients


def _gradients(
    model: nn.Module,
    dataset: Numbered,
    batches: list[list[int]],
    options: Mapping[str, Any],
) -> list[Tensor]:
    """Return one replica's mean gradients of a window, as hasten computes them on one process."""
    model.zero_grad()
    every = int(options["every"])
    for batch in batches:
        if not batch:
            continue
        samples = [dataset[index] for index in batch]
        x, y = (
            torch.stack([sample[0] for sample in samples]),
            torch.stack([sample[1] for sample in samples]),
        )
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward(gradient=torch.tensor(1.0) / every)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in model.parameters()
    ]
    return (
        gradients
        if len(batches) == every
        else [gradient * (every / len(batches)) for gradient in gradients]
    )
