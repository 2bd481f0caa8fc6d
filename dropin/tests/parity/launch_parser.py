"""Flags of `accelerate launch` and the attributes they set."""

from accelerate.commands.launch import launch_command_parser


def run() -> object:
    words = "--multi_gpu --num-processes 2 --mixed_precision fp16 --use_fsdp --fsdp_offload_params true --main_process_port 1 a.py --num_processes 7"
    args = launch_command_parser().parse_args(words.split())
    names = "multi_gpu num_processes mixed_precision use_fsdp fsdp_offload_params main_process_port training_script training_script_args"
    return [getattr(args, name) for name in names.split()]


PROCESSES = (1,)
