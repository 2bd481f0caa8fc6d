"""Questions of `hasten config`, asked in a terminal, and the settings for their answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import questionary

from hasten.config.files import dump, write
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extension import installed
from hasten.extensions.setup.machine import (
    MachineFacts,
    offers_fp8,
    recommended_precision,
)

_PRECISION_TITLES = (
    ("no", "no (fp32)"),
    ("bf16", "bf16"),
    ("fp16", "fp16 (with loss scaling)"),
    ("fp8", "fp8 (linear layers)"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with choices, the recommended one first, or with a typed answer."""

    prompt: str
    choices: tuple[tuple[str, str], ...] = ()
    """Values with their titles."""
    default: str = ""
    minimum: int | None = None
    """The lowest number; None for text."""


# Any: a number for questions with a minimum, else a text
Ask = Callable[[Question], Any]


class Abandoned(ConfigError):
    """Raised when the user leaves the wizard; nothing was written."""


def interview_user(machine_facts: MachineFacts, ask: Ask) -> Config:
    """Return the settings for the answers; `ask` asks one question.

    Raises: ConfigError when the answers contradict each other.
    """
    device = ask(_device_question(machine_facts))
    settings: dict[str, Any] = {}
    if device == "tpu":
        settings |= {"launch.tpu": True, "strategy": "xla"}
    else:
        settings |= _ask_for_processes(machine_facts, device, ask)
    settings["mixed_precision"] = ask(_precision_question(machine_facts, device))
    return resolve(code=settings).config


def _device_question(machine_facts: MachineFacts) -> Question:
    titles = {
        "cpu": f"CPU, {machine_facts.cores} cores",
        "accelerator": "GPUs or other accelerators of another machine",
        "tpu": "TPU of another machine",
    }
    detected_device: str = machine_facts.device
    if detected_device not in ("cpu", "tpu"):
        detected_device = "accelerator"
    if detected_device != "cpu":
        precision_name = machine_facts.device_name or machine_facts.device
        titles[detected_device] = (
            f"{machine_facts.num_devices} x {precision_name} (found)"
        )
    choices = sorted(titles.items(), key=lambda choice: choice[0] != detected_device)
    return Question("Where will training run?", tuple(choices))


def _ask_for_processes(
    machine_facts: MachineFacts, device: str, ask: Ask
) -> dict[str, Any]:
    """Return the settings of machines, processes and strategy."""
    settings: dict[str, Any] = {"cpu": True} if device == "cpu" else {}
    num_machines = ask(Question("How many machines?", default="1", minimum=1))
    settings["launch.num_machines"] = num_machines
    if num_machines > 1 and not machine_facts.cluster:
        settings["launch.main_process_ip"] = ask(Question("Address of machine 0?"))
        settings["launch.main_process_port"] = ask(
            Question("Free port on machine 0?", default="29500", minimum=1)
        )
    has_devices = device == "accelerator" and machine_facts.device != "cpu"
    num_devices = num_machines * (machine_facts.num_devices if has_devices else 1)
    num_processes = ask(
        Question(
            "How many processes, over all machines?",
            default=str(num_devices),
            minimum=num_machines,
        )
    )
    # devices are counted at launch, also on a machine with another number of them
    if not has_devices or num_processes != num_devices:
        settings["launch.num_processes"] = num_processes
    if num_processes > 1:
        settings["launch.multi_gpu"] = device != "cpu"
        settings["strategy"] = ask(_strategy_question())
    return settings


def _strategy_question() -> Question:
    choices = [
        ("ddp", "DDP: every process holds the whole model (recommended while it fits)"),
        ("fsdp", "FSDP2: parameters, gradients and optimizer state are sharded"),
    ]
    for extension in installed():
        for precision_name in extension.strategies:
            # A strategy with a variable is selected by the kind of device.
            if precision_name not in extension.strategy_variables:
                choices.append(
                    (
                        precision_name,
                        f"{extension.summary}; edit its settings in the file",
                    )
                )
    return Question("How is the model distributed over processes?", tuple(choices))


def _precision_question(machine_facts: MachineFacts, device: str) -> Question:
    is_for_other_machine = device == "accelerator" and machine_facts.device == "cpu"
    if is_for_other_machine or device == "tpu":
        best_precision = "bf16"
        reason = "recommended for recent accelerators"
    else:
        if device == "cpu":
            described_machine = MachineFacts()
        else:
            described_machine = machine_facts
        best_precision, reason = recommended_precision(described_machine)
    choices = []
    for precision_name, title in _PRECISION_TITLES:
        if precision_name == best_precision:
            title = f"{title} (recommended: {reason})"
        if precision_name != "fp8" or offers_fp8(machine_facts) or is_for_other_machine:
            choices.append((precision_name, title))
    choices.sort(key=lambda choice: choice[0] != best_precision)
    return Question("Mixed precision?", tuple(choices))


# Any: as `Ask`
def ask_in_terminal(question: Question) -> Any:
    """Ask a question with questionary and return its answer.

    Raises: KeyboardInterrupt on Ctrl-C.
    """
    if question.choices:
        choices = [
            questionary.Choice(title, value=value) for value, title in question.choices
        ]
        return questionary.select(
            question.prompt, choices, instruction="(arrow keys)"
        ).unsafe_ask()
    answer: str = questionary.text(
        question.prompt,
        default=question.default,
        validate=lambda text: _problem_of(question, text.strip()) or True,
    ).unsafe_ask()
    return answer.strip() if question.minimum is None else int(answer)


def _problem_of(question: Question, text: str) -> str:
    """Return the problem with a typed answer; empty if there is none."""
    if question.minimum is None:
        return "" if text else "needed"
    if text.isdigit() and int(text) >= question.minimum:
        return ""
    return f"a whole number of at least {question.minimum}"


def run_wizard(machine_facts: MachineFacts, path: Path) -> int:
    """Ask the questions, show the file and write it; return the exit code.

    Raises: Abandoned when the user leaves, or there is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Abandoned(
            "the wizard needs an interactive terminal; run `hasten config default`, or write the file by hand (docs/config.md)."
        )
    sys.stdout.write(f"This machine: {machine_facts.words}\n\n")
    try:
        config = interview_user(machine_facts, ask_in_terminal)
        sys.stdout.write(f"\n{dump(config, masked=True)}\n")
        verb = "Replace" if path.exists() else "Write"
        if not questionary.confirm(f"{verb} {path}?", default=True).unsafe_ask():
            raise Abandoned(f"nothing was written; {path} is unchanged.")
    except (KeyboardInterrupt, EOFError) as error:
        raise Abandoned(f"cancelled; nothing was written to {path}.") from error
    write(config, path)
    sys.stdout.write(f"Written to {path}\nTrain with: hasten launch train.py\n")
    return 0
