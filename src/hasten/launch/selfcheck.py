"""Program of `hasten test`: collectives, training steps compared with one process, all-reduce bandwidth. Imports torch.

Run as `hasten launch -m hasten.launch.selfcheck`, in the same environment as a training script.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten.accelerator.facade import Accelerator
from hasten.comm.ops import gather_object
from hasten.launch.links import Links
from hasten.runtime.mesh import group_of
from hasten.runtime.mesh_plan import BATCH

Check = Callable[[Accelerator], str]

_STEPS: Final = 4
_ROWS_PER_RANK: Final = 8
# Relative error of low-precision training after a few steps, with a margin; full precision differs by rounding only.
_TOLERANCES: Final = (("no", 1e-5), ("bf16", 3e-2), ("fp16", 1e-2), ("fp8", 1e-1))


class CheckFailed(Exception):
    """Raised when a check fails on this rank."""


@dataclass(frozen=True, slots=True)
class CheckRows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a fixed linear map with a little noise, identical on every rank."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def ranks(accelerator: Accelerator) -> str:
    """Check that every rank is present exactly once."""
    found = gather_object(accelerator.process_index, accelerator.comm)
    _expect(found == list(range(accelerator.num_processes)), f"the ranks are {found}")
    return f"{accelerator.num_processes} on {accelerator.device.type}"


def collectives(accelerator: Accelerator) -> str:
    """Check the results of gather, reduce, broadcast and pad."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    mine = torch.full((2,), float(rank), device=device)
    gathered = accelerator.gather(mine)
    _expect(gathered.tolist() == [float(r) for r in range(size) for _ in range(2)], f"gather gave {gathered.tolist()}")
    total = accelerator.reduce(mine, reduction="sum")
    _expect(total.tolist() == [size * (size - 1) / 2] * 2, f"reduce gave {total.tolist()}")
    sent = accelerator.broadcast(mine + 7.0, from_process=size - 1)
    _expect(sent.tolist() == [size + 6.0] * 2, f"broadcast gave {sent.tolist()}")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    _expect(padded.shape[0] == size, f"pad_across_processes gave {padded.shape[0]} rows")
    accelerator.wait_for_everyone()
    return "gather, reduce, broadcast, pad, barrier"


def training(accelerator: Accelerator) -> str:
    """Check that a few steps give the same weights as plain torch in one process on the whole batch."""
    accelerator.gradient_accumulation_steps = 1
    readers = accelerator.ctx.mesh.size(*BATCH)  # ranks along other axes read the same rows
    data = _data(_STEPS * _ROWS_PER_RANK * readers)
    model, expected = _model(), _trained_alone(data, _ROWS_PER_RANK * readers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=_ROWS_PER_RANK)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, loader)  # Any: objects wrapped by a strategy
    model, opt, batches = prepared
    steps = 0
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        steps += 1
    _expect(steps == _STEPS, f"{steps} steps instead of {_STEPS}")
    weights = accelerator.get_state_dict(model)
    tolerance = dict(_TOLERANCES)[accelerator.config.mixed_precision]
    if weights or accelerator.is_main_process:  # sharded strategies gather them on the first rank only
        _expect(weights.keys() == expected.keys(), f"the weights are named {sorted(weights)}")
    worst = max(
        (
            float((weights[name].cpu().float() - value).abs().max())
            for name, value in expected.items()
            if name in weights
        ),
        default=0.0,
    )
    _expect(worst <= tolerance, f"weights differ from one process by {worst:.2g}, more than {tolerance:g}")
    return f"{steps} steps, {accelerator.config.mixed_precision}: differs from one process by {worst:.1e}"


def bandwidth(accelerator: Accelerator) -> str:
    """Return the all-reduce bus bandwidth: the bytes per second that each link carries."""
    size = accelerator.num_processes
    if size == 1:
        return "one process, nothing to reduce"
    speed, num_bytes, seconds = _all_reduce(accelerator, list(range(size)))
    return f"{speed:.2f} GB/s over {size} processes ({num_bytes >> 20} MiB, {seconds * 1e3:.1f} ms)"


def measured_links(accelerator: Accelerator) -> Links:
    """Return the link speeds within and between machines, as measured by collectives. Ranks: every rank.

    Raises: CheckFailed if there is only one process.
    """
    _expect(accelerator.num_processes > 1, "measuring links needs at least two processes; start two or more")
    topology = accelerator.ctx.topology
    machines = gather_object(topology.node_rank, accelerator.comm)
    local_ranks = [rank for rank, machine in enumerate(machines) if machine == topology.node_rank]
    node = _all_reduce(accelerator, local_ranks)[0] if len(local_ranks) > 1 else None
    between = _all_reduce(accelerator, list(range(len(machines))))[0] if len(set(machines)) > 1 else None
    everywhere = zip(*gather_object((node, between), accelerator.comm), strict=True)
    slowest = [min(found) if all(found) else None for found in everywhere]
    return Links(
        device=_device_name(accelerator),
        machines=len(set(machines)),
        per_machine=len(local_ranks),
        node_gb_s=slowest[0],
        network_gb_s=None if slowest[1] is None else slowest[1] / len(local_ranks),
    )


def _device_name(accelerator: Accelerator) -> str:
    return (
        torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else accelerator.device.type
    )


def _all_reduce(accelerator: Accelerator, members: list[int]) -> tuple[float, int, float]:
    """Return GB/s per link of an all-reduce among `members`, its bytes and its seconds.

    Ranks: every rank; groups are disjoint.
    """
    on_cpu = accelerator.device.type == "cpu"
    numbers, repeats = (1 << 20, 5) if on_cpu else (1 << 26, 10)
    group = group_of(members)
    block = torch.zeros(numbers, device=accelerator.device)
    dist.all_reduce(block, group=group)
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    for _ in range(repeats):
        block.fill_(1.0)
        dist.all_reduce(block, group=group)
    if not on_cpu:
        torch.accelerator.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    _expect(float(block[0]) == len(members), f"an all-reduce of ones gave {float(block[0])}")
    moved = numbers * 4 * 2 * (len(members) - 1) / len(members)
    return moved / seconds / 1e9, numbers * 4, seconds


CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("ranks", ranks),
    ("collectives", collectives),
    ("training", training),
    ("all-reduce", bandwidth),
)


def run(accelerator: Accelerator, checks: tuple[tuple[str, Check], ...] = CHECKS) -> bool:
    """Run the checks on every rank and print the results on the first; return False if a check failed on any rank."""
    good = True
    for name, check in checks:
        try:
            message, passed = check(accelerator), True
        except Exception as error:  # every error is reported with its rank, and the next check still runs
            message, passed = f"{type(error).__name__}: {error}", False
        outcomes = gather_object((passed, message), accelerator.comm)
        good = good and all(ok for ok, _ in outcomes)
        if accelerator.is_main_process:
            sys.stdout.write("".join(f"{line}\n" for line in _lines(name, outcomes)))
    return good


def _lines(name: str, outcomes: list[tuple[bool, str]]) -> list[str]:
    """Return one line for a check that passed on all ranks, else one line per failed rank."""
    bad = [(rank, message) for rank, (passed, message) in enumerate(outcomes) if not passed]
    if not bad:
        everywhere = "rank 0" if len(outcomes) == 1 else f"ranks 0-{len(outcomes) - 1}"
        return [f"passed  {name:<12} {everywhere}: {outcomes[0][1]}"]
    return [f"FAILED  {name:<12} rank {rank}: {message}" for rank, message in bad]


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailed(otherwise)


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def _data(length: int) -> CheckRows:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(length, 16, generator=generator)
    return CheckRows(inputs, inputs.flip(1) + 0.1 * torch.randn(length, 16, generator=generator))


def _trained_alone(data: CheckRows, batch_size: int) -> dict[str, Tensor]:
    """Return the weights after the same steps in plain torch, in this process only, on the CPU, in full precision."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(0, len(data), batch_size):
        rows = slice(start, start + batch_size)
        nn.functional.mse_loss(model(data.inputs[rows]), data.targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _written(accelerator: Accelerator, file: str) -> str:
    links = measured_links(accelerator)
    if accelerator.is_main_process:
        links.write(file)
    inside = "" if links.node_gb_s is None else f"{links.node_gb_s:.2f} GB/s inside a machine, "
    between = "" if links.network_gb_s is None else f"{links.network_gb_s:.2f} GB/s between machines per process, "
    return f"{inside}{between}written to {file}"


def main() -> int:
    """Run the checks under the launcher's settings; the optional argument is a file for the measured link speeds."""
    accelerator = Accelerator()
    file = sys.argv[1] if len(sys.argv) > 1 else None
    good = run(accelerator, CHECKS if file is None else (*CHECKS, ("links", lambda given: _written(given, file))))
    if accelerator.is_main_process:
        sys.stdout.write("everything works\n" if good else "some checks failed, see above\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
