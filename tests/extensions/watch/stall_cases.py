"""Ways to hang or to diverge, each in a few lines: run on two ranks as `stall_cases.py NAME`. `# at: x` marks the lines that reports must name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator

AFTER_S = 1.5  # as in test_stalls.py
name = sys.argv[1]
if os.environ["RANK"] == "1":
    if name == "never_started":
        time.sleep(1000)
    if name == "leaves_before_start":
        sys.exit(0)
    if name == "error_before_start":
        raise ValueError("on purpose")  # at: before start
    if name == "wrong_world_size":
        os.environ["WORLD_SIZE"] = "3"
accelerator = Accelerator(
    strategy="fsdp" if name.startswith("fsdp") else None, project_dir="project"
)
rank = accelerator.process_index
main = rank == 0
if name != "never":
    torch.manual_seed(0)
first_rank_group = dist.new_group([0])
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model, optimizer = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1)
)


def step(x: Tensor | None = None) -> Tensor:
    """One step of training."""
    loss: Tensor = model(torch.ones(2, 4) if x is None else x).square().mean()
    accelerator.backward(loss)  # at: backward
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Stuck(Dataset[Tensor]):
    """A dataset with one sample that never comes, or fails, on rank 1."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if rank == 1 and index >= 4:
            if self.fails:
                raise ValueError("bad sample")  # at: sample fails
            time.sleep(1000)  # at: sample
        return torch.ones(4)


def fail(*_: Any) -> NoReturn:  # Any: whatever a hook is given
    raise ValueError("on purpose")  # at: fail


# ------------------------------------------------------------------------------------- collectives that do not match
def gather_on_main() -> None:
    if main:
        accelerator.gather(torch.ones(3))  # at: gather
    step()


def barrier_on_main() -> None:
    if main:
        accelerator.wait_for_everyone()  # at: barrier
    accelerator.reduce(torch.ones(3))  # at: reduce


def save_on_main() -> None:
    if main:
        accelerator.save_state("project/state")  # at: save
    step()


def load_on_main() -> None:
    accelerator.save_state("project/state")
    if main:
        accelerator.load_state("project/state")  # at: load
    accelerator.wait_for_everyone()  # at: barrier after load


def object_on_main() -> None:
    if main:
        accelerator.ctx.world.all_gather_object({"a": 1})  # at: object
    accelerator.wait_for_everyone()  # at: barrier after object


def uneven_loops() -> None:
    for _ in range(2 + rank):
        step()
    accelerator.wait_for_everyone()  # at: barrier after loop


def other_order() -> None:
    if main:
        accelerator.gather(torch.ones(2))  # at: first gather
        accelerator.wait_for_everyone()
    else:
        accelerator.wait_for_everyone()  # at: first barrier
        accelerator.gather(torch.ones(2))


def skipped_backward() -> None:
    loss = model(torch.ones(2, 4)).sum()
    if main:
        accelerator.backward(loss)  # at: only backward
    accelerator.wait_for_everyone()  # at: barrier instead


def collective_in_main_first() -> None:
    with accelerator.main_process_first():  # at: main first
        if main:
            accelerator.gather(torch.ones(2))  # at: gather in block


def among_themselves(seconds: float) -> None:
    """Collectives in a group of its own, on rank 0."""
    end = time.monotonic() + seconds
    while main and time.monotonic() < end:
        dist.all_reduce(torch.ones(2), group=first_rank_group)
        time.sleep(0.05)  # at: alone


def late_gather() -> None:
    among_themselves(1.4 * AFTER_S)
    if main:
        accelerator.gather(torch.ones(2))  # at: late gather
    accelerator.wait_for_everyone()  # at: early barrier


def busy_elsewhere() -> None:
    among_themselves(1000.0)
    accelerator.wait_for_everyone()  # at: barrier of one


def torch_reduce_on_main() -> None:
    if main:
        dist.all_reduce(torch.ones(5))  # at: torch reduce
    accelerator.wait_for_everyone()  # at: barrier after torch


def torch_shapes() -> None:
    dist.all_reduce(torch.ones(5 + 1000 * rank))  # at: torch shapes
    time.sleep(3)


def fsdp_forward_on_main() -> None:
    if main:
        model(torch.ones(2, 4))  # at: forward
    accelerator.wait_for_everyone()  # at: barrier after forward


def other_shape() -> None:
    accelerator.gather(torch.ones(3 + rank))  # at: shapes


def other_dtype() -> None:
    # at: dtypes
    accelerator.gather(torch.ones(3, dtype=torch.float64 if main else torch.float32))


def other_structure() -> None:
    # at: structures
    accelerator.reduce({"a": torch.ones(1)} if main else [torch.ones(1)])


# ------------------------------------------------------------------------------------------------ ranks that end
def error_in_forward() -> None:
    if not main:
        model.register_forward_hook(fail)
    step()


def error_in_backward() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    if not main:
        x.register_hook(fail)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    step(x)
    accelerator.wait_for_everyone()


def error_in_save() -> None:
    if not main:
        accelerator.register_save_state_pre_hook(fail)
    accelerator.save_state("project/state")


def error_in_load() -> None:
    accelerator.save_state("project/state")
    if not main:
        accelerator.register_load_state_pre_hook(fail)
    accelerator.load_state("project/state")


def error_in_worker() -> None:
    for x in DataLoader(Stuck(fails=True), batch_size=2, num_workers=1):
        step(x)


def leaves() -> None:
    if not main:
        sys.exit(0)
    accelerator.gather(torch.ones(2))  # at: gather alone


def leaves_hard() -> None:
    if not main:
        os._exit(0)
    accelerator.gather(torch.ones(2))


def crashes() -> None:
    if not main:
        ctypes.string_at(0)
    step()


def killed() -> None:
    if not main:
        os.kill(os.getpid(), signal.SIGKILL)
    step()


# ------------------------------------------------------------------------------------------------ ranks that do not come
def stopped() -> None:
    if not main:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


def main_stopped() -> None:
    if main:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


def endless_loop() -> None:
    while not main:
        sum(range(1000))  # at: loop
    step()


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    if not main:
        lock.acquire()  # at: lock
    accelerator.gather(torch.ones(2))  # at: gather after lock


def asleep() -> None:
    if main:
        time.sleep(1000)  # at: sleep
    accelerator.save_state("project/state")  # at: save after sleep


def native() -> None:
    if not main:
        # holds the interpreter: no other thread of this rank can run
        ctypes.PyDLL(None).sleep(1000)
    step()


def slow_disk() -> None:
    if not main:
        os.fsync = lambda fd: time.sleep(1000)
    accelerator.save_state("project/state")  # at: slow save


def stuck_sample() -> None:
    for x in DataLoader(Stuck(fails=False), batch_size=2):
        step(x)


def stuck_worker() -> None:
    for x in DataLoader(Stuck(fails=False), batch_size=2, num_workers=1):  # at: worker
        step(x)


def never_started() -> None:
    step()


error_before_start = wrong_world_size = leaves_before_start = never_started


def ends_early() -> None:
    """A rank whose loop has fewer batches, and that calls end_training() while the other still trains."""
    if main:
        accelerator.end_training()  # at: early end
    step()


# ------------------------------------------------------------------------------------------------ ranks that drift apart
def edited_weight() -> None:
    if not main:
        with torch.no_grad():
            model.get_parameter("module.0.weight").add_(1e-3)
    step()


def unseeded_layer() -> None:
    torch.manual_seed(rank)
    layer: Any = model.get_submodule("module.2")  # Any: a Linear, as it was built above
    layer.reset_parameters()
    step()


def own_rate() -> None:
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    step()


# ------------------------------------------------------------------------------------------------ nothing is wrong
def long_first() -> None:
    with accelerator.main_process_first():
        if main:
            time.sleep(2.5 * AFTER_S)
    step()


def long_everywhere() -> None:
    step()
    time.sleep(3 * AFTER_S)
    step()


def long_on_one() -> None:
    if main:
        time.sleep(3 * AFTER_S)  # at: evaluation
    step()
    time.sleep(1)  # for the watchdog to see that it goes on


def long_save() -> None:
    sync = os.fsync

    def slowly(fd: int) -> None:
        """A disk that is slow, but writes."""
        for _ in range(8 if main else 0):
            Path("project/slow").write_bytes(bytes(1 << 20))
            time.sleep(0.25)
        sync(fd)

    os.fsync = slowly  # type: ignore[assignment]  # it is given a descriptor here
    accelerator.save_state("project/state")
    os.fsync = sync
    step()


def slow_compile() -> None:
    """A compiler that takes its time on one rank; its frames are those of torch's own, as far as a look at the stack can tell."""
    names: dict[str, Any] = {"sleep": time.sleep}
    source = f"def slowly(graph, inputs):\n    sleep({2.5 * AFTER_S if main else 0})\n    return graph.forward\n"
    exec(
        compile(
            source, f"{Path(torch.__file__).parent}/_inductor/compile_fx.py", "exec"
        ),
        names,
    )
    torch.compile(nn.Linear(4, 4), backend=names["slowly"])(torch.ones(2, 4))
    step()


def soak() -> None:
    for _ in range(2):
        for harmless in (long_first, long_everywhere, long_save, slow_compile):
            harmless()
            for _ in range(20):
                step()
            accelerator.gather(torch.ones(3))


case: Callable[[], None] = globals()[name]
for _ in range(2):  # the second step is the first with DDP's final buckets
    step()
case()
accelerator.end_training()
sys.stdout.write(f"finished {rank}\n")  # in one piece, beside the other rank's
