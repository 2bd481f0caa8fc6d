"""`hasten completion`: a script that makes bash, zsh or fish complete the commands and flags of `hasten`."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Final

from hasten.cli.flags import CommandParser
from hasten.errors import ConfigError

_FLAG: Final = re.compile(r"^\s+(?:-\w(?: \S+)?, )?(--[\w-]+)", re.MULTILINE)
_INSTALLATION_HELP: Final = """to use it in every new shell:
  bash   hasten completion bash > ~/.local/share/bash-completion/completions/hasten
  zsh    hasten completion zsh >> ~/.zshrc
  fish   hasten completion fish > ~/.config/fish/completions/hasten.fish
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten completion …` and return 0."""
    parser = CommandParser(
        prog="hasten completion",
        description="Print a script that completes commands and flags of hasten in a shell.",
        epilog=_INSTALLATION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell: str = parser.parse_args(argv).shell
    # main.py imports the module of a command when it runs it
    from hasten.cli.main import commands

    known_commands = commands()
    flags = {}
    for name, (entry_point, _) in known_commands.items():
        if name != "completion":
            flags[name] = flags_of(entry_point)
    helps = {name: text for name, (_, text) in known_commands.items()}
    sys.stdout.write(
        _fish_script(flags, helps)
        if shell == "fish"
        else _bash_script(flags, helps, with_zsh=shell == "zsh")
    )
    return 0


def flags_of(entry_point: str) -> list[str]:
    """Return the flags in the longest help of a command."""
    from hasten.cli.main import function_of  # as above

    run_command = function_of(entry_point)
    for word in ("--help-all", "--help"):
        printed = io.StringIO()
        # A command without --help-all refuses it, on stderr.
        with (
            redirect_stdout(printed),
            redirect_stderr(io.StringIO()),
            suppress(SystemExit, ConfigError),
        ):
            run_command([word])
        if flags := list(dict.fromkeys(_FLAG.findall(printed.getvalue()))):
            return flags
    return []


def _bash_script(
    flags: Mapping[str, Sequence[str]], helps: Mapping[str, str], *, with_zsh: bool
) -> str:
    if with_zsh:
        lines = ["autoload -Uz compinit bashcompinit && compinit && bashcompinit"]
    else:
        lines = []
    lines += [
        "_hasten() {",
        '    local words="" word="${COMP_WORDS[COMP_CWORD]}"',
        '    case "${COMP_WORDS[1]}" in',
    ]
    for name, command_flags in flags.items():
        lines.append(f'        {name}) words="{" ".join(command_flags)}" ;;')
    lines += [
        "    esac",
        f'    [ "$COMP_CWORD" -gt 1 ] || words="{" ".join(helps)}"',
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _hasten hasten",
    ]
    return "\n".join(lines) + "\n"


def _fish_script(flags: Mapping[str, Sequence[str]], helps: Mapping[str, str]) -> str:
    lines = []
    for name, text in helps.items():
        lines.append(
            f"complete -c hasten -n __fish_use_subcommand -f -a {name} -d '{text}'"
        )
    for name, command_flags in flags.items():
        for flag in command_flags:
            lines.append(
                f"complete -c hasten -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}"
            )
    return "\n".join(lines) + "\n"
