"""The command `hasten`: imports only the given subcommand, runs it, and prints errors readably."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Final, NoReturn

from hasten.errors import ConfigError, ExtensionError, HastenError
from hasten.extension import offers
from hasten.version import __version__

COMMANDS: Final = MappingProxyType(
    {
        "launch": (
            "hasten.cli.launch_cmd:main",
            "start a script on all devices and machines",
        ),
        "completion": (
            "hasten.cli.completion_cmd:main",
            "print the completion of commands and flags for bash, zsh or fish",
        ),
    }
)
"""Subcommands of the core: the function `(argv) -> exit code` of each, as "module:function", and one line of help."""


def commands() -> dict[str, tuple[str, str]]:
    """Return the subcommands of the core and of extensions, as in `COMMANDS`.

    Raises: ExtensionError if two extensions, or an extension and the core, provide the same command.
    """
    places_and_help = dict(COMMANDS)
    for command_name, offer in offers("commands").items():
        if command_name in COMMANDS:
            raise ExtensionError(
                f"the extension {offer.extension!r} provides a command {command_name!r}, which hasten itself has. Rename or remove it."
            )
        places_and_help[command_name] = (offer.place, offer.help)
    return places_and_help


def usage_text() -> str:
    """Return the help of the `hasten` command."""
    rows = "\n".join(
        f"  {command_name:<17}{help_text}"
        for command_name, (_, help_text) in commands().items()
    )
    return (
        "usage: hasten [--help] [--version] <command> …\n\n"
        "Write a plain PyTorch loop once; run it anywhere, unchanged.\n\n"
        f"commands:\n{rows}\n\n"
        "Run `hasten <command> --help` for the options of a command.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 2 for an invalid command or setting, 1 for other errors."""
    command_words = list(sys.argv[1:] if argv is None else argv)
    if not command_words or command_words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage_text())
        return 0 if command_words else 2
    if command_words[0] in ("-V", "--version"):
        sys.stdout.write(f"hasten {__version__}\n")
        return 0
    try:
        code = run(command_words[0], command_words[1:])
        if argv is None and command_words[0] == "launch":
            exit_immediately(code)
        return code
    except HastenError as error:
        command_name = f"hasten {command_words[0]}"
        help_text = str(error)
        # usage errors include the name
        sys.stderr.write(
            f"{help_text}\n"
            if help_text.startswith(command_name)
            else f"{command_name}: {help_text}\n"
        )
        return 2 if isinstance(error, ConfigError) else 1
    # argparse: help was printed, or a wrong value of an option was named
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return int(bool(end.code))
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        sys.stderr.close()
        return 0


def exit_immediately(code: int) -> NoReturn:
    """Exit immediately: a launch has ended its processes, and unloading torch would take half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(command: str, argv: Sequence[str]) -> int:
    """Load a subcommand's module and run it.

    Raises: ConfigError for a command that does not exist, with the nearest one.
    """
    known_commands = commands()
    if command not in known_commands:
        similar_names = get_close_matches(
            command.lower(), known_commands, n=1, cutoff=0.5
        )
        if similar_names:
            hint = f"did you mean `hasten {similar_names[0]}`?"
        else:
            hint = f"the commands are {', '.join(known_commands)}."
        raise ConfigError(f"there is no command {command!r}; {hint}")
    return function_of(known_commands[command][0])(argv)


def function_of(entry_point: str) -> Callable[[Sequence[str]], int]:
    """Import the function of a subcommand from "module:function"; other subcommands are not imported."""
    module, _, function = entry_point.partition(":")
    # one of many
    main_function: Callable[[Sequence[str]], int] = getattr(
        import_module(module), function
    )
    return main_function


if __name__ == "__main__":  # python -m hasten.cli.main, where `hasten` is not on PATH
    sys.exit(main())
