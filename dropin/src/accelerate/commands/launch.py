"""`accelerate launch`: the established parser; hasten plans and starts the processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate import notyet
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch_flags import FLAGS
from accelerate.commands.launch_variables import variables_for
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils.environment import patch_environment
from hasten.cli import launch_cmd
from hasten.errors import ConfigError, HastenError

__all__ = ["launch_command", "launch_command_parser", "load_config_from_file", "main"]
# Any in this file: values of flags.
_REFUSED = {
    "fp8_opt_level": "it belongs to MS-AMP, which is no longer maintained; use --fp8_backend ao or te",
    "aws_access_key_id": "hasten does not start SageMaker jobs; use SageMaker's own tools",
    "aws_secret_access_key": "hasten does not start SageMaker jobs; use SageMaker's own tools",
}


def _word(text: str) -> str:
    """The word of a yes-or-no flag that takes one; hasten reads it, so "False" means no."""
    return text


_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": _word, "str_to_bool": _word}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate launch`, alone or as a subcommand."""
    description = "Launch a python script in a distributed scenario. Arguments can be passed in with either hyphens or underscores."
    options: dict[str, Any] = {"description": description, "add_help": True, "allow_abbrev": False}
    parser: argparse.ArgumentParser = (
        subparsers.add_parser("launch", **options)
        if subparsers is not None
        else CustomArgumentParser("Accelerate launch command", **options)
    )
    for row in FLAGS.split("\n"):
        if not row.strip():
            continue
        name, dest, kind, short = row.split()
        names = [
            *([short] if short != "-" else []),
            f"--{name}",
            *([f"--{name.replace('_', '-')}"] if "_" in name else []),
        ]
        names = list(dict.fromkeys(names))
        where = name.replace("-", "_") if dest == "-" else dest
        if kind == "switch":
            parser.add_argument(*names, dest=where, action="store_true", default=None)
        elif kind == "off":
            parser.add_argument(*names, dest=where, action="store_false", default=None)
        elif kind == "append":
            parser.add_argument(*names, dest=where, action="append")
        else:
            parser.add_argument(*names, dest=where, type=_KINDS.get(kind, str), default=None)
    parser.add_argument("training_script", type=str, help="the script, module or program to start")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def words_of(args: argparse.Namespace) -> list[str]:
    """The command line for hasten that a parsed namespace stands for."""
    words: list[str] = []
    for row in FLAGS.split("\n"):
        if not row.strip():
            continue
        name, dest, kind, _ = row.split()
        value = getattr(args, name.replace("-", "_") if dest == "-" else dest, None)
        if value is None or value is False or kind == "off":
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"--{name}=true" if kind == "switch" else f"--{name}={one}")
    return [*words, args.training_script, *args.training_script_args]


def launch_command(args: argparse.Namespace) -> None:
    """Start what a parsed command line asks for; ends the process with the job's code when it fails."""
    code = run(words_of(args))
    if code:
        sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run `accelerate launch WORDS` and give the exit code."""
    for word in words:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("-"):
            break
        if name in _REFUSED:
            sys.stderr.write(f"accelerate launch: flag {word}: {_REFUSED[name]}.\n")
            return 2
    try:
        variables = dict(variables_for(words))
    except HastenError:  # said by the launch itself, in its own way
        variables = {}
    with patch_environment(**variables):
        return _launch(words)


def _launch(words: Sequence[str]) -> int:
    try:
        return launch_cmd.main(words, program="accelerate")
    except HastenError as error:
        sys.stderr.write(f"accelerate launch: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


def main() -> NoReturn:
    """Run `accelerate-launch`."""
    sys.exit(run(sys.argv[1:]))


_PLAN = "the launcher's inner steps (`accelerate launch --dry_run` shows the plan that hasten makes instead)"
simple_launcher = notyet.function("commands.launch.simple_launcher", _PLAN)
multi_gpu_launcher = notyet.function("commands.launch.multi_gpu_launcher", _PLAN)
deepspeed_launcher = notyet.function("commands.launch.deepspeed_launcher", notyet.DEEPSPEED)
tpu_launcher = notyet.function("commands.launch.tpu_launcher", notyet.XLA)
tpu_pod_launcher = notyet.function("commands.launch.tpu_pod_launcher", notyet.XLA)
sagemaker_launcher = notyet.function("commands.launch.sagemaker_launcher", notyet.SAGEMAKER)

if __name__ == "__main__":
    main()
