"""The options of fp8 as variables."""

from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import setup_fp8_env


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
    flags = "--mixed_precision fp8 --fp8_backend te --fp8_format E4M3 --fp8_margin 3 --fp8_override_linear_precision true,false,true"
    plain = setup_fp8_env(
        parsed("--mixed_precision", "fp8", "--fp8_backend", "ao", "a.py"), {}
    )
    return [plain, setup_fp8_env(parsed(*flags.split(), "a.py"), {})]


PROCESSES = (1,)
