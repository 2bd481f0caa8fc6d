"""One class for one name, and a reason for every file that is small."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import hasten
from tests.support.syntax import trees

PACKAGE: Final = Path(hasten.__file__).parent
FEWEST_LINES: Final = 60
MOST_FILES: Final = 16
FULL: Final = MappingProxyType(
    {
        "cli": "one thin file for each command",
        "extensions/survive": "the sides of the rank and of the launcher of one capability",
        "data": "loaders, samplers and sources of every kind",
        "runtime": "files imported separately by processes that must not load torch",
    }
)
"""Folders with more files, each with the reason."""
SMALL: Final = MappingProxyType(
    {
        "__main__.py": "`python -m hasten`",
        "accelerator/inference.py": "a public function",
        "accelerator/generating.py": "one feature of the facade, loaded on first use",
        "extensions/checkpoint_tools/data_command.py": "one file for each command",
        "extensions/report/command.py": "one file for each command",
        "config/handoff.py": "used by the launcher and by the Accelerator, which share nothing else",
        "config/sections/trust.py": "one file for each topic of settings",
        "launch/links.py": "a file format shared by `hasten test` and `hasten plan`",
        "launch/targets.py": "the table of launch targets, to which a batch system adds one line",
        "extensions/deepspeed/placeholders.py": "public stand-ins, without DeepSpeed",
        "extensions/public.py": "names for type checkers alone",
        "lazy.py": "imported by every module of public names",
        "progress/tqdm_bar.py": "a public name of its own",
        "extensions/survive/report.py": "a public class without torch",
        "progress/waiting.py": "strategies import it, and its neighbour with the other displays loads rich",
        "bigmodel.py": "the module name that users write for the extension of large models",
        "ray.py": "the module name that users write for the extension of Ray",
        "trainer.py": "the module name that users write for the extension of the Trainer",
        "runtime/context.py": "ProcessContext, imported by forty modules",
        "extensions/survive/folder.py": "names of files, shared by both sides",
        "extensions/survive/lighthouse.py": "the program of a separate process",
        "data/position.py": "Position, imported by fourteen modules",
        "strategies/blocks.py": "imported by eight modules of strategies",
        "strategies/tensor/alone.py": "one transform, chosen by name",
        "strategies/whole.py": "shared by FSDP and tensor parallelism",
        "testing/plugin.py": "the entry point of the pytest plugin",
        "extensions/planning/plan/traffic.py": "formulas, compared with counted bytes by a test",
        "extensions/trainer/state.py": "two public classes without torch",
        "extensions/trainer/step_plan.py": "arithmetic without torch",
        "extensions/metrics/reading.py": "a public class without Prometheus's package",
        "extensions/trackers/dvclive.py": "one file for each service",
        "runtime/affinity.py": "imported by the launcher, without torch",
        "runtime/nodelist.py": "the notation of SLURM's node lists, without torch",
        "strategies/gradient_hooks.py": "private names of torch, away from the sharding that asks",
        "version.py": "read by the build",
    }
)
"""Files under 60 lines, each with the reason why it is not part of another one."""


def small_files(folder: Path) -> dict[str, int]:
    """Return the number of lines of each file under the limit, but for those that name a package."""
    sizes = {
        path.relative_to(folder).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in folder.rglob("*.py")
        if path.name
        # loaded apart
        not in (
            "__init__.py",
            "extension.py",
            "command.py",
            "settings.py",
            "rules.py",
            "part.py",
        )
    }
    return {name: size for name, size in sorted(sizes.items()) if size < FEWEST_LINES}


def without_reason(sizes: Mapping[str, int]) -> list[str]:
    """Return the small files that are not listed."""
    return [
        f"{name} has {size} lines" for name, size in sizes.items() if name not in SMALL
    ]


def full_folders(package: Path) -> dict[str, int]:
    """Return the number of files of each folder over the limit that is not listed, without `__init__.py`."""
    folders = (
        path
        for path in package.rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    )
    counts = {
        folder.relative_to(package).as_posix(): len([*folder.glob("*.py")]) - 1
        for folder in folders
    }
    return {
        name: count
        for name, count in counts.items()
        if count > MOST_FILES and name not in FULL
    }


def names_used_twice(folder: Path) -> dict[str, list[str]]:
    """Return the names of classes that several files define, with the files."""
    files_by_name = defaultdict[str, list[str]](list)
    for path, tree in trees(folder).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files_by_name[node.name].append(path.relative_to(folder).as_posix())
    return {name: files for name, files in files_by_name.items() if len(files) > 1}


def test_every_small_file_has_a_reason() -> None:
    unexplained = without_reason(small_files(PACKAGE))
    assert not unexplained, (
        f"{unexplained}: merge each into the file that imports it, or add it to SMALL with the reason"
    )


def test_a_small_file_without_a_reason_is_found(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("pass\n" * (FEWEST_LINES - 1))
    (tmp_path / "large.py").write_text("pass\n" * FEWEST_LINES)
    (tmp_path / "__init__.py").write_text("")
    assert without_reason(small_files(tmp_path)) == ["small.py has 59 lines"]


def test_a_folder_holds_few_files() -> None:
    assert full_folders(PACKAGE) == {}, (
        "merge files, make a folder for one capability, or add it to FULL with the reason"
    )


def test_a_full_folder_is_found(tmp_path: Path) -> None:
    for name, count in (
        ("full", MOST_FILES + 2),
        ("fits", MOST_FILES + 1),
        ("cli", MOST_FILES + 2),
    ):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.py").touch()
    assert full_folders(tmp_path) == {"full": MOST_FILES + 1}


def test_every_class_has_its_own_name() -> None:
    assert names_used_twice(PACKAGE) == {}


def test_a_name_used_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Entry:\n    class Inner: ...\n")
    (tmp_path / "b.py").write_text("class Entry: ...\nclass Other: ...\n")
    assert names_used_twice(tmp_path) == {"Entry": ["a.py", "b.py"]}
