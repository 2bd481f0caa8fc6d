"""The command `accelerate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from accelerate._impl.checkpoints import merge
from accelerate._impl.commands import answered, config, estimate, launch, to_fsdp2, tpu
from accelerate._impl.environment.parsers import CustomArgumentParser

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "config": config.run,
    "estimate-memory": estimate.run,
    "env": answered.run_env,
    "launch": launch.run,
    "merge-weights": merge.run,
    "tpu-config": tpu.run,
    "test": answered.run_test,
    "to-fsdp2": to_fsdp2.run,
}


def main() -> None:
    """Run `accelerate COMMAND …`; exits the process only with another code than 0."""
    words = sys.argv[1:]
    if (
        code := COMMANDS[words[0]](words[1:])
        if words and words[0] in COMMANDS
        else _explain_error(words)
    ):
        sys.exit(code)


def _explain_error(words: Sequence[str]) -> int:
    """Say which commands there are; the exit code."""
    parser = CustomArgumentParser(
        "Accelerate CLI tool", usage="accelerate <command> [<args>]", allow_abbrev=False
    )
    parser.add_subparsers(help="accelerate command helpers").choices.update(
        dict.fromkeys(COMMANDS, parser)
    )
    parser.parse_args(words)
    parser.print_help()
    return 1
