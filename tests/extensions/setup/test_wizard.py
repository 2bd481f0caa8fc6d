"""The wizard: every path through its questions ends in right settings, and a real terminal with real keys writes them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pexpect
import pytest

from hasten.config import files
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ContradictionError
from hasten.extensions.setup.machine import MachineFacts
from hasten.extensions.setup.wizard import Ask, Question, interview_user

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


class UnansweredQuestion(Exception):
    """Raised by the scripted user at the first question without an answer."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.prompt)
        self.question = question


def possible_answers(question: Question) -> list[Any]:
    """Return the answers that are tried for a question."""
    if question.choices:
        return [value for value, _ in question.choices]
    if question.minimum is None:
        return ["10.0.0.1"]
    return sorted({int(question.default), question.minimum, 2})


def scripted(answers: list[Any]) -> Ask:
    """Return a user who gives these answers in order."""
    remaining = iter(answers)

    def ask(question: Question) -> Any:
        try:
            return next(remaining)
        except StopIteration:
            raise UnansweredQuestion(question) from None

    return ask


def configs_of_every_path(machine: MachineFacts) -> Iterator[Config]:
    """Yield the settings of every path through the questions, without the contradictory ones."""
    open_paths: list[list[Any]] = [[]]
    while open_paths:
        answers = open_paths.pop()
        try:
            yield interview_user(machine, scripted(answers))
        except UnansweredQuestion as unanswered:
            open_paths += [
                [*answers, answer] for answer in possible_answers(unanswered.question)
            ]
        except ContradictionError as error:
            # sizes that do not divide are for the user to correct
            if "does not fit" not in str(error) and "every machine" not in str(error):
                raise


@pytest.mark.parametrize(
    "machine", MACHINES, ids=lambda machine: f"{machine.num_devices}{machine.device}"
)
def test_every_path_ends_in_settings_that_survive_the_file(
    machine: MachineFacts,
) -> None:
    configs = list(configs_of_every_path(machine))
    assert len(configs) >= 3
    for config in configs:
        file = files.read_text(files.dump(config), Path("c.yaml"))
        assert resolve(file=file.entries).config == config


def recommended(question: Question) -> Any:
    """Return the answer of a user who presses Enter."""
    if question.choices:
        return question.choices[0][0]
    return question.default if question.minimum is None else int(question.default)


def test_only_what_matters_is_asked() -> None:
    prompts: list[str] = []

    def ask(question: Question) -> Any:
        prompts.append(question.prompt)
        return recommended(question)

    config = interview_user(MachineFacts(cores=4), ask)
    assert prompts == [
        "Where will training run?",
        "How many machines?",
        "How many processes, over all machines?",
        "Mixed precision?",
    ]
    assert config == resolve(code={"cpu": True, "launch.num_processes": 1}).config
    prompts.clear()
    assert (
        interview_user(MachineFacts(device="tpu", num_devices=8), ask).strategy == "xla"
    )
    assert prompts == ["Where will training run?", "Mixed precision?"]


def test_the_found_number_of_devices_is_not_written_down() -> None:
    config = interview_user(MACHINES[2], recommended)
    assert config.launch.num_processes is None
    assert config.strategy == "ddp"
    assert config.mixed_precision == "bf16"


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
        answer(child, "How many processes", "\x7f2" + ENTER)
        answer(child, "How is the model distributed", DOWN + DOWN + UP + ENTER)
        answer(child, "Mixed precision?", DOWN + ENTER)
        child.expect("strategy: fsdp")
        answer(child, f"Write {path}?", ENTER)
        child.expect("Train with: hasten launch train.py")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
    config = settings_in(path)
    assert config.launch.num_processes == 2
    assert config.strategy == "fsdp"


def test_terminal_left_by_ctrl_c_and_wrong_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with terminal("config", "--config_file", str(path)) as child:
        answer(child, "Where will training run?", ENTER)
        answer(child, "How many machines?", "\x7f0" + ENTER)
        child.expect("a whole number of at least 1")
        child.send("\x7f" + "1" + ENTER)
        answer(child, "How many processes", "\x03")
        child.expect("nothing was written")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 2
    assert not path.exists()
