"""The drop-in beside the original package on one GPU: some hundred small observations, compared one by one.

    PYTHONPATH=src python dropin/tests/on_a_gpu/dropin_on_a_gpu.py                     # on a GPU; the original is installed here
    PYTHONPATH=src python dropin/tests/on_a_gpu/dropin_on_a_gpu.py --original FOLDER   # or unpacked: pip install --target FOLDER
    python dropin/tests/on_a_gpu/dropin_on_a_gpu.py --device cpu --only precision      # one group, without a GPU
    python dropin/tests/on_a_gpu/dropin_on_a_gpu.py --again FOLDER                     # compare notes that --keep FOLDER has left

The functions are in `observed_*.py` and marked by group. Each package has an environment of its own (either_package.py),
in which processes run the groups side by side; a function that hangs or ends its process is noted as such, and another
process goes on after it. A difference that DIFFERENCES.md lists is shown with the beginning of the line that does.

Ends with an error when a difference is not listed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from either_package import PACKAGES, ROOT, _holds_either, build_environment

MODULES = (
    "observed_accelerator",
    "observed_training",
    "observed_big_models",
    "observed_commands",
)
START_S = 120.0
"""How long a process may take to import everything."""
UNSHARED_GROUPS = ("memory",)
"""Groups that look at the whole device, and therefore run when nothing else does."""
TORCHRUN = ("launched", "sharded")
"""Groups that run in the one process of torchrun."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument(
        "--original",
        type=Path,
        help="folder with the original package, where it is not installed",
    )
    parser.add_argument(
        "--all", action="store_true", help="without a GPU, too, what is meant for one"
    )
    parser.add_argument("--only", nargs="+", help="groups, or names of functions")
    parser.add_argument(
        "--minutes",
        type=float,
        default=6,
        help="when to stop and compare what is there",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="processes side by side",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the notes of both packages"
    )
    parser.add_argument("--again", type=Path, help="compare the notes in this folder")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--groups", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    from observed_differences import absent

    if gone := absent():
        sys.exit(f"DIFFERENCES.md has no line with these words any more: {gone}")
    if args.again:
        texts = {
            package: (args.again / f"{package}.json").read_text()
            for package in PACKAGES
        }
        notes = {package: json.loads(text) for package, text in texts.items()}
    else:
        notes = everything(args)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        for package in PACKAGES:
            (args.keep / f"{package}.json").write_text(json.dumps(notes[package]))
    written(args, notes)


# -- the processes ---------------------------------------------------------------------------------------------------
@dataclass
class Lane:
    """The groups that one process after another runs for one package."""

    package: str
    groups: tuple[str, ...]
    python: Path
    folder: Path
    args: argparse.Namespace
    deadline: float

    @property
    def notes(self) -> Path:
        return self.folder / f"{'-'.join(self.groups)}.jsonl"

    def run(self) -> dict[str, Any]:
        """Start processes until every function has been noted, or the time is over."""
        planned_functions = planned(self.groups, self.args)
        self.notes.touch()
        for _ in range(25):
            if (
                time.time() > self.deadline
                or not planned_functions.keys() - done(self.notes).keys()
            ):
                break
            notes_size = self.notes.stat().st_size
            ended = self._until_it_ends(planned_functions)
            open_function = _open(self.notes)
            if time.time() > self.deadline:
                break
            if open_function is not None:
                self._note(open_function, ended)
            elif self.notes.stat().st_size == notes_size:
                for name in planned_functions.keys() - done(self.notes).keys():
                    self._note(name, f"its process did not begin: {ended}")
        finished = done(self.notes)
        return {
            name: {"group": group, "seen": finished.get(name)}
            for name, (group, _) in planned_functions.items()
        }

    def _note(self, name: str, ended: str) -> None:
        with self.notes.open("a") as file:
            file.write(
                json.dumps({"of": name, "key": "process", "value": ended}) + "\n"
            )
            file.write(json.dumps({"name": name}) + "\n")

    def _until_it_ends(self, planned_functions: dict[str, tuple[str, float]]) -> str:
        words = [str(self.python)]
        if self.groups[0] in TORCHRUN:
            words += [
                "-m",
                "torch.distributed.run",
                "--nproc_per_node",
                "1",
                "--master_port",
                str(_port()),
            ]
        words += [__file__, "--inside", str(self.notes), "--groups", *self.groups]
        words += ["--only", *self.args.only] if self.args.only else []
        words += ["--all"] if self.args.all else []
        with self.notes.with_suffix(".log").open("a") as log:
            child = subprocess.Popen(
                words,
                env=self._variables(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            since, size = time.time(), self.notes.stat().st_size
            while child.poll() is None:
                time.sleep(0.1)
                if self.notes.stat().st_size != size:
                    since, size = time.time(), self.notes.stat().st_size
                open_function = _open(self.notes)
                limit = (
                    START_S
                    if open_function is None
                    else planned_functions.get(open_function, ("", START_S))[1]
                )
                if time.time() - since > limit or time.time() > self.deadline:
                    self._stop(child)
                    return (
                        f"hung: not back after {limit:.0f} s"
                        if time.time() < self.deadline
                        else "the time was over"
                    )
        return f"ended its process with exit code {child.returncode}"

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """End a process that this one started, and the worker that torchrun started in it."""
        worker = _worker(self.notes)
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            _kill_group(child.pid)
            child.wait()
        if worker is not None and worker != child.pid:
            _kill_group(worker)

    def _variables(self) -> dict[str, str]:
        room = self.folder / "temporary"
        room.mkdir(exist_ok=True)
        search_folders = [
            Path(search_folder).resolve()
            for search_folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if search_folder
        ]
        path = [
            str(search_folder)
            for search_folder in search_folders
            if search_folder != ROOT / "src" and not _holds_either(search_folder)
        ]
        path += [str(ROOT / "src")] if self.package == "drop-in" else []
        drop = (
            "ACCELERATE_",
            "FSDP_",
            "PYTHON",
            "VIRTUAL_ENV",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_",
        )
        variables = {
            key: value for key, value in os.environ.items() if not key.startswith(drop)
        }
        return variables | {
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join(
                [str(self.python.parent), os.environ.get("PATH", "")]
            ),
            "OBSERVED_DEVICE": self.args.device,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(room),
            "TOKENIZERS_PARALLELISM": "false",
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }


def everything(args: argparse.Namespace) -> dict[str, Any]:
    """The notes of both packages."""
    deadline = time.time() + args.minutes * 60
    groups = list(dict.fromkeys(group for group, _ in planned((), args).values()))
    side_by_side = [(group,) for group in groups if group not in UNSHARED_GROUPS]
    unshared = [(group,) for group in groups if group in UNSHARED_GROUPS]
    notes: dict[str, Any] = {package: {} for package in PACKAGES}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {
            package: python_with(package, Path(folder) / package, args.original)
            for package in PACKAGES
        }

        def lane(package: str, names: tuple[str, ...]) -> None:
            package_lane = Lane(
                package, names, pythons[package], Path(folder) / package, args, deadline
            )
            start_time = time.time()
            notes[package].update(package_lane.run())
            print(
                f"{package}: {', '.join(names)} in {time.time() - start_time:.0f} s",
                flush=True,
            )
            if args.keep:
                args.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(
                    package_lane.notes.with_suffix(".log"),
                    args.keep / f"{package}-{names[0]}.log",
                )

        pairs = [(package, names) for names in side_by_side for package in PACKAGES]
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda pair: lane(*pair), pairs))
        for names in unshared:
            for package in PACKAGES:
                lane(package, names)
    return notes


def python_with(package: str, folder: Path, original: Path | None) -> Path:
    """The interpreter of an environment that holds this package, and the commands it installs."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    library = next(folder.glob("lib/python*"))
    (library / "site-packages").rmdir()
    for path_file in build_environment(package, library, original).glob("*.pth"):
        path_file.unlink()
    commands = {
        "accelerate": "accelerate_cli",
        "accelerate-launch": "launch",
        "accelerate-config": "config",
    }
    modules = {
        name: f"accelerate.commands.{module}" for name, module in commands.items()
    }
    for name, module in {**modules, "torchrun": "torch.distributed.run"}.items():
        script = folder / "bin" / name
        script.write_text(
            f"#!{folder}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)
    return folder / "bin" / "python"


def planned(
    groups: Iterable[str], args: argparse.Namespace
) -> dict[str, tuple[str, float]]:
    """The functions of these groups, or of all, with group and time limit."""
    os.environ.setdefault("OBSERVED_DEVICE", args.device)
    matching = observations(tuple(groups), set(args.only or ()))
    return {
        observation.name: (observation.group, observation.limit)
        for observation in matching
        if args.device == "cuda" or args.all or not observation.cuda
    }


def observations(groups: tuple[str, ...], only: set[str]) -> list[Any]:
    """The functions of these groups, or of all."""
    for module_name in MODULES:
        import_module(module_name)
    group_observations = [
        observation
        for observation in import_module("observing").OBSERVATIONS
        if not groups or observation.group in groups
    ]
    return [
        observation
        for observation in group_observations
        if not only or observation.name in only or observation.group in only
    ]


def inside(args: argparse.Namespace) -> None:
    """Run every function that has not been noted yet, and note it."""
    from observing import CUDA, observed

    notes, groups = args.inside, tuple(args.groups)
    if {"fp8", "precision"} & set(groups):
        with contextlib.suppress(ImportError):
            # what it says when it is imported is no observation
            import_module("torchao")
    behind = done(notes)
    with notes.open("a", buffering=1) as file:
        for observation in observations(groups, set(args.only or ())):
            if observation.name not in behind and (
                CUDA or args.all or not observation.cuda
            ):
                file.write(
                    json.dumps({"begun": observation.name, "pid": os.getpid()}) + "\n"
                )
                start_time = time.time()

                def tell(key: str, value: Any, name: str = observation.name) -> None:
                    file.write(
                        json.dumps({"of": name, "key": key, "value": value}) + "\n"
                    )

                observed(observation, tell)
                file.write(
                    json.dumps(
                        {
                            "name": observation.name,
                            "s": round(time.time() - start_time, 2),
                        }
                    )
                    + "\n"
                )
    file.close()
    os._exit(0)  # threads that a function left behind do not matter any more


def _lines(notes: Path) -> list[dict[str, Any]]:
    lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def done(notes: Path) -> dict[str, Any]:
    """What the functions noted that have ended."""
    lines = _lines(notes)
    finished_notes: dict[str, Any] = {
        line["name"]: {} for line in lines if "name" in line
    }
    for line in lines:
        if line.get("of") in finished_notes:
            finished_notes[line["of"]][line["key"]] = line["value"]
    return finished_notes


def _open(notes: Path) -> str | None:
    """The function that was begun and has not ended."""
    open_function = None
    for line in _lines(notes):
        open_function = line.get("begun", None if "name" in line else open_function)
    return open_function


def _worker(notes: Path) -> int | None:
    pids = [line["pid"] for line in _lines(notes) if "pid" in line]
    return pids[-1] if pids else None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except ProcessLookupError:
        return


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- the comparison --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Difference:
    """One observation that is not equal."""

    group: str
    name: str
    kind: str
    """`different`, or `words` where the same exception, warning or log line is told in other words."""
    original: str
    dropin: str
    listed: str

    def cells(self) -> list[str]:
        return [f"{self.group}: {self.name}", self.original, self.dropin, self.listed]


def compared(notes: dict[str, Any]) -> tuple[dict[str, Counter[str]], list[Difference]]:
    """The counts of each group, and every difference."""
    from observing import apart, where_apart

    original_functions, dropin_functions = (notes[package] for package in PACKAGES)
    counts: dict[str, Counter[str]] = {}
    differences = []
    for name in original_functions:
        group = original_functions[name]["group"]
        original_notes, dropin_notes = (
            original_functions[name]["seen"],
            dropin_functions.get(name, {}).get("seen"),
        )
        count = counts.setdefault(group, Counter())
        if original_notes is None or dropin_notes is None:
            count["not reached"] += 1
            continue
        for key in dict.fromkeys([*original_notes, *dropin_notes]):
            if (key not in original_notes and _ended(original_notes)) or (
                key not in dropin_notes and _ended(dropin_notes)
            ):
                count["not noted"] += 1
                continue
            first, second = (
                original_notes.get(key, "(nothing)"),
                dropin_notes.get(key, "(nothing)"),
            )
            kind = apart(first, second)
            count[kind] += 1
            unequal_parts = list(where_apart(first, second))
            key_differences = [
                _difference(group, f"{name}, {key}", unequal_part, kind)
                for unequal_part in unequal_parts
            ]
            if kind == "different":
                count["listed"] += all(
                    difference.listed for difference in key_differences
                )
            differences += key_differences
    return counts, differences


def _ended(function_notes: dict[str, Any]) -> bool:
    """Whether a function ended early, so that what would have followed was not noted."""
    return "ended" in function_notes or "process" in function_notes


def _difference(
    group: str, name: str, unequal_part: tuple[str, Any, Any], kind: str
) -> Difference:
    from observed_differences import listed

    path, original, dropin = unequal_part
    where = f"{name}, {path}" if path else name
    words = (
        "words"
        if _raised(original)
        and _raised(dropin)
        and original["raised"] == dropin["raised"]
        else "different"
    )
    line = listed(group, where, original, dropin)
    return Difference(
        group,
        where,
        words if kind == "words" else "different",
        _short(original),
        _short(dropin),
        line,
    )


def _raised(value: object) -> bool:
    return isinstance(value, dict) and "raised" in value


def _short(value: object) -> str:
    if isinstance(value, dict) and "raised" in value:
        text = f"{value['raised']}: {value['says']}"
    elif isinstance(value, dict) and "tensor" in value:
        kind = "parameter " if value["tensor"] == "Parameter" else ""
        text = f"{kind}{value['dtype']} {value['device']} {value['shape']} {value.get('values', '')}"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    text = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return text if len(text) < 220 else text[:220] + "…"


def written(args: argparse.Namespace, notes: dict[str, Any]) -> None:
    """Print the tables, and add the run to the results."""
    from loading import installed_versions
    from recording import record_run

    counts, differences = compared(notes)
    platform_versions = installed_versions(args.device)
    number = (
        notes["original"].get("versions", {}).get("seen", {}).get("accelerate", "?")
    )
    platform_versions["accelerate"] = f"{number} in both packages"
    for name in ("transformers", "torchao"):
        try:
            platform_versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            platform_versions[name] = "none"
    lines = page(platform_versions, counts, differences)
    print("\n".join(lines))
    total = sum(counts.values(), Counter())
    totals = {
        "counts": {group: dict(count) for group, count in counts.items()},
        "total": dict(total),
    }
    if not args.only:
        record_run(
            "dropin_on_a_gpu", args.device, totals, "\n".join(lines), platform_versions
        )
    if any(
        difference.kind == "different" and not difference.listed
        for difference in differences
    ):
        sys.exit("there are differences that DIFFERENCES.md does not list")


def page(
    platform_versions: dict[str, str],
    counts: dict[str, Counter[str]],
    differences: list[Difference],
) -> list[str]:
    """The tables."""
    kinds = ("equal", "words", "different", "listed", "not noted", "not reached")
    lines = ["# The drop-in beside the original on one GPU", ""]
    lines += [
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    lines += [
        "`words`: the same exception, told in other words. `listed`: of the different ones, in DIFFERENCES.md."
    ]
    lines += [
        "`not noted`: what follows where a function of one package ended early. `not reached`: whole functions.",
        "",
    ]
    lines += ["| group | " + " | ".join(kinds) + " |", "|" + "---|" * (len(kinds) + 1)]
    total = sum(counts.values(), Counter())
    for group, count in [*counts.items(), ("all", total)]:
        lines.append(
            f"| {group} | " + " | ".join(str(count[kind]) for kind in kinds) + " |"
        )
    for title, section_differences in (
        (
            "Not listed",
            [
                difference
                for difference in differences
                if difference.kind == "different" and not difference.listed
            ],
        ),
        (
            "Listed",
            [
                difference
                for difference in differences
                if difference.kind == "different" and difference.listed
            ],
        ),
        (
            "The same exception in other words",
            [difference for difference in differences if difference.kind == "words"],
        ),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| observation | original | here | line of DIFFERENCES.md |",
            "|---|---|---|---|",
        ]
        lines += [
            "| " + " | ".join(cells) + " |" for cells in gathered(section_differences)
        ]
    return lines


def gathered(differences: list[Difference]) -> list[list[str]]:
    """One row for the differences of a function that show the same."""
    rows: dict[tuple[str, ...], list[Difference]] = {}
    for difference in differences:
        rows.setdefault(
            (
                difference.group,
                difference.name.partition(",")[0],
                difference.original,
                difference.dropin,
                difference.listed,
            ),
            [],
        ).append(difference)
    table = []
    for grouped in rows.values():
        cells = grouped[0].cells()
        cells[0] += f" (and {len(grouped) - 1} more)" if len(grouped) > 1 else ""
        table.append(cells)
    return table


if __name__ == "__main__":
    main()
