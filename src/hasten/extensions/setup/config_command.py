"""`hasten config`: the wizard, and the commands that write, show, check and find settings files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from hasten.cli.flags import SettingsParser
from hasten.config import files
from hasten.config.decode import encode
from hasten.config.files import default_path, effective_settings, write
from hasten.config.masking import masked_value
from hasten.config.resolve import Resolved, resolve
from hasten.config.root import Config
from hasten.config.schema import SETTABLE
from hasten.config.source import SettingEntry, shown
from hasten.errors import ConfigError
from hasten.extensions.setup.machine import (
    MachineFacts,
    examine_machine,
    recommended_precision,
)
from hasten.runtime import env as environment

log = logging.getLogger(__name__)


def basic_config(
    machine_facts: MachineFacts, mixed_precision: str | None = None
) -> Config:
    """Return suitable settings for a machine: all its devices, or its CPU, and its precision unless one is given."""
    code_settings: dict[str, Any] = {
        "mixed_precision": mixed_precision or recommended_precision(machine_facts)[0]
    }
    if machine_facts.device == "cpu":
        code_settings["cpu"] = True
    elif machine_facts.device == "tpu":
        code_settings |= {"launch.tpu": True, "strategy": "xla"}
    elif machine_facts.num_devices > 1:
        code_settings |= {"launch.multi_gpu": True, "strategy": "ddp"}
    return resolve(code=code_settings).config


def write_basic_config(
    mixed_precision: str = "no", save_location: str | PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write suitable settings for this machine and return the file; False if a file exists, which is not changed."""
    if save_location is not None:
        path = Path(save_location)
    else:
        path = default_path(environment.snapshot())
    if path.exists():
        log.warning(
            "%s exists and was not changed; write another with `hasten config`, or pass save_location",
            path,
        )
        return False
    return write(basic_config(examine_machine(), mixed_precision), path)


def explain_values(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each value that was set: name, value, source, and the values that it overrides."""
    for info in SETTABLE:
        setting_entry = resolved.entries.get(info.path)
        if setting_entry is None:
            continue
        overridden = ", ".join(
            f"{_masked_text(weaker_entry)} ({weaker_entry.source})"
            for weaker_entry in resolved.shadowed.get(info.path, ())
        )
        line = (
            f"{info.name:<36} {_masked_text(setting_entry):<16} {setting_entry.source}"
        )
        yield f"{line}, instead of {overridden}" if overridden else line


def _masked_text(setting_entry: SettingEntry) -> str:
    return shown(masked_value(setting_entry.path[-1], encode(setting_entry.value)))


USAGE: Final = """usage: hasten config [command] [options]

Without a command: ask questions about the machine and the training, and write a settings file.

commands:
  default    write a file suited to this machine, without questions
  show       print the settings in effect; --why adds the source of every value
  check      check a file and list all problems
  path       print the path of the settings file

Run `hasten config <command> --help` for the options of a command.
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten config …` and return its exit code."""
    command_words = list(argv)
    if command_words and command_words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if command_words and not command_words[0].startswith("-"):
        command_name = command_words.pop(0)
        if command_name not in COMMANDS:
            similar_names = get_close_matches(command_name, COMMANDS, n=1, cutoff=0.5)
            if similar_names:
                hint = f"did you mean `hasten config {similar_names[0]}`?"
            else:
                hint = f"the commands are {', '.join(COMMANDS)}."
            raise ConfigError(
                f"there is no command `hasten config {command_name}`; {hint}"
            )
        return COMMANDS[command_name](command_words)
    return run_wizard(command_words)


def run_wizard(argv: Sequence[str]) -> int:
    """Run the wizard."""
    parser = SettingsParser(
        prog="hasten config",
        description="Ask questions about the machine and the training, and write a settings file.",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="where to write (default: config path)",
    )
    arguments = parser.parse_args(argv)
    environment_variables = environment.snapshot()
    if arguments.config_file:
        path = Path(arguments.config_file)
    else:
        path = files.default_path(environment_variables)
    # the other commands do not need questionary
    from hasten.extensions.setup import wizard

    return wizard.run_wizard(examine_machine(), path)


def write_default(argv: Sequence[str]) -> int:
    """Write settings without questions."""
    parser = SettingsParser(
        prog="hasten config default",
        description="Write a settings file suited to this machine.",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="where to write (default: config path)",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite an existing file"
    )
    parser.add_settings()
    arguments = parser.parse_args(argv)
    if arguments.config_file:
        path = Path(arguments.config_file)
    else:
        path = files.default_path(environment.snapshot())
    if path.exists() and not arguments.force:
        raise ConfigError(
            f"{path} already exists; pass --force to overwrite it, or --config_file to write another file."
        )
    machine_facts = examine_machine()
    config = with_flags(basic_config(machine_facts), arguments.settings)
    files.write(config, path)
    sys.stdout.write(
        f"This machine: {machine_facts.words}\n\n{files.dump(config, masked=True)}\nWritten to {path}\n"
    )
    return 0


def with_flags(config: Config, flags: Sequence[SettingEntry]) -> Config:
    """Return the settings with flags applied on top."""
    return resolve(
        file=files.read_text(files.dump(config), Path("this machine")).entries,
        flags=flags,
    ).config


def show_settings(argv: Sequence[str]) -> int:
    """Print the effective settings."""
    parser = SettingsParser(
        prog="hasten config show",
        description="Print the settings in effect for `hasten launch` with the same flags.",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="a settings file of hasten or of Accelerate",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="print every value that was set with its source",
    )
    parser.add_settings()
    arguments = parser.parse_args(argv)
    environment_variables = environment.snapshot()
    resolved = effective_settings(
        environment_variables, arguments.config_file, arguments.settings
    )
    if arguments.why:
        sys.stdout.writelines(f"{line}\n" for line in explain_values(resolved))
    else:
        sys.stdout.write(files.dump(resolved.config, masked=True))
    for note in resolved.notes:
        sys.stderr.write(f"note: {note}\n")
    return 0


def check_file(argv: Sequence[str]) -> int:
    """Check a settings file; return exit code 0 or 2, with every problem listed."""
    parser = SettingsParser(
        prog="hasten config check", description="Check a settings file."
    )
    parser.add_argument("file", metavar="FILE")
    arguments = parser.parse_args(argv)
    settings_file = files.read(arguments.file)
    resolved = resolve(file=settings_file.entries, notes=settings_file.notes)
    kind = "ours" if settings_file.kind == "hasten" else "Hugging Face Accelerate's"
    sys.stdout.write(
        f"{settings_file.path}: valid ({kind}, {len(resolved.entries)} settings)\n"
    )
    for note in resolved.notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def print_path(argv: Sequence[str]) -> int:
    """Print the path of the settings file, and the file in effect."""
    parser = SettingsParser(
        prog="hasten config path", description="Print the path of the settings file."
    )
    parser.parse_args(argv)
    environment_variables = environment.snapshot()
    used_file = files.find(environment_variables)
    default_file = files.default_path(environment_variables)
    sys.stdout.write(f"{used_file or default_file}\n")
    if used_file is None:
        sys.stderr.write("note: there is no file yet; `hasten config` writes it\n")
    elif used_file != default_file:
        sys.stderr.write(
            f"note: this is Hugging Face Accelerate's file; hasten's would be {default_file}\n"
        )
    return 0


COMMANDS: Final = MappingProxyType[str, Callable[[Sequence[str]], int]](
    {
        "default": write_default,
        "show": show_settings,
        "check": check_file,
        "path": print_path,
    }
)
