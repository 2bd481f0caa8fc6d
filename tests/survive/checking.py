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
    found = []
    while lineage:
        found.append(applied[lineage])
        lineage = applied[lineage]["parent"]
    return found[::-1]


def check_account(updates: Sequence[Row], size: int, epochs: int) -> None:
    """Raise unless the applied updates have used each position of each epoch exactly once."""
    for epoch in range(epochs):
        used = [
            place
            for update in updates
            if update["epoch"] == epoch
            for one in update["rounds"]
            for name in update["contributors"]
            for place in list_positions(one.get(name, []))
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
                rank_positions(one[name], int(rank or 0), options["ranks"])
                for one in row["rounds"]
            ]
            assert row["window"] == [
                _indices(one, row["epoch"], options, seed) for one in ranges
            ]


@lru_cache
def _order(size: int, epoch: int, seed: int) -> list[int]:
    """Return the indices of an epoch in the order in which hasten shuffles them."""
    loader = DataLoader(Numbered(size), batch_size=1, shuffle=True)
    # Any: the source of map-style data
    source: Any = Accelerator(cpu=True).prepare(loader).parts.source
    found: list[int] = source.assignment.order.seek(Position(epoch=epoch, seed=seed))(
        np.arange(size)
    ).tolist()
    return found


def _indices(
    ranges: Sequence[tuple[int, int]], epoch: int, options: Mapping[str, Any], seed: int
) -> list[int]:
    order = _order(options["size"], epoch, seed)
    return [order[place] for place in list_positions(ranges)]


def check_run(
    folder: Path, options: Mapping[str, Any], tolerance: float = 0.0
) -> list[dict[str, Any]]:
    """Check the samples and the weights of a finished run; return its updates. The weights of all replicas are equal bit by bit."""
    found = results(folder)
    assert found, "a replica has reached the end"
    ledger = next(iter(found.values()))["ledger"]
    updates = chain(folder, ledger["lineage"])
    check_account(updates, options["size"], options["epochs"])
    check_indices(folder, updates, options, ledger["seed"])
    wanted = _with_evaluations(folder, updates, options, ledger["seed"])
    weights = next(iter(found.values()))["weights"]
    assert tolerance or weights == wanted  # bit by bit
    for one, other in zip(weights, wanted, strict=True):
        torch.testing.assert_close(
            torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance
        )
    for result in found.values():
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
    found = [json.loads(line) for line in lines if line.endswith("}")]
    asked = {row["lineage"] for row in found}
    losses: dict[str, float] = {}

    def evaluate(update: Row, model: nn.Module) -> None:
        if update["lineage"] in asked:
            losses[update["lineage"]] = evaluation_of(model)

    weights = reference(updates, options, seed, evaluate)
    for row in found:
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
    after: Callable[[Row, nn.Module], None] = lambda update, model: None,
) -> list[Any]:
    """Return the weights of a run on one process, in plain torch, whose updates have these members and samples.

    `after` is called after each update with the model.
    """
    model = model_of(5 + int(updates[0]["first"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    dataset = Numbered(options["size"])
    for update in updates:
        parts: list[list[Tensor]] = []
        weights: list[tuple[float, float]] = []
        for name in update["contributors"]:
            of_ranks: list[list[list[int]]] = []
            for rank in range(options["ranks"]):
                ranges = [
                    rank_positions(one[name], rank, options["ranks"])
                    for one in update["rounds"]
                ]
                of_ranks.append(
                    [_indices(one, update["epoch"], options, seed) for one in ranges]
                )
            parts.append(
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
            model.parameters(), zip(*parts, strict=True), strict=True
        ):
            parameter.grad = weighted_sum(several, factors)
        if options["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        after(update, model)
    return [parameter.tolist() for parameter in model.parameters()]


def _mean_of_ranks(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the mean gradients of a replica's ranks, as DDP and FSDP2 compute them: each divided first, then summed."""
    found = [one / len(of_ranks) for one in of_ranks[0]]
    for others in of_ranks[1:]:
        found = [
            one + other / len(of_ranks)
            for one, other in zip(found, others, strict=True)
        ]
    return found


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
    found = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in model.parameters()
    ]
    return (
        found
        if len(batches) == every
        else [one * (every / len(batches)) for one in found]
    )
