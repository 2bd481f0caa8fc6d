"""`accelerate launch`: the established parser; hasten plans and starts the processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from itertools import takewhile
from typing import Any, NoReturn

from accelerate._impl.commands.launch_flags import (
    REFUSED,
    _validate_launch_command,
    add_flags,
    words_of,
)
from accelerate._impl.commands.launch_variables import (
    parse_sequence_options,
    set_by_dropin,
    settings_for,
    variables_for,
)
from accelerate._impl.commands.starting import prepare_simple_launcher_cmd_env
from accelerate._impl.environment.parsers import CustomArgumentParser, main_of
from accelerate._impl.environment.variables import environment, patch_environment
from accelerate._impl.settings.config_file import SageMakerConfig
from accelerate._impl.surface.messages import message
from hasten.cli import launch_cmd
from hasten.config.root import Config
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError, HastenError
from hasten.launch.base import describe_host

# Any in this file: values of flags.
_DEFAULT_PARALLELISM = (Config().strategy, Config().parallelism)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    options: dict[str, Any] = {
        "description": message("about_launch"),
        "add_help": True,
        "allow_abbrev": False,
    }
    make = partial(CustomArgumentParser, "Accelerate launch command")
    if subparsers is None:
        parser = make(**options)
    else:
        parser = subparsers.add_parser("launch", **options)
    add_flags(parser)
    parser.add_argument(
        "training_script", type=str, help="the script, module or program to start"
    )
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="its arguments"
    )
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start what a parsed command line asks for; raises CalledProcessError, or exits with 1 when `quiet`."""
    # without what is in the settings file, which hasten reads itself
    args.words = words_of(args)
    args, saved, _ = _validate_launch_command(args)
    _launcher_for(args, saved)(args)


def _launcher_for(
    args: argparse.Namespace, saved: Any
) -> Callable[[argparse.Namespace], None]:
    if args.use_deepspeed and not args.cpu:
        return deepspeed_launcher
    if (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        return multi_gpu_launcher
    if args.tpu and not args.cpu:
        if args.tpu_use_cluster:
            return tpu_pod_launcher
        return tpu_launcher
    if isinstance(saved, SageMakerConfig):
        return partial(sagemaker_launcher, saved)
    return simple_launcher


def _check_exit_code(code: int, command: list[str], args: argparse.Namespace) -> None:
    if code and not getattr(args, "quiet", False):
        raise subprocess.CalledProcessError(code, command)
    if code:
        sys.exit(1)


def run(words: Sequence[str]) -> int:
    for word in takewhile(lambda word: word.startswith("-"), words):
        flag_name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if flag_name in REFUSED:
            sys.stderr.write(f"accelerate launch: flag {word}: {REFUSED[flag_name]}.\n")
            return 2
    words = _without_zero_processes(words)
    if tuple(words[:1]) in (("-h",), ("--help",)):
        words = ["--help_all", *words[1:]]  # as complete as the original's
    try:
        variables = dict(variables_for(words))
        settings = [*parse_sequence_options(words), *_on_the_cpu(words)]
    except HastenError:  # said by the launch itself, in its own way
        variables = {}
        settings = []
    with patch_environment(**variables):
        return _launch_words(words, settings)


def _without_zero_processes(words: Sequence[str]) -> list[str]:
    """Return the command line without `--num_processes 0`, which stands for the default."""
    for word_index, word in enumerate(words):
        flag_name, _, flag_value = word.lstrip("-").replace("-", "_").partition("=")
        if flag_name == "num_processes" and word.startswith("--"):
            width = 1 if flag_value else 2
            zero = (
                flag_value or "".join(words[word_index + 1 : word_index + 2])
            ) == "0"
            if zero:
                return [*words[:word_index], *words[word_index + width :]]
            return list(words)
    return list(words)


def _on_the_cpu(words: Sequence[str]) -> list[SettingEntry]:
    """Apply the original's defaults without an accelerator: no choice of devices, one process if nothing asks for several."""
    job_config = settings_for(words)
    launch = job_config.launch
    num_processes = job_config.launch.num_processes or 1
    wants_several = (
        launch.multi_gpu
        or (job_config.strategy, job_config.parallelism) != _DEFAULT_PARALLELISM
    )
    elsewhere = launch.num_machines > 1 or launch.launcher not in ("auto", "single")
    if (job_config.cpu and launch.multi_gpu) or not (
        job_config.cpu or describe_host().device == "cpu"
    ):
        return []
    if launch.multi_gpu or launch.gpu_ids != "all":
        overrides = {"multi_gpu": False, "gpu_ids": "all"}
    else:
        overrides = {}
    if overrides:
        sys.stderr.write(message("no_accelerator"))
    if num_processes > 1 and not wants_several and not elsewhere:
        sys.stderr.write(message("one_process", num_processes))
        overrides["num_processes"] = 1
    return [
        set_by_dropin(("launch", setting_name), setting_value)
        for setting_name, setting_value in overrides.items()
    ]


def _launch_words(words: Sequence[str], settings: Sequence[SettingEntry]) -> int:
    is_verbose = environment().get("ACCELERATE_LOG_LEVEL", "").upper() in (
        "INFO",
        "DEBUG",
    )
    if is_verbose:
        quiet = []
    else:
        quiet = [set_by_dropin(("launch", "quiet"), True)]
    try:
        return launch_cmd.main(
            words, program="accelerate", settings=[*settings, *quiet]
        )
    except HastenError as error:
        refused = isinstance(error, ConfigError)
        sys.stderr.write(
            f"accelerate launch: {error}\n{_as_the_original_says(words) if refused else ''}"
        )
        return 2 if refused else 1


def _as_the_original_says(words: Sequence[str]) -> str:
    """Return the objections of the established parser and reader of settings files, to the letter."""
    try:
        with redirect_stderr(StringIO()), suppress(SystemExit):  # words of hasten's own
            _validate_launch_command(launch_command_parser().parse_known_args(words)[0])
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}\n"
    return ""


main = main_of(run)


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the script in one process; raises CalledProcessError, or exits with its code when `quiet`."""
    command, env = prepare_simple_launcher_cmd_env(args)
    process = subprocess.Popen(command, env=env)
    process.wait()
    _check_exit_code(process.returncode, command, args)


def _make_launcher(
    description: str, *switches: str
) -> Callable[[argparse.Namespace], None]:
    """Return the function that starts the script of a parsed command line with these switches on."""

    def launch(args: argparse.Namespace) -> None:
        for switch_name in switches:
            setattr(args, switch_name, True)
        command = [args.training_script, *args.training_script_args]
        _check_exit_code(
            run(getattr(args, "words", None) or words_of(args)), command, args
        )

    launch.__doc__ = description
    return launch


multi_gpu_launcher = _make_launcher("Run the script on several processes.")
deepspeed_launcher = _make_launcher("Run the script with DeepSpeed.", "use_deepspeed")
tpu_launcher = _make_launcher("Run the script on the chips of this TPU machine.", "tpu")
tpu_pod_launcher = _make_launcher(
    "Run the script on every machine of a TPU pod.", "tpu", "tpu_use_cluster"
)


def sagemaker_launcher(
    sagemaker_config: SageMakerConfig, args: argparse.Namespace
) -> NoReturn:
    """Refuse: a job there is started by Amazon's own package."""
    raise ImportError(message("sagemaker_elsewhere", sagemaker_config.base_job_name))
