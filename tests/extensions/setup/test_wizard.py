"""The wizard: every path through its questions ends in right settings, and a real terminal with real keys writes them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pexpect
import pytest

from hasten.config import files
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ContradictionError
from hasten.extensions.setup.machine import MachineFacts
from hasten.extensions.setup.wizard import Question, interview, questions, to_arguments

MACHINES: Final = (
    MachineFacts(cores=4),
    MachineFacts(
        device="cuda", num_devices=1, device_name="NVIDIA H200", capability=9.0
    ),
    MachineFacts(
        device="cuda",
        num_devices=8,
        device_name="NVIDIA H200",
        capability=9.0,
        cluster="SLURM",
    ),
    MachineFacts(device="tpu", num_devices=8),
    MachineFacts(device="mps", num_devices=1),
)
DOWN, UP, ENTER = "\x1b[B", "\x1b[A", "\r"


def options(question: Question, deep: frozenset[str]) -> list[Any]:
    """Return the answers tried for a question: all of them where its key is looked at deeply, else the default."""
    if not any(question.key.startswith(start) for start in deep):
        return (
            [question.default or "x"] if question.kind == "text" else [question.default]
        )
    match question.kind:
        case "choice":
            return [value for value, _ in question.choices]
        case "yesno":
            return [True, False]
        case "number":
            return [question.default, max(question.minimum, 2)]
        case "text":
            return [question.default or "x"]


def every_path(machine: MachineFacts, deep: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield the complete answers of every path through the questions."""
    open_paths: list[dict[str, Any]] = [{}]
    while open_paths:
        answers = open_paths.pop()
        replayed: dict[str, Any] = {}
        for question in questions(machine, replayed):
            if question.key in answers:
                replayed[question.key] = answers[question.key]
                continue
            open_paths += [
                {**answers, question.key: value} for value in options(question, deep)
            ]
            break
        else:
            yield answers


DEEP: Final = {
    "machines": frozenset({"?place", "launch.", "?meeting", "mixed_precision", "fp8"}),
    "fsdp": frozenset({"strategy", "launch.num_p", "fsdp"}),
    "compile": frozenset({"?place", "?compile", "gradient"}),
    "engines": frozenset({"?place", "strategy", "launch.num_p"}),
}


@pytest.mark.parametrize(
    "machine", MACHINES, ids=lambda machine: f"{machine.num_devices}{machine.device}"
)
@pytest.mark.parametrize("deep", DEEP)
def test_every_path_ends_in_settings_that_survive_the_file(
    machine: MachineFacts, deep: str
) -> None:
    count = 0
    for answers in every_path(machine, DEEP[deep]):
        count += 1
        arguments = to_arguments(machine, answers)
        try:
            config = resolve(code=arguments).config
        except ContradictionError as error:
            # sizes that do not divide are for the user to correct
            if "does not fit" not in str(error):
                raise
            continue
        assert (
            resolve(
                file=files.read_text(files.dump(config), Path("c.yaml")).entries
            ).config
            == config
        )
    assert count >= 1


def test_only_what_matters_is_asked() -> None:
    asked: list[str] = []

    def default(question: Question) -> Any:
        asked.append(question.key)
        return question.default

    config = interview(MachineFacts(cores=4), default)
    assert asked == [
        "?place",
        "launch.num_machines",
        "launch.num_processes",
        "mixed_precision",
        "?compile",
        "gradient_accumulation.num_steps",
    ]
    assert config == resolve(code={"cpu": True, "launch.num_processes": 1}).config
    asked.clear()
    assert (
        interview(MachineFacts(device="tpu", num_devices=8), default).strategy == "xla"
    )
    assert asked == [
        "?place",
        "mixed_precision",
        "?compile",
        "gradient_accumulation.num_steps",
    ]


def test_the_found_number_of_devices_is_not_written_down() -> None:
    config = interview(MACHINES[2], lambda question: question.default)
    assert config.launch.num_processes is None
    assert config.strategy == "ddp"
    assert config.mixed_precision == "bf16"


@pytest.mark.parametrize(
    "machine",
    MACHINES[:3],
    ids=lambda machine: f"{machine.num_devices}{machine.device}",
)
@pytest.mark.parametrize("deep", DEEP)
def test_asked_again_the_answers_are_those_of_the_file(
    machine: MachineFacts, deep: str
) -> None:
    """Pressing Enter at every question of a second run changes nothing."""
    for answers in islice(every_path(machine, DEEP[deep]), 0, None, 7):
        try:
            config = resolve(code=to_arguments(machine, answers)).config
        except ContradictionError:
            continue
        again = interview(machine, lambda question: question.default, config)
        assert again == config


# --- a real terminal -------------------------------------------------------------------------------------------------
@contextmanager
def terminal(*argv: str) -> Iterator[pexpect.spawn[str]]:
    """The command in a pseudo-terminal; whatever happens, it is gone afterwards."""
    command = ["-m", "hasten.cli.main", *argv]
    # This terminal does not answer questions about its cursor; asking would cost seconds.
    env = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm-256color"}
    child = pexpect.spawn(
        sys.executable,
        command,
        env=env,
        encoding="utf-8",
        dimensions=(50, 140),
        timeout=30,
    )
    child.delaybeforesend = None
    try:
        yield child
    finally:
        child.close(force=True)


def answer(child: pexpect.spawn[str], prompt: str, keys: str) -> None:
    """Wait for a question and press keys."""
    child.expect(re.escape(prompt))
    child.expect(r"\x1b\[\?25[hl]|\x1b\[\?7h")  # the prompt is drawn and waits
    child.send(keys)


def settings_in(path: Path) -> Config:
    """Return the settings a file holds."""
    return resolve(file=files.read(path).entries).config


def test_terminal_run_with_fsdp(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with terminal("config", "--config_file", str(path)) as child:
        child.expect("This machine: ")
        answer(child, "Where will training run?", ENTER)
        answer(child, "How many machines?", ENTER)
        answer(child, "How many processes?", "\x7f2" + ENTER)
        answer(child, "Mixed precision?", DOWN + ENTER)
        answer(child, "How is the model distributed", DOWN + DOWN + UP + ENTER)
        answer(child, "When are gathered parameters freed?", DOWN + ENTER)
        answer(child, "What is sharded as one unit?", DOWN + ENTER)
        answer(child, "Class names of the blocks", "Block, Head" + ENTER)
        answer(child, "Keep parameters in host memory", "n")
        answer(child, "Recompute activations", "y")
        answer(child, "Compile the model", ENTER)
        answer(child, "Micro-steps accumulated", "\x7f4" + ENTER)
        child.expect("strategy: fsdp")
        answer(child, f"Write {path}?", ENTER)
        child.expect("Train with: hasten launch train.py")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
    config = settings_in(path)
    assert config.launch.num_processes == 2
    assert config.strategy == "fsdp"
    assert config.fsdp.reshard_after_forward is False
    assert config.fsdp.transformer_cls_names_to_wrap == ("Block", "Head")
    assert config.fsdp.activation_checkpointing
    assert config.gradient_accumulation.num_steps == 4


def test_terminal_left_by_ctrl_c_and_wrong_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with terminal("config", "--config_file", str(path)) as child:
        answer(child, "Where will training run?", ENTER)
        answer(child, "How many machines?", "\x7f0" + ENTER)
        child.expect("a whole number of at least 1")
        child.send("\x7f" + "1" + ENTER)
        answer(child, "How many processes?", "\x03")
        child.expect("nothing was written")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 2
    assert not path.exists()
