"""Program of `hasten test`: collectives, updates compared with one process, all-reduce bandwidth.

Run as `hasten launch -m hasten.extensions.selfcheck.selfcheck`, in the same environment as a training script.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.accelerator.facade import Accelerator
from hasten.comm.ops import gather_object
from hasten.launch.links import Links
from hasten.runtime.mesh import group_of
from hasten.runtime.mesh_plan import BATCH
from hasten.testing.toys import TinyLM, next_token_loss, seeded

Check = Callable[[Accelerator], str]

_UPDATES: Final = 8
_LEAST_ROWS: Final = 8
_LENGTH: Final = 16
_VOCAB: Final = 32
# For a loss of about 3.5: fp32 differs by the order of sums, the others by their number of digits.
_TOLERANCES: Final = (("no", 2e-5), ("bf16", 5e-2), ("fp16", 2e-2), ("fp8", 2e-1))


class CheckFailed(Exception):
    """Raised when a check fails on this rank."""


def check_ranks(accelerator: Accelerator) -> str:
    """Check that every rank is present exactly once."""
    gathered_ranks = gather_object(accelerator.process_index, accelerator.ctx.world)
    _expect_that(
        gathered_ranks == list(range(accelerator.num_processes)),
        f"the ranks are {gathered_ranks}",
    )
    return f"{accelerator.num_processes} on {accelerator.device.type}"


def check_collectives(accelerator: Accelerator) -> str:
    """Check the results of gather, reduce, broadcast and pad."""
    rank = accelerator.process_index
    num_processes = accelerator.num_processes
    device = accelerator.device
    rank_tensor = torch.full((2,), float(rank), device=device)
    gathered_tensor = accelerator.gather(rank_tensor)
    _expect_that(
        gathered_tensor.tolist() == sorted([*map(float, range(num_processes))] * 2),
        f"gather gave {gathered_tensor.tolist()}",
    )
    reduced_tensor = accelerator.reduce(rank_tensor, reduction="sum")
    _expect_that(
        reduced_tensor.tolist() == [num_processes * (num_processes - 1) / 2] * 2,
        f"reduce gave {reduced_tensor.tolist()}",
    )
    broadcast_tensor = accelerator.broadcast(
        rank_tensor + 7.0, from_process=num_processes - 1
    )
    _expect_that(
        broadcast_tensor.tolist() == [num_processes + 6.0] * 2,
        f"broadcast gave {broadcast_tensor.tolist()}",
    )
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    _expect_that(
        padded.shape[0] == num_processes,
        f"pad_across_processes gave {padded.shape[0]} rows",
    )
    accelerator.wait_for_everyone()
    return "gather, reduce, broadcast, pad, barrier"


def check_training(accelerator: Accelerator) -> str:
    """Check that the losses of a few updates equal those of plain torch in one process on the whole batch."""
    accelerator.gradient_accumulation_steps = 1
    num_readers = accelerator.ctx.mesh.size(*BATCH)
    num_rows = num_readers * -(
        -_LEAST_ROWS // num_readers
    )  # the same number for each reader
    losses = _train_losses(accelerator, num_rows)
    largest_difference = max(
        abs(loss - expected)
        for loss, expected in zip(losses, _plain_losses(num_rows), strict=True)
    )
    precision = accelerator.config.mixed_precision
    tolerance = dict(_TOLERANCES)[precision]
    _expect_that(
        largest_difference <= tolerance,
        f"losses differ from one process by {largest_difference:.2g}, more than {tolerance:g}",
    )
    return f"{len(losses)} updates, {precision}: losses differ from one process by {largest_difference:.1e}"


def measure_bandwidth(accelerator: Accelerator) -> str:
    """Return the all-reduce bus bandwidth: the bytes per second that each link carries."""
    num_processes = accelerator.num_processes
    if num_processes == 1:
        return "one process, nothing to reduce"
    speed, num_bytes, seconds = _all_reduce(accelerator, list(range(num_processes)))
    return f"{speed:.2f} GB/s over {num_processes} processes ({num_bytes >> 20} MiB, {seconds * 1e3:.1f} ms)"


def measured_links(accelerator: Accelerator) -> Links:
    """Return the link speeds within and between machines, as measured by collectives. Ranks: every rank.

    Raises: CheckFailed if there is only one process.
    """
    _expect_that(
        accelerator.num_processes > 1,
        "measuring links needs at least two processes; start two or more",
    )
    topology = accelerator.ctx.topology
    machines = gather_object(topology.node_rank, accelerator.ctx.world)
    local_ranks = []
    for rank, machine in enumerate(machines):
        if machine == topology.node_rank:
            local_ranks.append(rank)
    node = _all_reduce(accelerator, local_ranks)[0] if len(local_ranks) > 1 else None
    network_speed = None
    if len(set(machines)) > 1:
        network_speed = _all_reduce(accelerator, list(range(len(machines))))[0]
    rank_words = zip(
        *gather_object((node, network_speed), accelerator.ctx.world), strict=True
    )
    slowest = [min(speeds) if all(speeds) else None for speeds in rank_words]
    return Links(
        device=_device_name(accelerator),
        machines=len(set(machines)),
        per_machine=len(local_ranks),
        node_gb_s=slowest[0],
        network_gb_s=None if slowest[1] is None else slowest[1] / len(local_ranks),
    )


def _device_name(accelerator: Accelerator) -> str:
    if accelerator.device.type == "cuda":
        return torch.cuda.get_device_name(accelerator.device)
    return accelerator.device.type


def _all_reduce(
    accelerator: Accelerator, members: list[int]
) -> tuple[float, int, float]:
    """Return GB/s per link of an all-reduce among `members`, its bytes and its seconds.

    Ranks: every rank; groups are disjoint.
    """
    on_cpu = accelerator.device.type == "cpu"
    num_elements, repeats = (1 << 20, 5) if on_cpu else (1 << 26, 10)
    process_group = group_of(members)
    reduced_block = torch.zeros(num_elements, device=accelerator.device)
    dist.all_reduce(reduced_block, group=process_group)
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    for _ in range(repeats):
        reduced_block.fill_(1.0)
        dist.all_reduce(reduced_block, group=process_group)
    if not on_cpu:
        torch.accelerator.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    _expect_that(
        float(reduced_block[0]) == len(members),
        f"an all-reduce of ones gave {float(reduced_block[0])}",
    )
    moved_bytes = num_elements * 4 * 2 * (len(members) - 1) / len(members)
    return moved_bytes / seconds / 1e9, num_elements * 4, seconds


CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("ranks", check_ranks),
    ("collectives", check_collectives),
    ("training", check_training),
    ("all-reduce", measure_bandwidth),
)


def run_checks(
    accelerator: Accelerator, checks: tuple[tuple[str, Check], ...] = CHECKS
) -> bool:
    """Run the checks on every rank and print the results on the first; return False if a check failed on any rank."""
    has_passed = True
    for name, check in checks:
        try:
            check_message = check(accelerator)
            passed = True
        # every error is reported with its rank, and the next check still runs
        except Exception as error:
            check_message = f"{type(error).__name__}: {error}"
            passed = False
        outcomes = gather_object((passed, check_message), accelerator.ctx.world)
        has_passed = has_passed and all(ok for ok, _ in outcomes)
        if accelerator.is_main_process:
            sys.stdout.write(
                "".join(f"{line}\n" for line in _result_lines(name, outcomes))
            )
    return has_passed


def _result_lines(name: str, outcomes: list[tuple[bool, str]]) -> list[str]:
    """Return one line for a check that passed on all ranks, else one line per failed rank."""
    report_lines = []
    for rank, (passed, check_message) in enumerate(outcomes):
        if not passed:
            report_lines.append(f"FAILED  {name:<12} rank {rank}: {check_message}")
    if not report_lines:
        rank_words = "rank 0" if len(outcomes) == 1 else f"ranks 0-{len(outcomes) - 1}"
        return [f"passed  {name:<12} {rank_words}: {outcomes[0][1]}"]
    return report_lines


def _expect_that(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailed(otherwise)


def _make_model() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=_VOCAB, width=16, heads=4, depth=2, context=_LENGTH)
    )


def _make_batches(num_rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return tokens, next tokens and positions of each batch."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(0, _VOCAB, (num_rows, _LENGTH + 1), generator=generator)
        for _ in range(_UPDATES)
    ]
    positions = torch.arange(_LENGTH).expand(num_rows, _LENGTH).contiguous()
    return [
        (row[:, :-1].contiguous(), row[:, 1:].contiguous(), positions) for row in rows
    ]


# Any: the prepared model; a tuple of tensors
def _loss_of(model: Any, batch: Any) -> Tensor:
    tokens, labels, positions = batch
    return next_token_loss(model(tokens, positions).float(), labels)


def _plain_losses(num_rows: int) -> list[float]:
    """Return the losses in plain torch, in this process alone, in full precision."""
    model = _make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for batch in _make_batches(num_rows):
        loss = _loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _train_losses(accelerator: Accelerator, num_rows: int) -> list[float]:
    """Return the losses of the same loop under the settings of this run. Ranks: every rank."""
    model = _make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    # Any: the prepared model and optimizer
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    prepared_model, prepared_optimizer = prepared
    mesh = accelerator.ctx.mesh
    losses = []
    num_readers = mesh.size(*BATCH)
    reader_index = mesh.index(accelerator.process_index, *BATCH)
    for tensors in _make_batches(num_rows):
        batch = []
        for tensor in tensors:
            batch.append(
                tensor.chunk(num_readers)[reader_index].to(
                    accelerator.device, copy=True
                )
            )
        with (
            accelerator.accumulate(prepared_model),
            accelerator.context_parallel(batch, [1, 1, 1], labels=None),
        ):
            loss = accelerator.forward_backward(prepared_model, tuple(batch), _loss_of)
            accelerator.clip_grad_norm_(prepared_model.parameters(), 1.0)
            prepared_optimizer.step()
            prepared_optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _write_links(accelerator: Accelerator, links_file: str) -> str:
    links = measured_links(accelerator)
    if accelerator.is_main_process:
        links.write(links_file)
    if links.node_gb_s is None:
        inside = ""
    else:
        inside = f"{links.node_gb_s:.2f} GB/s inside a machine, "
    if links.network_gb_s is None:
        network_speed = ""
    else:
        network_speed = f"{links.network_gb_s:.2f} GB/s between machines per process, "
    return f"{inside}{network_speed}written to {links_file}"


def main() -> int:
    """Run the checks under the launcher's settings; the optional argument is a file for the measured link speeds."""
    accelerator = Accelerator()
    links_file = sys.argv[1] if len(sys.argv) > 1 else None
    checks = CHECKS
    if links_file is not None:
        checks = (*CHECKS, ("links", partial(_write_links, links_file=links_file)))
    has_passed = run_checks(accelerator, checks)
    if accelerator.is_main_process:
        sys.stdout.write(
            "everything works\n" if has_passed else "some checks failed, see above\n"
        )
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
