"""Record scripts, clients and tutorials under the original package and the drop-in, both at the same time, and compare.

python record.py FOLDER --original PYTHON --dropin PYTHON --apart FOLDER [--only NAME …] [--constraint FILE] [--page FILE]

Each side has processes of its own that stand ready with the heavy libraries imported (warm.py), so that a recording is a fork.
It ends with one table, also in FOLDER/table.md, and fails where something differs that run_parity.EXPLAINED does not list.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from run_parity import EXPLAINED, listed, text_differences, unexplained
from warm import Done, Warm

TESTS_FOLDER = Path(__file__).parent
CONSTRAINTS = TESTS_FOLDER.parent.parent / "constraints.txt"
LIMIT_S: Final = 1200.0
SHOWN: Final = 5
"""Differences of one recording that are printed; a client whose numbers go apart early has thousands."""


@dataclass(frozen=True, slots=True)
class Client:
    """What a script of clients/ needs."""

    modules: tuple[str, ...]
    apart: tuple[str, ...] = ()
    """Distributions that are installed into a folder for this script alone, without their dependencies: they would bring the
    original package into the drop-in's environment, or a torchvision for another torch, which breaks `import transformers`."""

    @property
    def distribution(self) -> str:
        """The distribution whose version the page of clients names."""
        return self.apart[0] if self.apart else self.modules[0].replace("_", "-")


# The longest first.
CLIENTS: Final = {
    "scenarios": Client(("transformers", "peft")),
    "preferences": Client(("trl",)),
    "denoising": Client(
        (
            "denoising_diffusion_pytorch",
            "einops",
            "ema_pytorch",
            "pytorch_fid",
            "torchvision",
        ),
        (
            "denoising-diffusion-pytorch",
            "einops",
            "ema-pytorch",
            "pytorch-fid",
            "torchvision",
        ),
    ),
    "trainer": Client(("transformers",)),
    "lora": Client(("peft",)),
    "sft": Client(("trl",)),
    "sentences": Client(("sentence_transformers",)),
    "few_shot": Client(("setfit",), ("setfit",)),
    "painting": Client(("diffusers",)),
    "accelerated": Client(("pytorch_accelerated",), ("pytorch-accelerated",)),
    "judging": Client(("lm_eval",), ("lm-eval",)),
}
SCRIPTS: Final = "parity"
TUTORIALS: Final = "tutorials"
NAMED: Final = (
    "accelerate",
    "torch",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "evaluate",
)

# The original's notebook_launcher refuses to fork a process that has imported bitsandbytes, as the warm one has.
COLD: Final = ("notebook_vision",)
# The plain loop and the settings file know one process; the notebook starts two by itself; a tracker made before the
# Accelerator lets the original take every process for the first one on CPUs (DIFFERENCES.md).
SINGLE_PROCESS: Final = (
    "basic_config",
    "course_mrpc_plain",
    "notebook_vision",
    "tracking",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One recording: a script on a number of processes."""

    part: str
    script: Path
    processes: int

    @property
    def name(self) -> str:
        """What the recording is called in EXPLAINED."""
        return f"{self.part if self.part == SCRIPTS else self.script.stem}_{self.processes}"

    @property
    def file(self) -> Path:
        """Where it lies in a side's folder."""
        return (
            Path(TUTORIALS, f"{self.name}.txt")
            if self.part == TUTORIALS
            else Path(f"{self.name}.json")
        )


@dataclass(slots=True)
class Verdict:
    """How the two recordings of a job compare."""

    failed: dict[str, Path] = field(default_factory=dict)
    """Sides without a recording, and their logs."""
    different: list[str] = field(default_factory=list)
    listed: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """Parts that end with an error on both sides: equal, and no evidence of anything."""


def jobs(part_names: Iterable[str]) -> list[Job]:
    """Every recording of the chosen parts, the longest first."""
    all_jobs = [
        Job(SCRIPTS, TESTS_FOLDER / "run_parity.py", processes) for processes in (2, 1)
    ]
    all_jobs += [
        Job(name, TESTS_FOLDER / "clients" / f"{name}.py", processes)
        for name in CLIENTS
        for processes in (2, 1)
    ]
    tutorials = sorted(
        path
        for path in (TESTS_FOLDER / "tutorials").glob("*.py")
        if path.stem != "make_hub"
    )
    all_jobs += [Job(TUTORIALS, path, 1) for path in tutorials]
    all_jobs += [
        Job(TUTORIALS, path, 2) for path in tutorials if path.stem not in SINGLE_PROCESS
    ]
    recorded_parts = set(part_names)
    return [job for job in all_jobs if job.part in recorded_parts]


def probe(extras_folder: Path) -> dict[str, Any]:
    """What the running Python lacks for each client, and the versions of what it has."""
    search_path = list(sys.path)
    missing, versions = (
        {},
        {name: version for name in NAMED if (version := version_of(name))},
    )
    for name, client in CLIENTS.items():
        sys.path[:] = [str(extras_folder / name), *search_path]
        importlib.invalidate_caches()
        missing[name] = [
            module
            for module in client.modules
            if importlib.util.find_spec(module) is None
        ]
        versions |= {
            distribution: version
            for distribution in (client.distribution, *client.apart)
            if (version := version_of(distribution))
        }
    sys.path[:] = search_path
    return {"missing": missing, "versions": versions | {"machine": platform.machine()}}


def version_of(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def probed(python: str, extras_folder: Path) -> dict[str, Any]:
    """`probe()` in another Python."""
    done = subprocess.run(
        [python, __file__, "--probe", str(extras_folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=TESTS_FOLDER,
    )
    probe_report: dict[str, Any] = json.loads(done.stdout)
    return probe_report


def install(name: str, extras_folder: Path, constraint: Path) -> None:
    """Put what a client needs beside both environments; where that fails, say so and go on."""
    print(f"installing for {name}: {' '.join(CLIENTS[name].apart)}", flush=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "1",
        "--no-deps",
        "--upgrade",
    ]
    target_options = [
        "--target",
        str(extras_folder / name),
        "--constraint",
        str(constraint),
    ]
    done = subprocess.run(
        [*pip, *target_options, *CLIENTS[name].apart],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(
            f"  not installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}",
            flush=True,
        )


def missing_modules(
    sides: Mapping[str, str],
    part_names: Iterable[str],
    extras_folder: Path,
    out: Path,
    constraint: Path = CONSTRAINTS,
) -> dict[str, dict[str, list[str]]]:
    """What each chosen client lacks, by side, after an attempt to install it. Versions go to the sides' folders."""
    client_names = [name for name in part_names if name in CLIENTS]
    reports = {side: probed(python, extras_folder) for side, python in sides.items()}
    for name in client_names:
        if CLIENTS[name].apart and any(
            report["missing"][name] for report in reports.values()
        ):
            install(name, extras_folder, constraint)
    reports = {side: probed(python, extras_folder) for side, python in sides.items()}
    for side, report in reports.items():
        (out / side).mkdir(parents=True, exist_ok=True)
        (out / side / "versions.json").write_text(json.dumps(report["versions"]) + "\n")
    lacking = {
        name: {side: report["missing"][name] for side, report in reports.items()}
        for name in client_names
    }
    return {name: by_side for name, by_side in lacking.items() if any(by_side.values())}


class Lane:
    """Works off a side's jobs, one after another; several lanes may share the jobs."""

    def __init__(
        self, side: str, python: str, out: Path, work: Path, extras_folder: Path
    ) -> None:
        self.side, self.python, self.out, self.work, self.apart = (
            side,
            python,
            out,
            work,
            extras_folder,
        )
        work.mkdir(parents=True)
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_EVALUATE_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "1",
            "HF_HOME": str(work / "hub"),
        }
        self._filled = False

    def work_off(self, left: queue.Queue[Job]) -> None:
        """Record jobs until none is left."""
        warm = Warm(self.python, self.env, self.work / "log")
        try:
            while True:
                job = left.get_nowait()
                started = time.monotonic()
                done = self.record(warm, job)
                ended = (
                    "failed" if done.failed else f"{time.monotonic() - started:.0f} s"
                )
                print(f"{self.side} {job.name}: {ended}", flush=True)
        except queue.Empty:
            pass
        finally:
            warm.close()

    def record(self, warm: Warm, job: Job) -> Done:
        """Run one job; its recording, or its log where it fails, lies in the side's folder afterwards."""
        out = self.out / job.file
        out.parent.mkdir(parents=True, exist_ok=True)
        for stale in (out, out.with_suffix(".log")):
            stale.unlink(missing_ok=True)
        job_folder = self.work / job.file.with_suffix("")
        job_folder.mkdir(parents=True)
        argv, path = [str(job.script)], [str(self.apart / job.part)]
        if job.part == SCRIPTS:
            argv += ["run", str(out)]
        elif job.part == TUTORIALS:
            path = [str(TESTS_FOLDER / "tutorials" / "stand_ins")]
            self.fill_hub(warm)
        else:
            argv += [str(job_folder / "run"), str(out)]
        env = {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [*path, os.environ.get("PYTHONPATH")])
            )
        }
        run = self.cold if job.script.stem in COLD else warm.run
        done = run(job_folder, argv, job.processes, env, LIMIT_S)
        if done.failed:
            out.with_suffix(".log").write_text(
                "\n".join((str(done.codes), *done.out, *done.err))
            )
        elif job.part == TUTORIALS:
            out.write_text(done.out[0])
        return done

    def cold(
        self,
        folder: Path,
        argv: list[str],
        processes: int,
        env: Mapping[str, str],
        limit_s: float,
    ) -> Done:
        """A script in a process of its own."""
        assert processes == 1, f"{argv[0]}: only scripts on one process start cold"
        done = subprocess.run(
            [self.python, *argv],
            cwd=folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        return Done([done.returncode], [done.stdout], [done.stderr])

    def fill_hub(self, warm: Warm) -> None:
        """Make the Hub's cache that tutorials read from."""
        if not self._filled:
            hub_run = warm.run(
                self.work,
                [str(TESTS_FOLDER / "tutorials" / "make_hub.py"), self.env["HF_HOME"]],
            )
            assert not hub_run.failed, hub_run.err
            self._filled = True


def record(
    sides: Mapping[str, str], todo: list[Job], out: Path, extras_folder: Path
) -> None:
    """Make every recording of every side, as many at a time as there are processors for."""
    if not todo:
        return
    lanes = min(len(todo), max(1, (os.cpu_count() or 1) // (2 * len(sides))))
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(lanes * len(sides)) as pool,
    ):
        running = []
        for side, python in sides.items():
            left: queue.Queue[Job] = queue.Queue()
            for job in todo:
                left.put(job)
            for number in range(lanes):
                lane = Lane(
                    side,
                    python,
                    out / side,
                    Path(folder, f"{side}{number}"),
                    extras_folder,
                )
                running.append(pool.submit(lane.work_off, left))
        for future in running:
            future.result()


def compared(job: Job, out: Path, sides: Iterable[str]) -> Verdict:
    """How a job's recordings compare."""
    files = {side: out / side / job.file for side in sides}
    failed = {
        f"{side} {job.name}": file.with_suffix(".log")
        for side, file in files.items()
        if not file.exists()
    }
    if failed:
        return Verdict(failed=failed)
    first, second = (file.read_text() for file in files.values())
    if job.part == TUTORIALS:
        return Verdict(
            different=[
                f"{job.name}: {difference}"
                for difference in text_differences(first, second)
            ]
        )
    read = json.loads(first), json.loads(second)
    return Verdict(
        different=[
            f"{job.name}: {difference}" for difference in unexplained(job.name, *read)
        ],
        listed={key: EXPLAINED[job.name][key] for key in listed(job.name, *read)},
        errors=[
            key
            for key, value in read[0].items()
            if isinstance(value, dict) and value.keys() == {"error"}
        ],
    )


def cell(verdicts: list[Verdict], missing: Mapping[str, list[str]]) -> str:
    """What the table says about a part on a number of processes."""
    if missing:
        modules = sorted(
            {
                module
                for lacking_modules in missing.values()
                for module in lacking_modules
            }
        )
        return f"not installed: {', '.join(modules)} ({', '.join(side for side, lacking_modules in missing.items() if lacking_modules)})"
    if not verdicts:
        return "–"
    if failed := [name for verdict in verdicts for name in verdict.failed]:
        return f"failed: {', '.join(failed)}"
    if different := sum(len(verdict.different) for verdict in verdicts):
        return f"differs in {different} place{'s' * (different > 1)}"
    keys = [key for verdict in verdicts for key in verdict.listed]
    errors = [key for verdict in verdicts for key in verdict.errors]
    summary = f"equal but for what is listed: {', '.join(keys)}" if keys else "equal"
    return (
        f"{summary}; on both sides an error: {', '.join(errors)}" if errors else summary
    )


NEWEST: Final = "Newest release"


def newest_cells(
    todo: list[Job],
    verdicts: Mapping[Job, Verdict],
    missing: Mapping[str, Mapping[str, list[str]]],
    versions: Mapping[str, str],
) -> dict[str, str]:
    """Return what the page of clients says about each recorded client: its version, and how the packages compare."""
    cells = {}
    for client in dict.fromkeys([job.part for job in todo if job.part in CLIENTS]):
        on_one, on_two = (
            cell([verdicts[job] for job in todo if (job.part, job.processes) == (client, count) and job in verdicts],
                 dict(missing.get(client, {})))
            for count in (1, 2)
        )  # fmt: skip
        comparison = (
            on_one if on_one == on_two else f"{on_one}; on 2 processes {on_two}"
        )
        cells[client] = (
            f"{versions.get(CLIENTS[client].distribution, 'no version')}: {comparison}"
        )
    return cells


def with_newest(page: str, cells: Mapping[str, str]) -> str:
    """Return the page of clients with these cells, by the names of their scripts, in the column `NEWEST`."""
    lines = page.splitlines()
    head = next(line for line in lines if line.startswith("| Client |"))
    column = [title.strip() for title in head.split("|")].index(NEWEST)
    for number, line in enumerate(lines):
        script = re.search(r"\| `tests/clients/(\w+)\.py` \|$", line)
        if script and script[1] in cells:
            row_cells = line.split("|")
            row_cells[column] = f" {cells[script[1]]} "
            lines[number] = "|".join(row_cells)
    return "\n".join(lines) + "\n"


def table(
    todo: list[Job],
    verdicts: Mapping[Job, Verdict],
    missing: Mapping[str, Mapping[str, list[str]]],
) -> list[str]:
    """One row for each part, one column for each number of processes, and below it why listed differences are there."""
    rows = ["| Part | 1 process | 2 processes |", "|---|---|---|"]
    for part_name in dict.fromkeys([job.part for job in todo]):
        cells = [
            cell([verdicts[job] for job in todo if (job.part, job.processes) == (part_name, count) and job in verdicts],
                 dict(missing.get(part_name, {})))
            for count in (1, 2)
        ]  # fmt: skip
        rows.append(f"| {part_name} | {' | '.join(cells)} |")
    reasons = [
        f"- {job.name}, {key}: {why}"
        for job, verdict in verdicts.items()
        for key, why in verdict.listed.items()
    ]
    return rows + (["", *reasons] if reasons else [])


def main() -> int:
    """Record, compare, tell; 1 where a recording failed or differs without being listed."""
    part_names = [SCRIPTS, *CLIENTS, TUTORIALS]
    parser = argparse.ArgumentParser(
        description="Record under both packages and compare."
    )
    parser.add_argument("folder", type=Path, help="where recordings and the table go")
    parser.add_argument(
        "--original", required=True, help="the Python that has the original package"
    )
    parser.add_argument(
        "--dropin", required=True, help="the Python that has the drop-in"
    )
    parser.add_argument(
        "--apart",
        type=Path,
        required=True,
        help="where clients outside both environments are installed",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=part_names,
        default=part_names,
        help="parts to record instead of all",
    )
    parser.add_argument(
        "--constraint",
        type=Path,
        default=CONSTRAINTS,
        help="versions of what is installed apart",
    )
    parser.add_argument(
        "--page",
        type=Path,
        help=f"a page of clients whose column {NEWEST!r} is updated",
    )
    args = parser.parse_args()
    sides = {
        "original": os.path.abspath(args.original),
        "dropin": os.path.abspath(args.dropin),
    }
    out, extras_folder, started = (
        args.folder.absolute(),
        args.apart.absolute(),
        time.monotonic(),
    )
    missing = missing_modules(
        sides, args.only, extras_folder, out, args.constraint.absolute()
    )
    todo = jobs(args.only)
    doable = [job for job in todo if job.part not in missing]
    record(sides, doable, out, extras_folder)
    verdicts = {job: compared(job, out, sides) for job in doable}
    for verdict in verdicts.values():
        for line in verdict.different[:SHOWN]:
            print(line)
        if len(verdict.different) > SHOWN:
            print(f"  and {len(verdict.different) - SHOWN} more")
        for name, log in verdict.failed.items():
            print(f"{name} failed, see {log}")
    table_text = "\n".join(table(todo, verdicts, missing)) + "\n"
    (out / "table.md").write_text(table_text)
    if args.page is not None:
        versions = json.loads((out / "dropin" / "versions.json").read_text())
        cells = newest_cells(todo, verdicts, missing, versions)
        args.page.write_text(with_newest(args.page.read_text(), cells))
    print(
        f"\n{table_text}\n{len(doable)} recordings of each side in {time.monotonic() - started:.0f} s"
    )
    return int(
        any(verdict.failed or verdict.different for verdict in verdicts.values())
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        print(json.dumps(probe(Path(sys.argv[2]))))
    else:
        sys.exit(main())
