"""Flags generated from the settings: one per field, in groups, in both spellings; the parser suggests near names."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin

from hasten.config.checks import nearest_name
from hasten.config.established import SWITCHES
from hasten.config.legacy import OLD_NAMES
from hasten.config.schema import SETTABLE, FieldInfo
from hasten.config.source import Path, SettingEntry, SettingSource
from hasten.errors import ConfigError, UnknownSettingError

_LONG_PREFIX: Final = "parallelism_config_"
"""Prefix of the mesh options in Accelerate's longer spelling, which is accepted too."""
_BOOLEAN_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})


_FLAGS_OF_OTHER_LAUNCHERS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("nproc", "np", "n", "num_procs", "num_gpus", "gpus"), "num_processes"
        ),
        **dict.fromkeys(
            ("nproc_per_node", "gpus_per_node", "num_gpus_per_node"),
            "processes_per_machine",
        ),
        **dict.fromkeys(("nodes", "num_nodes"), "num_machines"),
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
    }
)
"""Names of the same settings in other launchers."""


class UsageError(ConfigError):
    """The command line cannot be parsed."""


class SettingAction(argparse.Action):
    """Action that stores one setting as an entry with the flag as typed."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        setting_path: Path,
        takes_word: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.path = setting_path
        self.takes_word = takes_word

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Append the entry to `namespace.settings`."""
        flag = option_string or ""
        flag_value = "false" if self.negated_by(flag) else values
        settings = getattr(namespace, "settings", None) or []
        namespace.settings = [*settings, *_flag_entries(self.path, flag_value, flag)]

    def negated_by(self, flag: str) -> bool:
        """Return whether the flag as typed negates the setting."""
        return (
            self.takes_word
            and flag.startswith(("--no-", "--no_"))
            and not _names_itself_no(self.path)
        )


def _names_itself_no(setting_path: Path) -> bool:
    return setting_path[-1].startswith("no_")


def _flag_entries(setting_path: Path, flag_value: Any, flag: str) -> list[SettingEntry]:
    if setting_path[0] == "use_parallelism_config":
        return []  # determined by the sizes
    if setting_path[0] in SWITCHES:
        is_chosen = str(flag_value).lower() in ("true", "yes", "on", "1")
        if is_chosen:
            return [
                SettingEntry(
                    ("strategy",),
                    SWITCHES[setting_path[0]],
                    SettingSource("flag", flag),
                    text=True,
                )
            ]
        return []
    return [
        SettingEntry(setting_path, flag_value, SettingSource("flag", flag), text=True)
    ]


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--` and the words after it, which belong to the script."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


class Formatter(argparse.HelpFormatter):
    """Help formatter that shows one spelling of each flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=46, width=118)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        short_name = []
        for flag_name in action.option_strings:
            if not flag_name.startswith("--"):
                short_name.append(flag_name)
        long = [
            flag_name
            for flag_name in action.option_strings
            if flag_name.startswith("--")
        ][:1]
        takes_value = action.nargs != 0 and not getattr(action, "takes_word", False)
        if takes_value:
            flag_value = f" {self._format_args(action, action.dest.upper())}"
        else:
            flag_value = ""
        return ", ".join([*short_name, *long]) + flag_value


class HelpAction(argparse.Action):
    """Action that prints the short help, or with `--help-all` the full help, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs=0,
            default=argparse.SUPPRESS,
            help=kwargs["help"],
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the help on stdout."""
        assert isinstance(parser, SettingsParser), "only such a parser has a short help"
        is_full_help = (option_string or "").startswith(
            "--help"
        ) and option_string != "--help"
        sys.stdout.write(
            parser.format_help() if is_full_help else parser.format_short_help()
        )
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Parser of a subcommand whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage and exiting."""
        raise UsageError(f"{message}; see `{self.prog} --help`.")


class SettingsParser(CommandParser):
    """Argument parser that accepts every setting, in both spellings, and suggests the nearest flag."""

    def __init__(
        self,
        *args: Any,
        essential: Collection[str] = (),
        flags_anywhere: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("formatter_class", Formatter)
        kwargs.setdefault("allow_abbrev", False)
        kwargs["add_help"] = not essential
        super().__init__(*args, **kwargs)
        self.flags_anywhere = flags_anywhere
        """Whether flags may follow positional arguments; True for commands without a script that has flags itself."""
        self.essential = frozenset(essential)
        """The flags that `--help` shows if there is a `--help-all` for the others; if empty, all."""
        if essential:
            self.add_argument(
                "-h",
                "--help",
                action=HelpAction,
                help="show the most used options and exit",
            )
            self.add_argument(
                "--help_all",
                "--help-all",
                action=HelpAction,
                help="show every option and exit",
            )

    def add_settings(self, fields: Iterable[FieldInfo] = SETTABLE) -> None:
        """Add one flag per setting, grouped by section, and the switches of Accelerate."""
        self.usage = self.usage or f"{self.prog} [settings]"
        groups: dict[str, Any] = {}
        for field_info in fields:
            if field_info.group not in groups:
                groups[field_info.group] = self.add_argument_group(field_info.group)
            _add_field(groups[field_info.group], field_info)
        established = self.add_argument_group("established names")
        for flag_name in (*SWITCHES, "use_parallelism_config"):
            if flag_name in SWITCHES:
                help_text = f"the same as --strategy {SWITCHES[flag_name]}"
            else:
                help_text = "not needed: determined by the sizes"
            _add_action(
                established, (flag_name,), (flag_name,), help_text, is_bool=True
            )
        for flag_name in OLD_NAMES:
            if flag_name.startswith("fsdp_"):
                flag = flag_name
            else:
                flag = f"fsdp_{flag_name}"
            if f"--{flag}" not in self._option_string_actions:
                help_text = "FSDP1's option, translated to FSDP2"
                _add_action(
                    established, (flag,), ("fsdp", flag_name), help_text, is_bool=False
                )

    def format_short_help(self) -> str:
        """Return the help with only the essential options."""
        hidden = {}
        for action in self._option_string_actions.values():
            if not self._is_essential(action):
                hidden[id(action)] = action
        help_texts = {key: action.help for key, action in hidden.items()}
        for action in hidden.values():
            action.help = argparse.SUPPRESS
        try:
            text = self.format_help()
        finally:
            for key, action in hidden.items():
                action.help = help_texts[key]
        return f"{text}\n{len(hidden)} more options: `{self.prog} --help-all`.\n"

    def _is_essential(self, action: argparse.Action) -> bool:
        flag_names = set()
        for flag_name in action.option_strings:
            flag_names.add(flag_name.lstrip("-").replace("-", "_"))
        return not isinstance(action, SettingAction) or bool(
            flag_names & self.essential
        )

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse after making every boolean flag explicit, so that it never consumes the script's name."""
        space = namespace or argparse.Namespace()
        if not hasattr(space, "settings"):
            space.settings = []
        return super().parse_known_args(self.explicit_flags(list(args or ())), space)

    def explicit_flags(self, argv: list[str]) -> list[str]:
        """Return arguments with `--flag` spelled `--flag=true` and `--flag false` spelled `--flag=false`.

        Everything from the first word that is neither a flag nor a flag's value is unchanged, as it belongs to the script, unless flags may
        appear anywhere.
        Raises: UnknownSettingError for a flag that does not exist, with the nearest one.
        """
        explicit_words: list[str] = []
        remaining_words = list(argv)
        while remaining_words:
            if not remaining_words[0].startswith("-") or remaining_words[0] in (
                "-",
                "--",
            ):
                if not self.flags_anywhere:
                    break
                explicit_words.append(remaining_words.pop(0))
                continue
            flag_word = remaining_words.pop(0)
            flag_name, has_value, _ = flag_word.partition("=")
            action = self._option_string_actions.get(flag_name)
            if action is None:
                self._refuse_flag(flag_name)
            elif not isinstance(action, SettingAction) or not action.takes_word:
                explicit_words.append(flag_word)
                if not has_value and action.nargs != 0:
                    explicit_words += (
                        [remaining_words.pop(0)] if remaining_words else []
                    )
            elif has_value:
                explicit_words.append(flag_word)
            elif (
                remaining_words
                and remaining_words[0].lower() in _BOOLEAN_WORDS
                and not action.negated_by(flag_name)
            ):
                explicit_words.append(f"{flag_name}={remaining_words.pop(0)}")
            else:
                explicit_words.append(f"{flag_name}=true")
        return [*explicit_words, *remaining_words]

    @property
    def _whole_help(self) -> str:
        return "--help-all" if self.essential else "--help"

    def _refuse_flag(self, flag_name: str) -> NoReturn:
        dashed = "-" in flag_name.lstrip("-")
        options_by_name = {}
        for option in self._option_string_actions:
            if option.startswith("--") and ("-" in option.lstrip("-")) <= dashed:
                options_by_name[option.replace("-", "_").lstrip("_")] = option
        flag_word = flag_name.replace("-", "_").lstrip("_")
        similar_name = _FLAGS_OF_OTHER_LAUNCHERS.get(flag_word, "")
        if similar_name in options_by_name:
            similar_name = similar_name
        else:
            similar_name = nearest_name(flag_word, options_by_name)
        if similar_name:
            hint = f"did you mean {options_by_name[similar_name]}?"
        else:
            hint = f"see `{self.prog} {self._whole_help}` for the supported flags."
        raise UnknownSettingError(
            f"flag {flag_name}: unknown, so it would have no effect; {hint}"
        )


def _add_field(group: Any, field_info: FieldInfo) -> None:
    if field_info.default in (None, (), {}, False):
        default = ""
    else:
        default = f" (default: {_plain_text(field_info.default)})"
    help_text = (field_info.meta.help + default).replace("%", "%%")
    if field_info.meta.lines:
        flag_value = "TEXT"
    else:
        flag_value = value_placeholder(field_info.type)
    _add_action(
        group,
        flag_spellings(field_info),
        field_info.path,
        help_text,
        field_info.is_bool,
        flag_value,
        field_info.meta.short,
    )


def flag_spellings(field_info: FieldInfo) -> tuple[str, ...]:
    """Return every name of a setting's flag; the first one is shown in the help."""
    short_name = field_info.flag.removeprefix(_LONG_PREFIX)
    return tuple(dict.fromkeys((short_name, *field_info.flags)))


def _add_action(
    group: Any,
    flags: Sequence[str],
    setting_path: Path,
    help_text: str,
    is_bool: bool,
    flag_value: str = "VALUE",
    short_name: str = "",
) -> None:
    spellings = []
    for flag in flags:
        spellings += [f"--{flag}", f"--{flag.replace('_', '-')}"]
    flag_names = list(dict.fromkeys(spellings))
    if short_name:
        flag_names.append(f"-{short_name}")
    if is_bool and not _names_itself_no(setting_path):
        for flag in flags:
            for dash, flag_name in (("_", flag), ("-", flag.replace("_", "-"))):
                flag_names.append(f"--no{dash}{flag_name}")
    group.add_argument(
        *flag_names,
        action=SettingAction,
        dest="settings",
        default=argparse.SUPPRESS,
        setting_path=setting_path,
        takes_word=is_bool,
        nargs="?" if is_bool else None,
        metavar=flag_value,
        help=help_text,
    )


_LONGEST_CHOICES: Final = 44


def value_placeholder(tp: Any) -> str:
    """Return the placeholder of a flag's value."""
    origin = get_origin(tp)
    if origin is Literal:
        choices = list(map(str, get_args(tp)))
        if len(choices) == 1:
            return choices[0]
        listed = "{" + ",".join(choices) + "}"
        return listed if len(listed) <= _LONGEST_CHOICES else "NAME"
    if origin is tuple:
        return "A,B,…"
    if origin in (Union, UnionType):
        return "|".join(
            dict.fromkeys(
                value_placeholder(member)
                for member in get_args(tp)
                if member is not NoneType
            )
        )
    return {int: "N", float: "X", str: "TEXT", timedelta: "TIME"}.get(
        tp, "VALUE" if origin is None else "KEY=VALUE,…"
    )


def _plain_text(flag_value: Any) -> str:
    if isinstance(flag_value, bool):
        return str(flag_value).lower()
    if isinstance(flag_value, tuple):
        return ",".join(map(_plain_text, flag_value))
    return str(flag_value)


def run_module(
    words: Sequence[str],
    command: str,
    arguments: argparse.Namespace,
    typed: Sequence[str],
) -> int:
    """Run a module with its arguments under the command line's settings, or print its plan; return the exit code."""
    as_module = SettingEntry(
        ("launch", "module"), "true", SettingSource("flag", command), text=True
    )
    from hasten.launch.job import prepare  # so that --help is fast

    job = prepare(
        words,
        settings=[*arguments.settings, as_module],
        config_file=arguments.config_file,
        typed=typed,
    )
    if arguments.dry_run:
        sys.stdout.write(job.plan.render_text() + "\n")
        return 0
    return job.run()


_LARGEST_NUMBER: Final = 10**12


def whole_number(
    lowest: int = 0, highest: int = _LARGEST_NUMBER
) -> Callable[[str], int]:
    """Return an argparse type for a whole number from `least` to `most`."""

    def read_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an integer from {lowest} to {highest}"
            )
        return number

    return read_number


def positive_seconds(text: str) -> float:
    """Return a positive number of seconds. Raises: ArgumentTypeError for other text."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


# Any: the user's function
def find_named(target: str, instead: str) -> Callable[..., Any]:
    """Return the function or class that `module:function` names; `instead` describes the alternative in errors.

    Raises: ConfigError when there is no such module or function.
    """
    module_name, _, flag_name = target.partition(":")
    if str(pathlib.Path.cwd()) not in sys.path:
        sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        module = import_module(module_name)  # the module that the user named
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(
            f"{target}: there is no module {module_name!r}; {instead}."
        ) from error
    function: Callable[..., Any] | None = getattr(module, flag_name, None)
    if not callable(function):
        known_names = ", ".join(
            sorted(
                key
                for key, flag_value in vars(module).items()
                if callable(flag_value) and not key.startswith("_")
            )
        )
        raise ConfigError(
            f"{target}: {module_name} has no function {flag_name!r}; it has {known_names or 'none'}."
        )
    return function
