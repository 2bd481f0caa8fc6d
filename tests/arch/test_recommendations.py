"""An error never recommends what does not exist: commands, flags, extras, functions and methods named in messages are real."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.utils.data import DataLoader

import hasten
import hasten.extensions.bigmodel
import hasten.extensions.trainer
from hasten import Accelerator, optional
from hasten.cli.flags import SettingsParser
from hasten.cli.main import commands, function_of
from hasten.data.loader import Loader
from hasten.extensions.muon import muon
from hasten.optim.ema import EMA
from hasten.optim.optimizer import PreparedOptimizer
from hasten.testing import pool
from hasten.tracking.registry import tracker_class, tracker_names
from tests.support.syntax import trees

SOURCE: Final = Path(hasten.__file__).parent
ROOT: Final = SOURCE.parent.parent
SAYING: Final = frozenset(
    {"debug", "info", "warning", "warn", "error", "say", "write", "leave"}
)
_CALL: Final = re.compile(
    r"(?<![\w.'\"\]])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\((?!s\)|es\))"
)
_FLAG: Final = re.compile(r"(?<![\w-])--([a-z][a-z_-]+)")
FOREIGN_FLAGS: Final = frozenset(
    {
        "help",
        "version",
        "kill-on-bad-exit",
        "ntasks-per-node",
        "wait",
        "exclude",
        "include",
    }
)  # of srun and DeepSpeed
WORDS: Final = frozenset(
    {
        *(
            "functools.partial",
            "partial",
            "pytest.MonkeyPatch.context",
            "mask.sum",
            "reduce_batch_size_fn",
            "zip",
        ),
        "shuffle",  # of datasets' streams
        "save_checkpoint",  # of DeepSpeed's engines
        "generate",  # of transformers' models
        "set_requires_gradient_sync",  # of torch's FSDPModule
    }
)


def messages() -> Iterator[tuple[Path, str]]:
    """Every text that is raised, logged or said."""
    for path, tree in trees(SOURCE).items():
        for node in ast.walk(tree):
            is_message_call = (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) in SAYING
            )
            if isinstance(node, ast.Raise) or is_message_call:
                for child in ast.walk(node):
                    if isinstance(child, ast.Constant) and isinstance(child.value, str):
                        yield path, child.value


def exists(name: str) -> bool:
    """Whether a function or method of this name is there, on what a user holds or in the modules a message may name."""
    first, _, attribute_path = name.partition(".")
    if first in ("torch", "hasten") and attribute_path:
        owner: object = torch if first == "torch" else hasten
        for attribute in attribute_path.split("."):
            if not hasattr(owner, attribute):
                return False
            owner = getattr(owner, attribute)
        return True
    last = name.rpartition(".")[2]
    holders = (
        Accelerator,
        hasten,
        hasten.extensions.bigmodel,
        hasten.data,
        hasten.extensions.trainer,
        hasten.Trainer,
        EMA,
        muon,
        hasten.extending.Progress,
        pool,
        Loader,
        PreparedOptimizer,
        nn.Module,
        torch.Tensor,
        DataLoader,
        torch,
    )
    if first == "accelerator":
        return hasattr(Accelerator, last)
    return (
        last == "DataLoader"
        or name in WORDS
        or any(hasattr(holder, last) for holder in holders)
    )


def test_functions_and_methods_in_messages_exist() -> None:
    calls = [
        (path.name, name) for path, text in messages() for name in _CALL.findall(text)
    ]
    assert len(calls) > 40
    assert not [(file, name) for file, name in calls if not exists(name)]
    assert exists("save_state")
    assert not exists("init_empty_weight")
    assert not exists("accelerator.save_everything")
    assert _CALL.findall("call load_model(…) for 3 process(es)") == ["load_model"]


def test_commands_in_texts_exist() -> None:
    used = {
        command
        for tree in trees(SOURCE).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for command in re.findall(r"`hasten ([a-z][\w-]*)", node.value)
    }
    assert used
    paths_by_command = commands()
    assert used <= set(paths_by_command), used - set(paths_by_command)
    for function_path, _ in paths_by_command.values():
        assert callable(function_of(function_path))


def test_flags_in_messages_exist() -> None:
    parser = SettingsParser(prog="hasten launch")
    parser.add_settings()
    parser_flags = {
        word.lstrip("-").replace("-", "_") for word in parser._option_string_actions
    }
    for path in [
        *(SOURCE / "cli").glob("*.py"),
        *(SOURCE / "extensions").rglob("*.py"),
    ]:
        parser_flags |= {
            word.replace("-", "_")
            for word in re.findall(r'"--([a-z_-]+)"', path.read_text())
        }
    for path, text in messages():
        for flag in _FLAG.findall(text):
            assert flag in FOREIGN_FLAGS or flag.replace("-", "_") in parser_flags, (
                f"{path.name}: --{flag} in {text!r}"
            )


def test_extras_and_packages_that_are_recommended_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    for module, extra in optional._EXTRAS:
        assert extra in extras, f"hasten[{extra}]"
        words = " ".join(extras[extra]).replace("-", "_")
        assert module in words, f"hasten[{extra}] does not bring {module}"
    for path in (
        *SOURCE.rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ):
        for extra in re.findall(r"hasten\[(\w+)\]", path.read_text()):
            assert extra in extras, f"{path.name}: hasten[{extra}]"
    packages = " ".join(extras["trackers"]).replace("-", "_")
    assert all(tracker_class(name).package in packages for name in tracker_names())
