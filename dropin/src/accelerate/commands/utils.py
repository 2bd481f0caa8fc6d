"""Parsers that take flags with hyphens and underscores."""

from __future__ import annotations

import argparse
from typing import Any


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


def both_spellings(names: tuple[str, ...]) -> list[str]:
    """Every flag also with hyphens."""
    more = [f"--{name[2:].replace('_', '-')}" for name in names if name.startswith("--") and "_" in name]
    return list(dict.fromkeys([*names, *more]))
