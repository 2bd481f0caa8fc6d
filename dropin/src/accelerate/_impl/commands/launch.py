"""`accelerate launch`: the established parser; hasten plans and starts the processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

from accelerate._impl.commands.launch_flags import ATTRIBUTES, FLAGS, SHORT, words_of
from accelerate._impl.commands.launch_variables import variables_for
from accelerate._impl.commands.starting import prepare_simple_launcher_cmd_env
from accelerate._impl.environment.parsers import CustomArgumentParser, main_of
from accelerate._impl.environment.variables import patch_environment
from accelerate._impl.settings.config_file import SageMakerConfig
from hasten.cli import launch_cmd
from hasten.errors import ConfigError, HastenError

# Any in this file: values of flags.
_ABOUT = (
    "Launch a python script in a distributed scenario. Arguments can be passed in with either hyphens or underscores."
)
_REFUSED = {
    "fp8_opt_level": "it belongs to MS-AMP, which is no longer maintained; use --fp8_backend ao or te",
    "aws_access_key_id": "hasten does not start SageMaker jobs; use SageMaker's own tools",
    "aws_secret_access_key": "hasten does not start SageMaker jobs; use SageMaker's own tools",
}


def _word(text: str) -> str:
    """The word of a yes-or-no flag that takes one; hasten reads it, so "False" means no."""
    return text


_ACTIONS = {"switch": "store_true", "off": "store_false", "append": "append"}
_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": _word, "str_to_bool": _word}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate launch`, alone or as a subcommand."""
    options: dict[str, Any] = {"description": _ABOUT, "add_help": True, "allow_abbrev": False}
    make = partial(CustomArgumentParser, "Accelerate launch command")
    parser = make(**options) if subparsers is None else subparsers.add_parser("launch", **options)
    for name, kind in ((name, kind) for kind, names in FLAGS.items() for name in names.split()):
        _add_flag(parser, name, kind)
    parser.add_argument("training_script", type=str, help="the script, module or program to start")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, kind: str) -> None:
    spelled = [f"--{name}", f"--{name.replace('_', '-')}"]
    names = dict.fromkeys([SHORT[name], *spelled] if name in SHORT else spelled)
    how: dict[str, Any] = {"action": _ACTIONS[kind]} if kind in _ACTIONS else {"type": _KINDS.get(kind, str)}
    parser.add_argument(*names, dest=ATTRIBUTES.get(name, name), default=None, **how)


def launch_command(args: argparse.Namespace) -> None:
    """Start what a parsed command line asks for; ends the process with the job's code when it fails."""
    code = run(words_of(args))
    if code:
        sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run `accelerate launch WORDS` and give the exit code."""
    flags = takewhile(lambda word: word.startswith("-"), words)
    refused = [(word, name) for word in flags if (name := _name_of(word)) in _REFUSED]
    if refused:
        sys.stderr.write(f"accelerate launch: flag {refused[0][0]}: {_REFUSED[refused[0][1]]}.\n")
        return 2
    try:
        variables = dict(variables_for(words))
    except HastenError:  # said by the launch itself, in its own way
        variables = {}
    with patch_environment(**variables):
        return _launch(words)


def _name_of(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0].replace("-", "_")


def _launch(words: Sequence[str]) -> int:
    try:
        return launch_cmd.main(words, program="accelerate")
    except HastenError as error:
        sys.stderr.write(f"accelerate launch: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


main = main_of(run)


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the script in one process; raises CalledProcessError, or exits with its code when `quiet`."""
    command, env = prepare_simple_launcher_cmd_env(args)
    done = subprocess.run(command, env=env, check=False)
    if done.returncode and not getattr(args, "quiet", False):
        raise subprocess.CalledProcessError(done.returncode, command)
    if done.returncode:
        sys.exit(done.returncode)


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run the script on several processes."""
    launch_command(args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run the script with DeepSpeed."""
    args.use_deepspeed = True
    launch_command(args)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Run the script on the chips of this TPU machine."""
    args.tpu = True
    launch_command(args)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Run the script on every machine of a TPU pod."""
    args.tpu = args.tpu_use_cluster = True
    launch_command(args)


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> NoReturn:
    """Refuse: a job there is started by Amazon's own package."""
    raise ImportError(
        f"job {sagemaker_config.base_job_name!r} on Amazon SageMaker is started by Amazon's SDK, not from here: give the "
        "estimator of its `sagemaker` package these settings (SageMakerConfig.to_dict()) and the script."
    )
