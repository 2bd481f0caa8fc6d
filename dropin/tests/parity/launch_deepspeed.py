"""DeepSpeed's own command over machines, torch's launcher on one."""

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_deepspeed_cmd_env


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
    machine_flags = "--use_deepspeed --num_machines 2 --machine_rank 0 --num_processes 4 --main_process_ip 10.0.0.1 --main_process_port 29501"
    commands = []
    for words in (
        ["--use_deepspeed", "--num_processes", "2", "--zero_stage", "2", "a.py"],
        [*machine_flags.split(), "--deepspeed_hostfile", "hosts", "a.py", "--x"],
        [
            *machine_flags.split(),
            "--deepspeed_multinode_launcher",
            "standard",
            "--gradient_clipping",
            "1.0",
            "a.py",
        ],
        [
            *machine_flags.split(),
            "--deepspeed_hostfile",
            "h",
            "--deepspeed_exclusion_filter",
            "b",
            "-m",
            "pkg",
            "--x",
        ],
    ):
        command, env = prepare_deepspeed_cmd_env(parsed(*words))
        names = (
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_GRADIENT_CLIPPING",
            "ACCELERATE_MIXED_PRECISION",
        )
        commands.append([command, {name: env[name] for name in names if name in env}])
    return commands


PROCESSES = (1,)
