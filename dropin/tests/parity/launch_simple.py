"""The command that runs a script in one process."""

import sys

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_simple_launcher_cmd_env


def parsed(*words):
    args = launch_command_parser().parse_args(words)
    for name, value in (
        ("mixed_precision", "no"),
        ("num_machines", 1),
        ("num_processes", 1),
        ("dynamo_backend", "no"),
    ):
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.deepspeed_fields_from_accelerate_config = ""
    return args


def run() -> object:
    commands = []
    for words in (
        ["--cpu", "a.py", "--x", "1"],
        ["--cpu", "-m", "pkg.mod"],
        ["--cpu", "--no_python", "prog", "z"],
    ):
        command, _ = prepare_simple_launcher_cmd_env(parsed(*words))
        commands.append(
            ["python" if word == sys.executable else word for word in command]
        )
    return commands


PROCESSES = (1,)
