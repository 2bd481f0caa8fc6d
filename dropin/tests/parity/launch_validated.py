"""The parsed command line of `launch`: what was given, and what a settings file and defaults add to it."""

import os
import tempfile

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import _convert_nargs_to_dict

FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sync_module_states: false
mixed_precision: bf16
num_processes: 4
use_cpu: false
debug: true
"""
SHOWN = [
    "debug",
    "num_processes",
    "mixed_precision",
    "num_machines",
    "fsdp_sync_module_states",
    "fsdp_version",
    "use_fsdp",
    "use_cpu",
    "dynamo_mode",
    "deepspeed_config_file",
    "monitor_interval",
    "rdzv_backend",
    "num_cpu_threads_per_process",
    "dynamo_backend",
]


def attempt(function, *args):
    try:
        return function(*args)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def validated(words):
    args = launch_command_parser().parse_args(words)
    parsed_settings = [
        sorted(args.nondefault),
        {name: getattr(args, name) for name in SHOWN if hasattr(args, name)},
    ]
    validation = attempt(_validate_launch_command, args)
    return (
        validation
        if isinstance(validation, str)
        else [
            *parsed_settings,
            validation[2],
            {name: getattr(args, name) for name in SHOWN},
        ]
    )


def run() -> object:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "settings.yaml")
        with open(file, "w") as out:
            out.write(FILE)
        flags = [
            "--num-processes",
            "2",
            "--deepspeed_config_file",
            "accepted",
            "--config-file",
            file,
            "script.py",
        ]
        validations = [
            validated(flags),
            validated(
                ["--config_file", file, "--mixed_precision", "fp16", "script.py"]
            ),
        ]
    validations.append(validated(["--use_deepspeed", "--multi_gpu", "script.py"]))
    words = (
        ["--name", "bert", "--train", "False", "--epochs", "3", "--rate", "5e-5"],
        ["--name", "x", "--train"],
    )
    return [
        *validations,
        [attempt(_convert_nargs_to_dict, argument_words) for argument_words in words],
    ]


PROCESSES = (1,)
