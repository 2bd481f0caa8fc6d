"""Every extension can be deleted: the core works without it, and asking for what it provided is an error that says what exists."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from hasten.extension import Extension, Kind, installed

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hasten"
EXTENSIONS = {
    extension.name: extension
    for extension in installed()
    if (SOURCE / "extensions" / extension.name).is_dir()
}

TRAINING = """
import torch
from hasten import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(16, 1), torch.arange(16.0).reshape(16, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("state")
accelerator.load_state("state")
accelerator.print("trained on", accelerator.num_processes, "processes")
accelerator.end_training()
"""

ASKED_FOR = """
import hasten
from hasten.cli.main import commands, main
from hasten.errors import ExtensionError
from hasten.extension import load, offers

for kind, name in {names!r}:
    assert name not in offers(kind), (kind, name)
    try:
        load(kind, name)
    except ExtensionError as error:
        assert f"no installed extension provides" in str(error) and name in str(error), error
    else:
        raise AssertionError(f"{{kind}} {{name}} is still there")
    if kind == "commands":
        assert main([name]) == 2
    if kind == "public_names":
        assert not hasattr(hasten, name)
assert main(["--help"]) == 0
"""


def package_without(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Copy hasten without some extensions, and return an environment whose Python imports the copy."""
    deleted = {SOURCE / "extensions" / name for name in names}

    def ignored(parent: str, children: list[str]) -> set[str]:
        return {
            child
            for child in children
            if child == "__pycache__" or Path(parent) / child in deleted
        }

    shutil.copytree(SOURCE, folder / "hasten", ignore=ignored)
    return os.environ | {"PYTHONPATH": str(folder)}


def run_python(
    arguments: Sequence[str], environment: dict[str, str], folder: Path
) -> str:
    """Run Python; return its output. Fails with the output of the process."""
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def names_of(extension: Extension) -> list[tuple[str, str]]:
    """Return everything that an extension offers, as kind and name."""
    return [
        (kind, name) for kind in get_args(Kind) for name in getattr(extension, kind)
    ]


@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_a_deleted_extension_provided_is_refused(
    name: str, tmp_path: Path
) -> None:
    environment = package_without([name], tmp_path)
    run_python(
        ["-c", ASKED_FOR.format(names=names_of(EXTENSIONS[name]))],
        environment,
        tmp_path,
    )


def test_the_core_trains_alone(tmp_path: Path) -> None:
    environment = package_without(list(EXTENSIONS), tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    launch = ["-m", "hasten", "launch", "--cpu", "--num_processes", "2", "train.py"]
    assert "trained on 2 processes" in run_python(launch, environment, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_core_without_an_extension_is_whole(name: str, tmp_path: Path) -> None:
    """Types, import contracts and the unit tests of the core, without the folder."""
    copy = tmp_path / "repository"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "results"),
    )
    shutil.rmtree(copy / "src" / "hasten" / "extensions" / name)
    shutil.rmtree(copy / "tests" / "extensions" / name, ignore_errors=True)
    environment = os.environ | {
        "PYTHONPATH": f"{copy / 'src'}:{copy / 'dropin' / 'src'}"
    }
    run_python(["-m", "mypy", "src/hasten"], environment, copy)
    run_python(
        [
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
        ],
        environment,
        copy,
    )
    run_python(
        [
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not timed and not exhaustive",
            "tests/unit",
        ],
        environment,
        copy,
    )


def test_the_core_imports_no_extension() -> None:
    """Only the list of names for type checkers, and modules under the names that users write, import extensions."""
    importers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if not path.is_relative_to(SOURCE / "extensions")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("hasten.extensions")
    }
    assert importers <= {
        "__init__.py",
        "data/__init__.py",
        "bigmodel.py",
        "ray.py",
        "trainer.py",
    }
