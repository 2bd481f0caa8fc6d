"""What the unit tests would catch: a seeded sample of one-token mutants of the modules that decide, each run in a forked child.

    python -m tests.mutants.run                       # 300 mutants, seed 0: about ten minutes on two cores
    python -m tests.mutants.run --count 60 --module data/order.py

A mutant is killed when a test of its room fails, or when the tests take ten times as long. Survivors are printed with file and line.
`--write` keeps the score in `score.md` beside this file. Exit status 1 if fewer than the wanted share were killed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from tests.mutants.mutate import Mutant, mutants_of

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "hasten"
SCORE: Final = Path(__file__).with_name("score.md")
MIN_TIMEOUT_S: Final = 60.0
PRELOADED: Final = (
    "pytest",
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch.distributed.tensor",
    "safetensors.torch",
    "msgspec",
    "yaml",
    "rich",
)
TESTS: Final = MappingProxyType(
    {
        "data/batch_plan.py": (
            "unit/data/test_plan_laws.py",
            "unit/data/test_shuffle.py",
            "unit/data",
        ),
        "data/order.py": ("unit/data/test_shuffle.py", "unit/data"),
        "data/sampler.py": ("unit/data/test_plan_laws.py", "unit/data"),
        "data/position.py": ("unit/data/test_loader_resume.py", "unit/data"),
        "checkpoint/ownership.py": (
            "unit/checkpoint/test_ckpt_owners.py",
            "unit/checkpoint",
        ),
        "checkpoint/reshard.py": (
            "unit/checkpoint/test_ckpt_reshard.py",
            "unit/checkpoint",
        ),
        "launch/shape.py": ("unit/launch/test_launch_shape.py", "unit/launch"),
        "runtime/mesh_plan.py": (
            "unit/runtime/test_mesh_plan.py",
            "unit/runtime",
            "unit/strategies",
        ),
        "optim/window.py": ("unit/optim",),
        "optim/loss_weights.py": ("unit/optim",),
        "extensions/survive/ledger_plan.py": ("extensions/survive",),
        "extensions/survive/roles_plan.py": ("extensions/survive",),
        "config/layers.py": ("unit/config/test_sources.py", "unit/config"),
    }
)
"""The modules that decide, and the tests of their rooms, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one mutant: killed or not, and the seconds it took."""

    mutant: Mutant
    is_killed: bool
    seconds: float


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import hook that gives one module other source code."""

    def __init__(self, name: str, source: str, path: Path) -> None:
        self.name = name
        self.source = source
        self.path = path

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the mutated module, None for all others."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_source(self, fullname: str) -> str:
        """Return the mutated source."""
        return self.source

    def is_package(self, fullname: str) -> bool:
        """Return False: only modules are mutated."""
        return False


def run_tests(
    tests: Sequence[str], mutant: Mutant | None, timeout_s: float
) -> tuple[bool, float]:
    """Run tests in a forked child, with a mutated module if one is given; return whether all passed, and the seconds."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(_run_in_child(tests, mutant))
    status = _wait(pid, started + timeout_s)
    return status == 0, time.monotonic() - started


def _run_in_child(tests: Sequence[str], mutant: Mutant | None) -> int:
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        if mutant is not None:
            name = "hasten." + mutant.module.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(
                0, MutatedModule(name, mutant.source, SOURCE / mutant.module)
            )
        marks = "not slow and not exhaustive and not timed"
        plugins = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--assert=plain",
        ]  # rewriting would import the module itself
        options = ["-x", "-q", *plugins, "-m", marks]
        pytest = importlib.import_module("pytest")
        return int(
            pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)])
        )
    # whatever a mutant does, it ends here: the parent counts it as killed
    except BaseException:
        return 3


def _wait(pid: int, deadline: float) -> int:
    """Return the exit status of a child; -1 if it had to be killed at the deadline."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1
        time.sleep(0.05)


def sample_mutants(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return a seeded sample, in which a module has its share of all mutants."""
    mutants = [
        mutant
        for module in modules
        for mutant in mutants_of(module, (SOURCE / module).read_text("utf-8"))
    ]
    sampled = random.Random(seed).sample(mutants, min(count, len(mutants)))
    return sorted(sampled, key=lambda mutant: (mutant.module, mutant.line))


def report(verdicts: Sequence[Verdict], seed: int) -> str:
    """Return the score by module and the survivors as Markdown."""
    lines = [
        "# Mutants",
        "",
        f"Made by `make mutants` with seed {seed}: one-token mutants, and those that a unit test caught.",
        "",
    ]
    lines += ["| module | mutants | killed |", "| --- | --- | --- |"]
    for module in sorted({verdict.mutant.module for verdict in verdicts}):
        outcomes = [
            verdict.is_killed for verdict in verdicts if verdict.mutant.module == module
        ]
        lines.append(f"| {module} | {len(outcomes)} | {sum(outcomes)} |")
    num_killed = sum(verdict.is_killed for verdict in verdicts)
    lines.append(
        f"| all | {len(verdicts)} | {num_killed} ({num_killed / max(len(verdicts), 1):.1%}) |"
    )
    survivors = [verdict.mutant.name for verdict in verdicts if not verdict.is_killed]
    lines += ["", "## Survivors", ""] + [f"- `{name}`" for name in survivors]
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run a sample of mutants and print the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutants to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time"
    )
    parser.add_argument(
        "--module",
        action="append",
        choices=sorted(TESTS),
        help="only this module; may be repeated",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.0,
        help="the share that must be killed, such as 0.95",
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the score in score.md"
    )
    args = parser.parse_args()
    modules = [module for module in args.module or TESTS if (SOURCE / module).exists()]
    for name in PRELOADED:
        importlib.import_module(name)
    mutants = sample_mutants(modules, args.count, args.seed)
    with ThreadPoolExecutor(args.jobs) as pool:
        timeouts = dict(zip(modules, pool.map(_timeout_of, modules), strict=True))
        mutants = [mutant for mutant in mutants if timeouts[mutant.module] > 0]

        def judge(mutant: Mutant) -> Verdict:
            all_passed, seconds = run_tests(
                TESTS[mutant.module], mutant, timeouts[mutant.module]
            )
            outcome = "survived" if all_passed else "killed"
            say(f"{outcome:8} {seconds:5.1f} s {mutant.name}")
            return Verdict(mutant, not all_passed, seconds)

        verdicts = list(pool.map(judge, mutants))
    text = report(verdicts, args.seed)
    say(text)
    if args.write:
        SCORE.write_text(text, encoding="utf-8")
    num_killed = sum(verdict.is_killed for verdict in verdicts)
    return int(num_killed < args.share * len(verdicts) or min(timeouts.values()) == 0)


def _timeout_of(module: str) -> float:
    """Return ten times what the tests of a module take unchanged; 0 if they fail, which leaves the module out."""
    all_passed, seconds = run_tests(TESTS[module], None, 900.0)
    if not all_passed:
        say(
            f"left out: the tests of {module} fail without a mutant: {', '.join(TESTS[module])}"
        )
        return 0.0
    return max(MIN_TIMEOUT_S, 10 * seconds)


if __name__ == "__main__":
    sys.exit(main())
