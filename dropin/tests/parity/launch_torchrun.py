"""What a launch over several machines tells torch's launcher."""

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_multi_gpu_env


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
    machine_flags = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29501 --num_processes 4 a.py"
    args = parsed("--multi_gpu", *machine_flags.split())
    prepare_multi_gpu_env(args)
    return [
        getattr(args, name, None)
        for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint")
    ]


PROCESSES = (1,)
