"""Commands that hasten answers: `accelerate env`, `accelerate test` and `accelerate estimate-memory`."""

from __future__ import annotations

from typing import Any, Final

from accelerate import __version__
from accelerate._impl.environment.parsers import Flags, main_of, parser_of, runner
from hasten.cli.main import main as hasten

# Any in this file: argparse's namespaces.
_DTYPES: Final = ["float32", "float16", "int8", "int4"]
CONFIG_FILE: Final[Flags] = {"--config_file": {"default": None}}
_MODEL: Final[Flags] = {
    "model_name": {"help": "a name on the Hub, or a folder of weights"},
    "--library_name": {"choices": ["timm", "transformers"], "help": "taken from the model"},
    "--dtypes": {"nargs": "+", "default": _DTYPES, "choices": _DTYPES},
    "--trust_remote_code": {"action": "store_true"},
}


def chosen_file(args: Any) -> list[str]:
    """The flag that names the settings file, where one is given."""
    return ["--config_file", args.config_file] if args.config_file else []


def env_command(args: Any) -> int:
    """Run `accelerate env`."""
    print(f"- `Accelerate` version: {__version__}")  # noqa: T201  the report starts with what stands in
    return hasten(["env", *chosen_file(args)])


def test_command(args: Any) -> int:
    """Run `accelerate test`."""
    return hasten(["test", *chosen_file(args)])


def estimate_command(args: Any) -> int:
    """Print the memory a model needs."""
    words = ["estimate-memory", args.model_name, "--dtypes", *args.dtypes]
    return hasten([*words, "--trust_remote_code"] if args.trust_remote_code else words)


env_command_parser = parser_of("env", env_command, CONFIG_FILE)
test_command_parser = parser_of("test", test_command, CONFIG_FILE)
estimate_command_parser = parser_of("estimate-memory", estimate_command, _MODEL)
run_env, run_test = runner("env", env_command_parser), runner("test", test_command_parser)
run_estimate = runner("estimate-memory", estimate_command_parser)
main_env, main_test, main_estimate = main_of(run_env), main_of(run_test), main_of(run_estimate)
