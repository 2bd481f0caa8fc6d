"""What commands share: parsers that take hyphens and underscores, and errors as one sentence."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from hasten.errors import HastenError

# Any in this file: argparse's own arguments and namespaces.
_TABLE: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
"""What each command is about, and its flags as argparse takes them."""


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group whose flags are accepted with hyphens as well."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self._option_string_actions.update(hyphenated(action))
        return action


_PLAIN = argparse.ArgumentParser()
_STORING = (
    type(_PLAIN.add_argument("--value")),
    type(_PLAIN.add_argument("--flag", action="store_const", const=True)),
)


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser whose flags are accepted with hyphens as well; its help shows one spelling."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self._option_string_actions.update(hyphenated(action))
        return action

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        defaults = {}
        for option in self._actions:
            if isinstance(option, _STORING):
                defaults[option.dest] = option.default
        parsed, unparsed_words = super().parse_known_args(
            args, argparse.Namespace(**dict.fromkeys(defaults, self))
        )
        values = vars(parsed)
        given_names = set()
        for flag_name in defaults:
            if values[flag_name] is not self and values[flag_name] is not None:
                given_names.add(flag_name)
        if namespace is not None:
            target_namespace = namespace
        else:
            target_namespace = argparse.Namespace()
        vars(target_namespace).update(
            {
                flag_name: defaults[flag_name] if flag_value is self else flag_value
                for flag_name, flag_value in values.items()
            }
        )
        target_namespace.nondefault = given_names
        return target_namespace, unparsed_words


def parser_of(
    name: str, command: Callable[[Any], object]
) -> Callable[..., argparse.ArgumentParser]:
    """Return the function that makes the parser of `accelerate NAME`, alone or as a subcommand; what it parses is for `command`."""
    description = _TABLE[name].get("about")

    def command_parser(
        subparsers: Any = None, parents: Sequence[Any] = ()
    ) -> argparse.ArgumentParser:
        if subparsers is not None:
            parser: argparse.ArgumentParser = subparsers.add_parser(
                name, description=description, help=description, parents=parents
            )
        else:
            parser = CustomArgumentParser(
                f"Accelerate {name} command", description=description
            )
        for flag, options in _TABLE[name]["flags"].items():
            parser.add_argument(flag, **options)
        if subparsers is not None:
            parser.set_defaults(func=command)
        return parser

    return command_parser


def runner(
    name: str, make_parser: Callable[..., argparse.ArgumentParser]
) -> tuple[Callable[[Sequence[str]], int], Callable[[], NoReturn]]:
    """`accelerate NAME` on words (its exit code, 2 after saying in one sentence what cannot be), and its entry point."""

    def run(words: Sequence[str]) -> int:
        commands = CustomArgumentParser("accelerate")
        make_parser(commands.add_subparsers())
        args = commands.parse_args([name, *words])
        try:
            code = args.func(args)
            return code if isinstance(code, int) else 0
        except (HastenError, ValueError, OSError) as error:
            sys.stderr.write(f"accelerate {name}: {error}\n")
            return 2
        except subprocess.CalledProcessError as error:
            return error.returncode

    return run, main_of(run)


def main_of(run: Callable[[Sequence[str]], int]) -> Callable[[], NoReturn]:

    def main() -> NoReturn:
        sys.exit(run(sys.argv[1:]))

    return main


def hyphenated(action: argparse.Action) -> dict[str, argparse.Action]:
    """Return the action by those spellings of its flags that have hyphens in the place of underscores."""
    hyphenated_options = {}
    for option_name in action.option_strings:
        if "_" in option_name:
            hyphenated_options[option_name.replace("_", "-")] = action
    return hyphenated_options
