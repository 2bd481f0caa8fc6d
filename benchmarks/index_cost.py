"""What finding its own indices costs a rank in each step, at worlds of up to 8192 ranks: it must not grow.

python benchmarks/index_cost.py
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from loading import report

from hasten.comm.local import LocalComm
from hasten.data.batch_plan import plan_rows
from hasten.data.order import order_of
from hasten.data.position import Position
from hasten.data.sampler import Assignment


def cost(world: int, batch: int, steps: int) -> float:
    """Microseconds a step, for one rank in the middle of the world, from the middle of an epoch on."""
    from torch.utils.data import RandomSampler

    data = range(batch * world * steps * 3)
    plan = plan_rows(
        batch_size=batch, num_shards=world, shard=world // 2, split=False, dispatch=False, drop_last=False, even=True
    )
    assignment = Assignment(order_of(RandomSampler(data), seekable=True, comm=LocalComm()), plan, "rows")
    times = []
    for turn in range(15):
        at = Position(epoch=turn, consumed=batch * world * steps)
        begun = time.process_time()
        count = sum(len(index_batch[0]) == batch for index_batch in islice(assignment.index_batches(at), steps))
        times.append((time.process_time() - begun) / count)
    return min(times) * 1e6  # other programs on the machine only add


def main() -> None:
    rows: list[dict[str, Any]] = []
    base = None
    for world in (8, 128, 1024, 8192):
        spent = cost(world, batch=32, steps=2000)
        base = base or spent
        rows.append({"ranks": world, "µs a step on one rank": spent, "ratio to 8 ranks": spent / base})
    report("index_cost", "Index cost of a step (batches of 32, shuffled)", rows)


if __name__ == "__main__":
    main()
