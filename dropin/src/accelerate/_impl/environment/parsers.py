"""What commands share: parsers that take hyphens and underscores, and errors as one sentence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from accelerate._impl.surface.homes import settle
from hasten.errors import HastenError


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group whose flags have both spellings."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:  # Any: argparse's own
        return super().add_argument(*both_spellings(args), **kwargs)


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser whose flags have both spellings."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:  # Any: argparse's own
        return super().add_argument(*both_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:  # Any: argparse's own
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


def exit_code_of(command: str, work: Callable[[], object]) -> int:
    """Do the work: 0, or 2 after saying in one sentence what the user asked for that cannot be."""
    try:
        work()
    except (HastenError, ValueError, OSError) as error:
        sys.stderr.write(f"accelerate {command}: {error}\n")
        return 2
    return 0


def both_spellings(names: tuple[str, ...]) -> list[str]:
    """Every flag also with hyphens."""
    more = [f"--{name[2:].replace('_', '-')}" for name in names if name.startswith("--") and "_" in name]
    return list(dict.fromkeys([*names, *more]))


settle(__name__, "accelerate.commands.utils")
