"""The launch targets: those of the core, one line each, and those of extensions."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from hasten import extension
from hasten.config.sections.launch import OWN_LAUNCHERS
from hasten.errors import ConfigError
from hasten.launch.base import LaunchRequest, LaunchTarget
from hasten.launch.cluster import mpi, slurm

CORE_TARGETS: Final = (
    slurm.TARGET,
    mpi.TARGET,
)


def all_targets() -> list[LaunchTarget]:
    """Return the launch targets of the core and of extensions."""
    return [
        *CORE_TARGETS,
        *(offer.load() for offer in extension.offers("launch_targets").values()),
    ]


def choose_target(request: LaunchRequest) -> LaunchTarget | None:
    """Return the launch target that the settings ask for; None if hasten starts the processes of this machine itself.

    Raises: ConfigError for a name that is no launch target, or settings of a target that is not used.
    """
    targets = all_targets()
    # all, since each may refuse settings
    chosen_targets = [target for target in targets if target.is_chosen(request)]
    if len(chosen_targets) > 1:
        chosen_names = " and ".join(sorted(target.name for target in chosen_targets))
        raise ConfigError(
            f"the settings ask for {chosen_names}, and only one can start the processes. Remove the settings of the others."
        )
    if chosen_targets:
        return chosen_targets[0]
    launch_settings = request.config.launch
    target_names = [target.name for target in targets]
    if launch_settings.submit is not None:
        raise _unknown_name("submit", launch_settings.submit, target_names)
    machine_launchers = [
        *OWN_LAUNCHERS,
        *(target.name for target in targets if target.plan_machine is not None),
    ]
    if launch_settings.launcher not in machine_launchers:
        raise _unknown_name(
            "launcher", launch_settings.launcher, [*OWN_LAUNCHERS, *target_names]
        )
    return None


def _unknown_name(setting: str, value: str, target_names: list[str]) -> ConfigError:
    similar_names = get_close_matches(value, target_names, n=1)
    if similar_names:
        hint = f"did you mean {similar_names[0]!r}?"
    else:
        hint = f"installed are {', '.join(sorted(target_names))}."
    return ConfigError(
        f"{setting}={value!r} names no launch target, so nothing can start the processes; {hint}"
    )
