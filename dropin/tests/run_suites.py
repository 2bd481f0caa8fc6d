"""Run the test suites of clients, and the original's own scripts, under the original package and the drop-in, and compare.

python run_suites.py FOLDER --original PYTHON --dropin PYTHON [--only NAME …] [--page FILE]

A suite is what the client's sdist has. The Hub is a folder of tiny random models (suites_hub.py); a test that needs more of it fails on
both sides. Fails where a test passes with the original only and LISTED gives no reason. Logs and lists are written to FOLDER.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

HERE: Final = Path(__file__).parent
SIDES: Final = ("original", "dropin")
TEST_LIMIT_S: Final = 120
GROUP_LIMIT_S: Final = 3600.0
TOGETHER: Final = 12
SCRIPT_LIMIT_S: Final = 300.0
SCRIPTS: Final = "accelerate.test_utils.scripts"
TITLE: Final = "## Their own test suites"

# Clients, and the test files to run; none are all that the sdist has. peft has ten thousands of tests of layers: these are the files that
# build models on the meta device, place them, or train them.
SUITES: Final[dict[str, tuple[str, ...]]] = {
    "pytorch-accelerated": (),
    "sentence-transformers": (),
    "setfit": (),
    "transformers": (),
    "diffusers": (),
    "trl": (),
    "peft": (
        "test_cpt.py",
        "test_frod.py",
        "test_helpers.py",
        "test_lorafa.py",
        "test_low_level_api.py",
        "test_other.py",
        "test_pvera.py",
        "test_randlora.py",
        "test_shira.py",
        "test_vblora.py",
        "test_vera.py",
        "test_xlora.py",
    ),
}
# Files that tests import and that their sdist leaves out.
ADDED: Final = {"setfit": {"tests/utils.py": "from tempfile import TemporaryDirectory as SafeTemporaryDirectory\n"}}
# Arguments of the original's scripts that need some, and what they are run with.
ARGUMENTS: Final[dict[str, list[str]]] = {}
# Tests that pass with the original only, "suite: test", with the reason.
LISTED: Final[dict[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """Test files, or a script, that run under both packages."""

    suite: str
    name: str
    folder: Path
    command: tuple[str, ...]
    """With the fields {python}, {bin} (its folder) and {report}."""
    limit_s: float


@dataclass(slots=True)
class Result:
    """Names of a suite's passed tests by side, and its version."""

    version: str
    passed: dict[str, set[str]] = field(default_factory=lambda: {side: set() for side in SIDES})
    files: int = 0

    def only(self, side: str) -> list[str]:
        """Return the tests that passed on this side alone."""
        other = SIDES[1 - SIDES.index(side)]
        return sorted(self.passed[side] - self.passed[other])


def version_of(python: str, distribution: str) -> str:
    """Return the version of a distribution in another environment."""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def unpacked(python: str, name: str, version: str, out: Path) -> Path:
    """Download and unpack the sdist of a release; return its folder."""
    place = out / "sdists" / name
    if not place.exists():
        fetch = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest"]
        subprocess.run([*fetch, str(out / "sdists"), f"{name}=={version}"], check=True)
        [archive] = (out / "sdists").glob(f"{name.replace('-', '[-_]')}-{version}.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")
    [folder] = place.iterdir()
    return folder


def suite_jobs(suite: str, folder: Path) -> list[Job]:
    """Return jobs for the test files of an unpacked sdist, several files in each: most of their time is imports."""
    files = []
    for tests in (one for one in (folder / "tests", folder / "test") if one.is_dir()):
        (tests / "__init__.py").touch()  # peft's sdist leaves it out
        files += sorted(str(file.relative_to(folder)) for file in tests.rglob("test_*.py"))
    for name, content in ADDED.get(suite, {}).items():
        (folder / name).write_text(content)
    files = [name for name in files if not SUITES[suite] or Path(name).name in SUITES[suite]]
    options = f"-q -p no:cacheprovider -o addopts= --timeout {TEST_LIMIT_S} --junitxml {{report}}".split()
    options.append("--continue-on-collection-errors")
    made = []
    for at in range(0, len(files), TOGETHER):
        some = files[at : at + TOGETHER]
        name = " ".join([some[0], *(Path(one).name for one in some[1:])])
        made.append(Job(suite, name, folder, ("{python}", "-m", "pytest", *some, *options), GROUP_LIMIT_S))
    return made


def script_jobs(original: str, out: Path) -> list[Job]:
    """Return the runs of copies of the original's scripts, on one and two processes, and of its command."""
    code = "from importlib.util import find_spec as f; print(f('accelerate').submodule_search_locations[0])"
    home = subprocess.run([original, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    folder = out / "scripts"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(home, "test_utils", "scripts"), folder)
    made = [Job(SCRIPTS, "accelerate test", folder, ("{bin}/accelerate", "test"), SCRIPT_LIMIT_S)]
    ways = {
        "1 process": ["{python}"],
        "2 processes": ["{python}", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "accelerate launch": ["{bin}/accelerate", "launch", "--cpu"],
    }
    for file in sorted(folder.rglob("test_*.py")):
        name = str(file.relative_to(folder))
        for way, start in ways.items():
            command = (*start, name, *ARGUMENTS.get(name, ()))
            made.append(Job(SCRIPTS, f"{name} ({way})", folder, command, SCRIPT_LIMIT_S))
    return made


def passed(report: Path) -> set[str]:
    """Return the names of the tests that a report in JUnit's form calls passed."""
    if not report.exists():
        return set()
    return {
        re.sub(r"0x[0-9a-f]+", "0x", f"{one.get('classname')}::{one.get('name')}")
        for one in ElementTree.parse(report).iter("testcase")
        if all(one.find(kind) is None for kind in ("failure", "error", "skipped"))
    }


def run(job: Job, side: str, python: str, out: Path, home: Path) -> set[str]:
    """Run a job on one side; return the names of what passed."""
    log = out / side / job.suite / (re.sub(r"\W+", "_", job.name)[:80] + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    fields = {"python": python, "bin": str(Path(python).parent), "report": str(report)}
    env = {
        **os.environ,
        "PATH": f"{fields['bin']}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1",  # or the original takes several processes on the CPU for single ones
        "HF_HUB_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "HF_HOME": str(home),
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    }
    command = [word.format(**fields) for word in job.command]
    with log.open("w") as written:
        process = subprocess.Popen(
            command, cwd=job.folder, env=env, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(job.limit_s)
        except subprocess.TimeoutExpired:
            written.write(f"\nstopped after {job.limit_s:.0f} s\n")
            code = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if job.suite == SCRIPTS:
        return {job.name} if code == 0 else set()
    return passed(report)


def run_all(jobs: Iterable[Job], results: Mapping[str, Result], sides: Mapping[str, str], out: Path) -> None:
    """Run jobs one after another, each on both sides at the same time."""
    with ThreadPoolExecutor(len(sides)) as pool:
        for job in jobs:
            started = time.monotonic()
            lists = pool.map(lambda side, job=job: run(job, side, sides[side], out, out / side / "hub"), SIDES)
            found = dict(zip(SIDES, lists, strict=True))
            result = results[job.suite]
            result.files += 1
            for side in SIDES:
                result.passed[side] |= found[side]
                (out / side / f"{job.suite}.passed").write_text("\n".join(sorted(result.passed[side])) + "\n")
            counts = ", ".join(f"{side} {len(found[side])}" for side in SIDES)
            print(f"{job.suite} {job.name}: {counts} passed, {time.monotonic() - started:.0f} s", flush=True)
            for name in sorted(found["original"] - found["dropin"]):
                why = LISTED.get(f"{job.suite}: {name}", "NOT LISTED")
                print(f"  with the original only: {name} ({why})", flush=True)


def table(results: Mapping[str, Result]) -> list[str]:
    """Return one row for each suite, and below it the reasons of listed differences."""
    rows = ["| Suite | Version | Passed by the original | By the drop-in | By one only |", "|---|---|---|---|---|"]
    reasons = []
    for suite, one in results.items():
        if not one.files:
            rows.append(f"| {suite} | {one.version} | no tests in its sdist or wheel | – | – |")
            continue
        only = {side: one.only(side) for side in SIDES}
        said = ", ".join(f"{side} {len(names)}" for side, names in only.items() if names) or "none"
        counts = " | ".join(str(len(one.passed[side])) for side in SIDES)
        rows.append(f"| {suite} | {one.version} | {counts} | {said} |")
        for name in only["original"]:
            reasons.append(f"- {suite}, `{name}`: {LISTED.get(f'{suite}: {name}', 'no reason listed')}")
    return rows + (["", *reasons] if reasons else [])


def with_section(page: str, lines: Iterable[str]) -> str:
    """Return the page with these lines as the table of its section `TITLE`; other words of the section stay."""
    before, title, after = page.partition(TITLE)
    words, mark, _ = after.partition("\n| Suite |")
    if not title:
        before, words = f"{page.rstrip()}\n\n", "\n"
    del mark
    return f"{before}{TITLE}{words.rstrip()}\n\n" + "\n".join(lines) + "\n"


def unlisted(results: Mapping[str, Result]) -> list[str]:
    """Return the tests that pass with the original only and have no reason."""
    names = [f"{suite}: {name}" for suite, one in results.items() for name in one.only("original")]
    return [name for name in names if name not in LISTED]


def main() -> int:
    """Run, compare, report; 1 if a test passes with the original only and is not listed."""
    parts = [SCRIPTS, *SUITES]
    parser = argparse.ArgumentParser(description="Run clients' test suites under both packages and compare.")
    parser.add_argument("folder", type=Path, help="where sdists, logs and lists go")
    parser.add_argument("--original", required=True, help="the Python that has the original package")
    parser.add_argument("--dropin", required=True, help="the Python that has the drop-in")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="suites to run instead of all")
    parser.add_argument("--files", help="only files and scripts whose name matches this regular expression")
    parser.add_argument("--page", type=Path, help=f"a page whose section {TITLE[3:]!r} is updated")
    given = parser.parse_args()
    sides = {"original": os.path.abspath(given.original), "dropin": os.path.abspath(given.dropin)}
    out, started = given.folder.absolute(), time.monotonic()
    if not (out / "hub").exists():
        print("making the stand-ins of the Hub's models", flush=True)
        subprocess.run([sides["original"], str(HERE / "suites_hub.py"), str(out / "hub.part")], check=True)
        (out / "hub.part").rename(out / "hub")
    for side in SIDES:
        shutil.rmtree(out / side / "hub", ignore_errors=True)
        shutil.copytree(out / "hub", out / side / "hub")
    results, jobs = {}, []
    for suite in given.only:
        name = "accelerate" if suite == SCRIPTS else suite
        results[suite] = Result(version_of(sides["original"], name))
        if suite == SCRIPTS:
            jobs += script_jobs(sides["original"], out)
        else:
            jobs += suite_jobs(suite, unpacked(sides["original"], name, results[suite].version, out))
    chosen = [job for job in jobs if not given.files or re.search(given.files, job.name)]
    run_all(chosen, results, sides, out)
    told = table(results)
    if given.page is not None:
        given.page.write_text(with_section(given.page.read_text(), told))
    print("\n".join(["", *told, "", f"{len(chosen)} files and scripts in {time.monotonic() - started:.0f} s"]))
    return int(bool(unlisted(results)))


if __name__ == "__main__":
    sys.exit(main())
