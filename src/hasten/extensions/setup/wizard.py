"""Wizard of `hasten config`: asks questions in the terminal, shows the file, and writes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import questionary

from hasten.config.files import dump, read, write
from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extension import installed
from hasten.extensions.setup.machine import (
    MachineFacts,
    offers_fp8,
    recommended_precision,
)

Answers = Mapping[str, Any]
Kind = Literal["choice", "number", "yesno", "text"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `key` is a dotted setting, or starts with `?` if it only determines later questions."""

    key: str
    prompt: str
    kind: Kind
    default: Any
    choices: tuple[tuple[Any, str], ...] = ()
    minimum: int = 0
    check: Callable[[str], str] = field(default=lambda text: "")
    """For text: returns the problem with an answer, or an empty string."""


def questions(machine: MachineFacts, answers: Answers) -> Iterator[Question]:
    """Yield the questions in order; `answers` is read before each, so that it determines later questions."""
    yield from _place(machine)
    if answers["?place"] != "tpu":
        yield from _machines(machine, answers)
        yield from _processes(machine, answers)
    yield _precision(machine, answers)
    if answers["mixed_precision"] == "fp8":
        backends = (
            ("auto", "whichever is installed"),
            ("ao", "torchao"),
            ("te", "Transformer Engine"),
        )
        yield Question(
            "fp8.backend", "Which fp8 implementation?", "choice", "auto", backends
        )
    if answers["?place"] != "tpu" and num_processes(machine, answers) > 1:
        yield _strategy()
        if answers["strategy"] == "fsdp":
            yield from _fsdp(answers)
    compilers = (
        ("no", "no"),
        ("regional", "the repeated block (short compile time)"),
        ("whole", "the whole model"),
    )
    yield Question(
        "?compile", "Compile the model with torch.compile?", "choice", "no", compilers
    )
    accumulation = "Micro-steps accumulated per optimizer update?"
    yield Question(
        "gradient_accumulation.num_steps", accumulation, "number", 1, minimum=1
    )


def num_processes(machine: MachineFacts, answers: Answers) -> int:
    """Return the number of processes requested by the answers so far."""
    answer = answers.get("launch.num_processes")
    return (
        int(answer)
        if answer
        else devices(machine, answers) * int(answers.get("launch.num_machines", 1))
    )


def devices(machine: MachineFacts, answers: Answers) -> int:
    """Return the default number of processes on one machine."""
    return max(1, machine.num_devices) if answers.get("?place") == "accelerator" else 1


def _place(machine: MachineFacts) -> Iterator[Question]:
    choices: list[tuple[str, str]] = []
    if machine.device not in ("cpu", "tpu"):
        choices.append(
            (
                "accelerator",
                f"{machine.num_devices} x {machine.device_name or machine.device} (found)",
            )
        )
    if machine.device == "tpu":
        choices.append(("tpu", f"TPU, {machine.num_devices} cores (found)"))
    choices.append(
        (
            "cpu",
            f"CPU, {machine.cores} cores"
            + ("" if choices else " (nothing else was found)"),
        )
    )
    if machine.device == "cpu":
        choices.append(("accelerator", "GPUs or other accelerators of another machine"))
    if machine.device != "tpu":
        choices.append(("tpu", "TPU of another machine"))
    yield Question(
        "?place", "Where will training run?", "choice", choices[0][0], tuple(choices)
    )


def _machines(machine: MachineFacts, answers: Answers) -> Iterator[Question]:
    yield Question("launch.num_machines", "How many machines?", "number", 1, minimum=1)
    if answers["launch.num_machines"] > 1:
        scheduler = machine.cluster or "SLURM, MPI, LSF or Kubernetes"
        ways = (
            ("cluster", f"from {scheduler}"),
            ("by hand", "I start the command on each machine, with --machine_rank"),
        )
        default = "cluster" if machine.cluster else "by hand"
        yield Question(
            "?meeting",
            "How does each machine learn its number?",
            "choice",
            default,
            ways,
        )
        if answers["?meeting"] == "by hand":
            prompt = "Address of machine 0?"
            yield Question(
                "launch.main_process_ip",
                prompt,
                "text",
                "",
                check=lambda text: "" if text else "needed",
            )
            yield Question(
                "launch.main_process_port",
                "Free port on machine 0?",
                "number",
                29500,
                minimum=1,
            )


def _processes(machine: MachineFacts, answers: Answers) -> Iterator[Question]:
    default = devices(machine, answers) * answers["launch.num_machines"]
    prompt = (
        "How many processes, over all machines?"
        if answers["launch.num_machines"] > 1
        else "How many processes?"
    )
    yield Question(
        "launch.num_processes",
        prompt,
        "number",
        default,
        minimum=answers["launch.num_machines"],
    )


def _precision(machine: MachineFacts, answers: Answers) -> Question:
    elsewhere = answers["?place"] == "accelerator" and machine.device == "cpu"
    best, why = recommended_precision(
        machine if answers["?place"] != "cpu" else MachineFacts()
    )
    if elsewhere or answers["?place"] == "tpu":
        best, why = "bf16", "recommended for recent accelerators"
    words = {
        "no": "no (fp32)",
        "bf16": "bf16",
        "fp16": "fp16 (with loss scaling)",
        "fp8": "fp8 (linear layers)",
    }
    offered = [
        name for name in words if name != "fp8" or offers_fp8(machine) or elsewhere
    ]
    ordered = sorted(offered, key=lambda name: name != best)
    choices = tuple(
        (name, words[name] + (f" (recommended: {why})" if name == best else ""))
        for name in ordered
    )
    return Question("mixed_precision", "Mixed precision?", "choice", best, choices)


def _strategy() -> Question:
    choices = [
        ("ddp", "DDP: every process holds the whole model (recommended while it fits)"),
        ("fsdp", "FSDP2: parameters, gradients and optimizer state are sharded"),
    ]
    for extension in installed():
        # A strategy with a variable is selected by the kind of device.
        names = [
            name
            for name in extension.strategies
            if name not in extension.strategy_variables
        ]
        choices += [
            (name, f"{extension.summary}; edit its settings in the file")
            for name in names
        ]
    return Question(
        "strategy",
        "How is the model distributed over processes?",
        "choice",
        "ddp",
        tuple(choices),
    )


def _fsdp(answers: Answers) -> Iterator[Question]:
    reshard = (
        (True, "after forward too (least memory)"),
        (False, "after backward only (less traffic)"),
    )
    yield Question(
        "fsdp.reshard_after_forward",
        "When are gathered parameters freed?",
        "choice",
        True,
        reshard,
    )
    policies = (
        ("auto", "the repeated block, detected automatically (recommended)"),
        ("transformer_based_wrap", "blocks by class name"),
        ("size_based_wrap", "modules above a size"),
    )
    yield Question(
        "fsdp.auto_wrap_policy",
        "What is sharded as one unit?",
        "choice",
        "auto",
        policies,
    )
    if answers["fsdp.auto_wrap_policy"] == "transformer_based_wrap":
        prompt = "Class names of the blocks, separated by commas?"
        key = "fsdp.transformer_cls_names_to_wrap"
        yield Question(
            key,
            prompt,
            "text",
            "",
            check=lambda text: "" if text else "at least one is needed",
        )
    elif answers["fsdp.auto_wrap_policy"] == "size_based_wrap":
        yield Question(
            "fsdp.min_num_params",
            "Smallest unit, in parameters?",
            "number",
            100_000_000,
            minimum=1,
        )
    if answers["launch.num_machines"] > 1:
        prompt = "Shard inside each machine only, and replicate across machines (HSDP)?"
        yield Question("fsdp.hybrid_shard", prompt, "yesno", False)
    yield Question(
        "fsdp.cpu_offload",
        "Keep parameters in host memory between uses (slow, saves memory)?",
        "yesno",
        False,
    )
    prompt = "Recompute activations in backward (slower, saves memory)?"
    yield Question("fsdp.activation_checkpointing", prompt, "yesno", False)


def remembered(question: Question, previous_config: Config) -> Question:
    """Return the question with the previous setting as its default, if that is one of its answers."""
    value = _said_before(question.key, previous_config)
    if isinstance(value, tuple):
        value = ", ".join(value)
    if value is None or (
        question.choices and value not in [choice for choice, _ in question.choices]
    ):
        return question
    return replace(question, default=value)


def _said_before(key: str, previous_config: Config) -> Any:
    match key:
        case "?place":
            return (
                "tpu"
                if previous_config.launch.tpu
                else "cpu"
                if previous_config.cpu
                else "accelerator"
            )
        case "?meeting":
            return "by hand" if previous_config.launch.main_process_ip else "cluster"
        case "?compile":
            regional = (
                "regional"
                if previous_config.dynamo.use_regional_compilation
                else "whole"
            )
            return "no" if previous_config.dynamo.backend == "no" else regional
    value: Any = previous_config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def to_arguments(machine: MachineFacts, answers: Answers) -> dict[str, Any]:
    """Return the settings for the answers, as arguments of `resolve`."""
    arguments = {
        key: value for key, value in answers.items() if not key.startswith("?")
    }
    device_answer = answers.get("?place")
    default = devices(machine, answers) * int(answers.get("launch.num_machines", 1))
    has_accelerator = device_answer == "accelerator" and machine.device != "cpu"
    if has_accelerator and arguments.get("launch.num_processes") == default:
        # determined at launch, also on a machine with another number of devices
        del arguments["launch.num_processes"]
    if device_answer == "cpu":
        arguments["cpu"] = True
    elif device_answer == "tpu":
        arguments |= {"launch.tpu": True, "strategy": "xla"}
    elif num_processes(machine, answers) > 1:
        arguments["launch.multi_gpu"] = True
    if answers.get("?compile", "no") != "no":
        arguments["dynamo.backend"] = "inductor"
        arguments["dynamo.use_regional_compilation"] = answers["?compile"] == "regional"
    return arguments


Ask = Callable[[Question], Any]


class Abandoned(ConfigError):
    """Raised when the user leaves the wizard; nothing was written."""


def interview(
    machine: MachineFacts, ask: Ask, previous_config: Config | None = None
) -> Config:
    """Return the settings for the answers; `ask` asks one question, `before` provides the defaults.

    Raises: ConfigError when the answers contradict each other.
    """
    answers: dict[str, Any] = {}
    for question in questions(machine, answers):
        answers[question.key] = ask(
            remembered(question, previous_config) if previous_config else question
        )
    return resolve(code=to_arguments(machine, answers)).config


def ask_in_terminal(question: Question) -> Any:
    """Ask a question with questionary and return its answer in the setting's type.

    Raises: Abandoned on Ctrl-C.
    """
    match question.kind:
        case "choice":
            choices = [
                questionary.Choice(text, value=value)
                for value, text in question.choices
            ]
            default = next(
                choice for choice in choices if choice.value == question.default
            )
            prompt = questionary.select(
                question.prompt, choices, default=default, instruction="(arrow keys)"
            )
        case "yesno":
            prompt = questionary.confirm(question.prompt, default=question.default)
        case "number":
            prompt = questionary.text(
                question.prompt,
                default=str(question.default),
                validate=lambda text: _number_problem(question, text),
            )
        case "text":
            prompt = questionary.text(
                question.prompt,
                default=question.default,
                validate=lambda text: question.check(text.strip()) or True,
            )
    answer = prompt.unsafe_ask()
    if question.kind == "number":
        return int(answer)
    return answer.strip() if isinstance(answer, str) else answer


def _number_problem(question: Question, text: str) -> str | bool:
    if not text.strip().isdigit() or int(text) < question.minimum:
        return f"a whole number of at least {question.minimum}"
    return True


def run(machine: MachineFacts, path: Path) -> int:
    """Ask the questions, show the file and write it; return the exit code.

    Raises: Abandoned when the user leaves, or there is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Abandoned(
            "the wizard needs an interactive terminal; run `hasten config default`, or write the file by hand (docs/config.md)."
        )
    say = sys.stdout.write
    say(f"This machine: {machine.words}\n")
    previous_config = resolve(file=read(path).entries).config if path.exists() else None
    say(
        "The default answers are those of the existing file.\n\n"
        if previous_config
        else "\n"
    )
    try:
        config = interview(machine, ask_in_terminal, previous_config)
        say(f"\n{dump(config, masked=True)}\n")
        verb = "Replace" if path.exists() else "Write"
        if not questionary.confirm(f"{verb} {path}?", default=True).unsafe_ask():
            raise Abandoned(f"nothing was written; {path} is unchanged.")
    except (KeyboardInterrupt, EOFError) as error:
        raise Abandoned(f"cancelled; nothing was written to {path}.") from error
    write(config, path)
    say(f"Written to {path}\nTrain with: hasten launch train.py\n")
    return 0
