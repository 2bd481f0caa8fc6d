"""The wizard of `hasten config`: asks with arrow keys, shows the file, writes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import questionary

from hasten.cli.machine import Machine
from hasten.cli.questions import Question, questions, remembered, to_arguments
from hasten.config.files import dump, read, write
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ConfigError

Ask = Callable[[Question], Any]


class Abandoned(ConfigError):
    """The user left the wizard; nothing was written."""


def interview(machine: Machine, ask: Ask, before: Config | None = None) -> Config:
    """Return the settings that follow from the answers; `ask` puts one question, `before` gives its default.

    Raises: ConfigError when the answers contradict each other.
    """
    answers: dict[str, Any] = {}
    for question in questions(machine, answers):
        answers[question.key] = ask(remembered(question, before) if before else question)
    return resolve(code=to_arguments(machine, answers)).config


def ask_in_terminal(question: Question) -> Any:
    """Put a question with questionary and return its answer as the setting's type.

    Raises: Abandoned on Ctrl-C.
    """
    match question.kind:
        case "choice":
            choices = [questionary.Choice(text, value=value) for value, text in question.choices]
            default = next(choice for choice in choices if choice.value == question.default)
            prompt = questionary.select(question.prompt, choices, default=default, instruction="(arrow keys)")
        case "yesno":
            prompt = questionary.confirm(question.prompt, default=question.default)
        case "number":
            prompt = questionary.text(
                question.prompt, default=str(question.default), validate=lambda text: _number_problem(question, text)
            )
        case "text":
            prompt = questionary.text(
                question.prompt, default=question.default, validate=lambda text: question.check(text.strip()) or True
            )
    answer = prompt.unsafe_ask()
    if question.kind == "number":
        return int(answer)
    return answer.strip() if isinstance(answer, str) else answer


def _number_problem(question: Question, text: str) -> str | bool:
    if not text.strip().isdigit() or int(text) < question.minimum:
        return f"a whole number of at least {question.minimum}"
    return True


def run(machine: Machine, path: Path) -> int:
    """Ask, show and write; return the exit code.

    Raises: Abandoned when the user leaves, or there is no terminal to ask in.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Abandoned(
            "the wizard needs a terminal to ask in, and there is none; "
            "run `hasten config default`, or write the file by hand (docs/config.md)."
        )
    say = sys.stdout.write
    say(f"This machine: {machine.words}\n")
    before = resolve(file=read(path).entries).config if path.exists() else None
    say("Answers offered first are those of the file as it is.\n\n" if before else "\n")
    try:
        config = interview(machine, ask_in_terminal, before)
        say(f"\n{dump(config, masked=True)}\n")
        verb = "Replace" if path.exists() else "Write"
        if not questionary.confirm(f"{verb} {path}?", default=True).unsafe_ask():
            raise Abandoned(f"nothing was written; {path} is as it was.")
    except (KeyboardInterrupt, EOFError) as error:
        raise Abandoned(f"left; nothing was written to {path}.") from error
    write(config, path)
    say(f"Written to {path}\nTrain with: hasten launch train.py\n")
    return 0
