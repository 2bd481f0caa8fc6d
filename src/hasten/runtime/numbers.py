"""Whole numbers in environment variables, with errors that name the variable and its value; no torch."""

from __future__ import annotations

from collections.abc import Mapping

from hasten.errors import TopologyError


def number(env: Mapping[str, str], name: str) -> int | None:
    """The whole number in `name`, None if it is not set."""
    value = env.get(name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise TopologyError(
            f"{name}={value!r} is not a whole number, so this process does not know its place in the job. "
            f"Correct {name}, or unset it if it is left over from another launcher."
        )
    return int(value)


def first(env: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of `names` that is set."""
    return next((found for name in names if (found := number(env, name)) is not None), None)


def companion(env: Mapping[str, str], name: str, beside: str) -> int:
    """The number in `name`, which must be there because `beside` is."""
    value = number(env, name)
    if value is None:
        raise missing(env, name, beside)
    return value


def missing(env: Mapping[str, str], name: str, beside: str) -> TopologyError:
    """The error of `name` not being there although `beside` is."""
    return TopologyError(
        f"{beside}={env.get(beside)} is set but {name} is not, so the place of this process in the job is unclear. "
        f"Export {name} as well, or unset {beside} to run alone."
    )


def contradiction(env: Mapping[str, str], name: str, other: str, why: str) -> TopologyError:
    """The error of two variables that cannot both be true."""
    return TopologyError(
        f"{name}={env.get(name)} contradicts {other}={env.get(other)}: {why}. "
        f"Make them agree, or unset those that another launcher left behind."
    )
