"""What a launched process finds in its environment."""

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_simple_launcher_cmd_env


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
    environments = []
    for words in (
        ["--cpu", "a.py"],
        ["--cpu", "--mixed_precision", "bf16", "--debug", "a.py"],
        ["--cpu", "--dynamo_backend", "inductor", "a.py"],
    ):
        _, env = prepare_simple_launcher_cmd_env(parsed(*words))
        variables = {
            name: value.lower()
            for name, value in env.items()
            if name.startswith("ACCELERATE_")
        }
        environments.append(
            {
                **variables,
                "ACCELERATE_USE_CPU": variables["ACCELERATE_USE_CPU"] in ("1", "true"),
            }
        )
    return environments


PROCESSES = (1,)
