"""Two machines (network namespaces) of which one is killed again and again at a random update: how soon the run goes on, what is lost.

sudo python benchmarks/lost_machine.py --kills 20 [--from disk] [--strategy fsdp] [--width 512] [--out benchmarks/results]

Everything on the killed machine dies by SIGKILL, its launcher as well, and its folder in memory is removed, as if its power went. The
time counts from the start of its new launcher to the end of the first new update on both machines. Launchers and ranks are forks of processes
in which torch is loaded: what Python takes to load it is left out, in all columns.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from recording import record

from tests.support.machines import NamespaceMachine, machines, meet, warm_launcher

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"


# -- the training script ------------------------------------------------------------------------------------------------
def train(args: argparse.Namespace) -> None:
    """The program of every rank: a small model with dropout, a schedule, shuffled data; one line in a file for every update."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from hasten import Accelerator, set_seed

    class Progress:
        step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    torch.set_num_threads(1)
    set_seed(0)
    every = 1 if args.source == "memory" else None
    accelerator = Accelerator(
        cpu=True,
        strategy=args.strategy,
        project_dir="run",
        checkpoint_in_memory=every,
        project_config={"total_limit": 2},
    )
    layers = [nn.Linear(32, args.width), nn.Dropout(0.2), nn.Linear(args.width, args.width), nn.Linear(args.width, 1)]
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    loader: Any = DataLoader(TensorDataset(torch.randn(256, 32), torch.randn(256, 1)), batch_size=4, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    begun = time.perf_counter()
    resumed = bool(accelerator.load_state(must_exist=False))
    took = time.perf_counter() - begun
    log = Path(f"updates-{accelerator.process_index}").open("a")  # noqa: SIM115 - open until the process is killed
    print(json.dumps({"resumed": progress.step if resumed else -1, "s": took, "at": time.time()}), file=log, flush=True)
    while progress.step < args.updates:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            time.sleep(args.pause)
            print(json.dumps({"step": progress.step, "at": time.time()}), file=log, flush=True)
            if args.source == "disk" and progress.step % args.every == 0:
                accelerator.save_state()
            if progress.step == args.updates:
                break
    digest = hashlib.sha256()
    for tensor in accelerator.get_state_dict(model).values():
        digest.update(tensor.numpy().tobytes())
    digest.update(torch.randn(4).numpy().tobytes())
    Path(f"end-{accelerator.process_index}").write_text(digest.hexdigest())
    accelerator.wait_for_everyone()


# -- the machines -------------------------------------------------------------------------------------------------------
@contextmanager
def warm_ranks(path: str) -> Iterator[list[str]]:
    """The command of a rank that is forked from a process with torch in it."""
    with subprocess.Popen(
        [sys.executable, str(SUPPORT / "rank_zygote.py"), "serve", path], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield ["--no_python", "--", sys.executable, "-S", str(SUPPORT / "rank_zygote.py"), "rank", path]
        server.kill()


def start(machine: NamespaceMachine, number: int, folder: Path, words: list[str]) -> float:
    """Start the launcher of a machine; when."""
    flags = [*meet(2), f"--machine_rank={number}", "--processes_per_machine=1", "--max_restarts=100"]
    at = time.time()
    machine.start(folder, [*flags, *words], OMP_NUM_THREADS="1")
    return at


# -- killing ------------------------------------------------------------------------------------------------------------
def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"updates-{rank}"
    found = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}")]


def wait_until(condition: Any, folder: Path, seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            for log in sorted(folder.glob("host-*")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)
            sys.exit("the run did not go on")
        time.sleep(0.02)
    return found


def after(folder: Path, rank: int, start: float, key: str) -> dict[str, Any] | None:
    return next((line for line in lines(folder, rank) if key in line and line["at"] > start), None)


def newest_step(folder: Path) -> int:
    return max((line["step"] for rank in range(2) for line in lines(folder, rank) if "step" in line), default=0)


def run(args: argparse.Namespace, kills: int) -> tuple[list[dict[str, Any]], str, float, float]:
    """The kills, the digest of the weights at the end, the median seconds of an update, and those from a first start to its first update."""
    options = [
        f"--updates={args.updates}",
        f"--strategy={args.strategy}",
        f"--width={args.width}",
        f"--pause={args.pause}",
    ]
    options += [f"--from={args.source}", f"--every={args.every}"]
    found = []
    chance = random.Random(args.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hasten-lost-")))
        zygote = stack.enter_context(warm_launcher(SUPPORT / "launch_zygote.py", folder / "home"))
        words = [*stack.enter_context(warm_ranks(str(folder / "socket"))), __file__, "--worker", *options]
        made = stack.enter_context(machines(zygote, 2))
        begun = time.time()
        for number, machine in enumerate(made):
            start(machine, number, folder, words)
        first = [wait_until(partial(after, folder, rank, begun, "step"), folder) for rank in range(2)]
        cold_s = max(line["at"] for line in first) - begun
        share = args.updates // (kills + 1)
        for kill in range(kills):
            target = kill * share + chance.randint(2, share)
            wait_until(lambda target=target: newest_step(folder) >= target, folder)
            time.sleep(chance.random() * 0.1)
            victim = chance.randrange(2)
            made[victim].kill()
            before = newest_step(folder)
            time.sleep(args.away)
            at = start(made[victim], victim, folder, words)
            resumed = [wait_until(partial(after, folder, rank, at, "resumed"), folder) for rank in range(2)]
            first = [wait_until(partial(after, folder, rank, at, "step"), folder) for rank in range(2)]
            found.append(
                {
                    "machine": victim,
                    "killed at": before,
                    "went on at": resumed[0]["resumed"],
                    "updates lost": before - resumed[0]["resumed"],
                    "load (s)": max(line["s"] for line in resumed),
                    "first update after return (s)": max(line["at"] for line in first) - at,
                }
            )
            print(found[-1], flush=True)
        wait_until(lambda: all((folder / f"end-{rank}").exists() for rank in range(2)), folder, 600)
        digests = {(folder / f"end-{rank}").read_text() for rank in range(2)}
        stamps = [line["at"] for line in lines(folder, 0) if "step" in line]
        gaps = [b - a for a, b in itertools.pairwise(stamps)]
        time.sleep(1)
    return found, " ".join(sorted(digests)), statistics.median(gaps), cold_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--from", dest="source", choices=("memory", "disk", "none"), default="memory")
    parser.add_argument("--every", type=int, default=1, help="updates between two checkpoints on the disk")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that an update takes longer than it does")
    parser.add_argument("--away", type=float, default=1.0, help="seconds between the kill and the return")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return
    kept, args.source = args.source, "none"
    _, wanted, plain_s, _ = run(args, 0)
    args.source = kept
    found, digest, update_s, cold_s = run(args, args.kills)
    table = {
        "copies": args.source,
        "strategy": args.strategy,
        "state (MB)": round(3 * 4 * (33 * args.width + (args.width + 1) * args.width + args.width + 1) / 1e6, 1),
        "kills": len(found),
        "of machine 0": sum(kill["machine"] == 0 for kill in found),
        "most updates lost": max(kill["updates lost"] for kill in found),
        "load, median (s)": round(statistics.median(kill["load (s)"] for kill in found), 3),
        "first update after return, median (s)": round(
            statistics.median(kill["first update after return (s)"] for kill in found), 2
        ),
        "longest (s)": round(max(kill["first update after return (s)"] for kill in found), 2),
        "first update of a fresh job, with nothing to load (s)": round(cold_s, 2),
        "update without copies (ms)": round(1e3 * plain_s, 1),
        "update with copies (ms)": round(1e3 * update_s, 1),
        "weights as without kills": "bitwise" if digest == wanted else f"no: {digest} instead of {wanted}",
    }
    page = "\n".join(
        [
            "| " + " | ".join(table) + " |",
            "|" + "---|" * len(table),
            "| " + " | ".join(map(str, table.values())) + " |",
            "",
        ]
    )
    print(page)
    if args.out is not None:
        setting = f"from {args.source}, width {args.width}"
        record("lost_machine", setting, {"summary": table, "kills": found}, page, folder=args.out)
    if digest != wanted:
        sys.exit(1)


if __name__ == "__main__":
    main()
