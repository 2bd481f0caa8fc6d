"""Healthy but odd programs, each in a few lines: run as `odd_cases.py HOLD_S NOTE_S NAME…`. No watchdog may end any of them.

Each keeps one rank busy for HOLD_S in a way that looks like a stall from outside. Before it, that rank has waited for NOTE_S, long enough to
post its wait, and then trained on for an instant: what it had posted is still there, and old.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator
from hasten.comm.encoding import Codec, decode, encode

HOLD_S, NOTE_S = float(sys.argv[1]), float(sys.argv[2])
accelerator = Accelerator(project_dir="project")
rank = accelerator.process_index
main = rank == 0
pair = dist.new_group([0, 1])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
HOLDER: Final = 1
"""The rank that keeps the others waiting; rank 0 is the one that judges."""


def step(x: Tensor | None = None) -> None:
    """One step of training."""
    accelerator.backward(model(torch.ones(2, 4) if x is None else x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def leave_an_old_note() -> None:
    """Wait long enough for the watchdog to post it, then go on at once."""
    if rank != HOLDER:
        time.sleep(NOTE_S)
    accelerator.wait_for_everyone()
    for _ in range(3):
        step()


# ------------------------------------------------------------------------------------------ native code with the GIL
def native_sleep() -> None:
    if rank == HOLDER:
        ctypes.PyDLL(None).usleep(int(HOLD_S * 1e6))  # keeps the GIL, unlike CDLL


def hold_in(work: Callable[[int], object], start: int, power: float) -> None:
    """Call `work` once with a size for which it takes about HOLD_S; its time grows as the size to this power."""
    size, took = start, 0.0
    while took < 0.1:
        size = int(size * 1.5)
        begin = time.perf_counter()
        work(size)
        took = time.perf_counter() - begin
    work(int(size * (HOLD_S / took) ** (1 / power)))


def long_regex() -> None:
    if rank == HOLDER:  # as many steps as the square of the length, in one call
        hold_in(lambda size: re.search(r"a*a*b", "a" * size), 200, 3)


def big_json() -> None:
    if rank == HOLDER:
        sys.set_int_max_str_digits(0)
        hold_in(lambda size: json.loads("9" * size), 10_000, 2)


def big_pickle() -> None:
    if rank == HOLDER:
        sys.set_int_max_str_digits(0)
        hold_in(lambda size: pickle.loads(b"L" + b"9" * size + b"L\n."), 10_000, 2)


def no_thread_switches() -> None:
    if rank == HOLDER:
        previous_interval = sys.getswitchinterval()
        sys.setswitchinterval(2 * HOLD_S)
        until = time.monotonic() + HOLD_S
        while time.monotonic() < until:
            sum(range(1000))
        sys.setswitchinterval(previous_interval)


# -------------------------------------------------------------------------------------------------- stopped and starved
def stop_for(pid: int) -> None:
    """Stop a process for the time, from outside; the caller is stopped before this returns, if it is the one."""
    words = f"kill -STOP {pid}; sleep {0.75 * HOLD_S}; kill -CONT {pid}"
    started = subprocess.Popen(["/bin/sh", "-c", words], start_new_session=True)
    time.sleep(0.2)
    threading.Thread(target=started.wait, daemon=True).start()


def stopped() -> None:
    if rank == HOLDER:
        stop_for(os.getpid())


def main_stopped() -> None:
    if main:
        stop_for(os.getpid())


def starved() -> None:
    """A long forward on a processor that other programs use."""
    if rank != HOLDER:
        step()
        return
    burn = f"import time\nend = time.monotonic() + {HOLD_S}\nwhile time.monotonic() < end: pass"
    burners = [
        subprocess.Popen([sys.executable, "-S", "-c", burn])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    step(torch.ones(1 << 18, 4))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    for burner in burners:
        burner.wait()


def swapping() -> None:
    """Pages that the kernel has dropped are read again and again."""
    if rank != HOLDER:
        return
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.truncate(1 << 26)
        os.fsync(file.fileno())
        until = time.monotonic() + HOLD_S
        while time.monotonic() < until:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                torch.frombuffer(pages, dtype=torch.uint8)[::4096].sum()
                # the tensor is gone, so the map can be closed


def fork_storm() -> None:
    if rank == HOLDER:
        until = time.monotonic() + HOLD_S
        while time.monotonic() < until:
            for _ in range(8):
                if not (pid := os.fork()):
                    os._exit(0)
                os.waitpid(pid, 0)


def no_descriptors() -> None:
    """The rank that judges can open no file while it waits."""
    if rank == HOLDER:
        time.sleep(HOLD_S)
    if not main:
        accelerator.wait_for_everyone()
        return
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (len(os.listdir("/proc/self/fd")), limits[1]),  # noqa: PTH208
    )
    accelerator.wait_for_everyone()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def other_time() -> None:
    """A program that sets the clock, as tests of calendars do."""
    real_time, day = time.time, 86400.0
    time.time = lambda: real_time() + (day if main else -day)
    if rank == HOLDER:
        time.sleep(HOLD_S)
    accelerator.wait_for_everyone()
    time.time = real_time


# ------------------------------------------------------------------------------------------------ slow parts of training
class Slow(Dataset[Tensor]):
    """A dataset with one slow sample on one rank."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if rank == HOLDER and index == 4:
            time.sleep(HOLD_S)
        return torch.ones(4)


def slow_data() -> None:
    for x in DataLoader(Slow(), batch_size=2):
        step(x)


def slow_worker() -> None:
    for x in DataLoader(Slow(), batch_size=2, num_workers=1):
        step(x)


def slow_first() -> None:
    with accelerator.main_process_first():
        if main:
            time.sleep(HOLD_S)


def uneven_evaluation() -> None:
    with torch.no_grad():
        until = time.monotonic() + (HOLD_S if rank == HOLDER else 0.0)
        while time.monotonic() < until:
            net(torch.ones(256, 4))
    accelerator.gather(torch.ones(2))


def slow_save_hook() -> None:
    hook = accelerator.register_save_state_pre_hook(
        lambda *_: time.sleep(HOLD_S if rank == HOLDER else 0.0)
    )
    accelerator.save_state("project/state")
    hook.remove()


def slow_file() -> None:
    """A thread writes a few bytes now and then into a pipe that the training thread reads to its end."""
    if rank != HOLDER:
        return
    path = Path("slow.fifo")
    os.mkfifo(path)

    def trickle() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(10):
                time.sleep(HOLD_S / 10)
                file.write(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    assert len(path.read_bytes()) == 10
    thread.join()
    path.unlink()


def builds_in_forward() -> None:
    """The first forward of an installed package's layer builds its kernels in another process."""
    names: dict[str, Any] = {"run": subprocess.run, "Module": nn.Module}
    words = ["sleep", str(HOLD_S if rank == HOLDER else 0)]
    source = f"class Layer(Module):\n    def forward(self, x):\n        run({words})\n        return x\n"
    exec(
        compile(source, "/usr/lib/python3/site-packages/layers/layer.py", "exec"), names
    )
    layer = nn.Sequential(names["Layer"](), nn.Linear(4, 1))
    built = (
        nn.parallel.DistributedDataParallel(layer, process_group=pair)
        if rank < 2
        else layer
    )
    built(torch.ones(2, 4)).sum().backward()


def first_compile() -> None:
    """One rank compiles its step, the other has done so already; the compiler is torch's own, with the time it takes on top."""
    names: dict[str, Any] = {"sleep": time.sleep}
    source = f"def slowly(graph, inputs):\n    sleep({HOLD_S if rank == HOLDER else 0})\n    return graph.forward\n"
    exec(
        compile(
            source, f"{Path(torch.__file__).parent}/_inductor/compile_fx.py", "exec"
        ),
        names,
    )
    torch.compile(nn.Linear(4, 4), backend=names["slowly"])(torch.ones(2, 4))


def inductor() -> None:
    """The real compiler, on one rank alone."""
    if rank == HOLDER:
        torch.compile(nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.LayerNorm(64)))(
            torch.ones(2, 4)
        )


def asks() -> None:
    """A rank waits for an answer of the user."""
    if rank == HOLDER:
        with subprocess.Popen(["sleep", str(HOLD_S)], stdout=subprocess.PIPE) as person:
            assert person.stdout is not None
            person.stdout.read()


def trains_in_a_thread() -> None:
    """The thread that made the Accelerator only waits for the one that trains."""

    def train() -> None:
        for number in range(4):
            if number == 2 and rank == HOLDER:
                time.sleep(HOLD_S)
            step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def slow_object() -> None:
    """An object that takes long to encode, sent from one line and received at another."""
    if main:
        world: Any = accelerator.ctx.world
        world.codec = Codec(encode_slowly, decode)
        accelerator.ctx.world.broadcast_object({})
    else:
        accelerator.ctx.world.broadcast_object(None)


def encode_slowly(value: object) -> bytes:
    """Encode an object as one that takes long."""
    time.sleep(HOLD_S)
    return encode(value)


def one_leaves() -> None:
    """With three ranks: the last has nothing more to do, and the others go on in a group of their own."""
    if rank == 2:
        sys.stdout.write(f"finished {rank}\n")
        sys.exit()
    for number in range(4):
        if number == 2 and rank == HOLDER:
            time.sleep(HOLD_S)
        dist.all_reduce(torch.ones(2), group=pair)
    sys.stdout.write(f"finished {rank}\n")
    sys.exit()


for name in sys.argv[3:]:
    leave_an_old_note()
    globals()[name]()
    for _ in range(2):
        step()
accelerator.wait_for_everyone()
accelerator.end_training()
sys.stdout.write(f"finished {rank}\n")  # in one piece, beside the other rank's
