"""The sizes of a mesh as variables."""

from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_extend_env_parallelism_config


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
    sizes = "--use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4 a.py"
    return prepare_extend_env_parallelism_config(parsed(*sizes.split()), {})


PROCESSES = (1,)
