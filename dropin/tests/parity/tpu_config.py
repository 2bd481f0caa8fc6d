"""`accelerate tpu-config --debug` prints the command it would run."""

import io
from contextlib import redirect_stdout

from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser


def run() -> object:
    printed_commands = []
    for words in (
        ["--command", "echo 1", "--command", "echo 2", "--install_accelerate"],
        [
            "--command",
            "echo 1",
            "--use_alpha",
            "--install_accelerate",
            "--accelerate_version",
            "0.1.0",
        ],
        ["--command", "pwd"],
    ):
        out = io.StringIO()
        args = tpu_command_parser().parse_args(
            ["--tpu_name", "t", "--tpu_zone", "z", "--debug", *words]
        )
        with redirect_stdout(out):
            tpu_command_launcher(args)
        printed_commands.append(out.getvalue().strip())
    return printed_commands


PROCESSES = (1,)
