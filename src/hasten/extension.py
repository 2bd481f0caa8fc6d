"""Extensions: what each folder of `hasten.extensions` and each installed package adds to hasten, and how the core finds it.

An extension declares its names in a module without torch; the objects behind them are imported when a name is used:

```python
extension = Extension(
    name="cluster",
    summary="jobs on our cluster",
    launch_targets={"cluster": "our_package.target:TARGET"},
)
```
The core asks for a name of a kind, and never names an extension.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from hasten.errors import ExtensionError, HastenWarning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP: Final = "hasten.extensions"
"""Entry-point group of packages that extend hasten; each entry point is an `Extension`."""

SEVERAL_RANKS: Final = "several ranks"
"""In place of the setting of a part of a run: the part belongs to every run of several ranks."""

Kind = Literal[
    "strategies",
    "offload_modes",
    "mesh_axes",
    "step_wrappers",
    "launch_targets",
    "commands",
    "settings",
    "trackers",
    "run_parts",
    "stores",
    "uploads",
    "public_names",
]
Table = Mapping[str, str]
"""Names, each with the place of its object as "module:object"."""

_NOUNS: Final = MappingProxyType(
    {
        "strategies": "strategy",
        "offload_modes": "value of offload",
        "mesh_axes": "axis of the mesh",
        "step_wrappers": "method",
        "launch_targets": "launch target",
        "commands": "command",
        "settings": "settings class",
        "trackers": "tracker",
        "run_parts": "part of a run",
        "stores": "storage of checkpoints",
        "uploads": "service for uploads",
        "public_names": "name",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Names that an extension adds to hasten, by kind. `docs/extending.md` says what the object behind each kind is."""

    name: str
    summary: str
    """What the extension is for, in a few words."""
    strategies: Table = field(default_factory=dict)
    offload_modes: Table = field(default_factory=dict)
    """Values of the setting `offload`."""
    mesh_axes: Table = field(default_factory=dict)
    step_wrappers: Table = field(default_factory=dict)
    """Methods of the Accelerator that wrap a training step."""
    launch_targets: Table = field(default_factory=dict)
    commands: Table = field(default_factory=dict)
    settings: Table = field(default_factory=dict)
    trackers: Table = field(default_factory=dict)
    run_parts: Table = field(default_factory=dict)
    stores: Table = field(default_factory=dict)
    """Storage of checkpoints: `url` for everything that is no local folder."""
    uploads: Table = field(default_factory=dict)
    """Services to which `push_to_hub()` uploads models."""
    public_names: Table = field(default_factory=dict)
    """Names importable from `hasten` itself."""
    command_help: Mapping[str, str] = field(default_factory=dict)
    """One line of help for each command."""
    run_part_settings: Mapping[str, str] = field(default_factory=dict)
    """The dotted setting or section that turns a part of a run on if it is not the default, a $VARIABLE that does if it is set, or
    `SEVERAL_RANKS`; a part without one belongs to every run."""
    strategy_packages: Mapping[str, str] = field(default_factory=dict)
    """The package that each strategy imports, which a launch needs on this machine."""
    strategy_variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variable ("NAME=value") by which strategy="auto" selects a strategy, and its devices, on this host."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            if isinstance(table := getattr(self, spec.name), Mapping):
                object.__setattr__(self, spec.name, MappingProxyType(dict(table)))


@dataclass(frozen=True, slots=True)
class Offer:
    """Name that an extension provides."""

    kind: Kind
    name: str
    place: str
    """The object, as "module:object"."""
    extension: str
    help: str = ""
    """One line of help; of commands."""

    def load(self) -> Any:  # Any: a class or function of any kind
        """Import the object. Raises: ExtensionError if its extension cannot be imported."""
        module_name, _, attribute = self.place.partition(":")
        try:
            module = import_module(module_name)  # only what is used
            return getattr(module, attribute)
        except (ImportError, AttributeError) as error:
            raise ExtensionError(
                f"the {_NOUNS[self.kind]} {self.name!r} of the extension {self.extension!r} cannot be imported from {self.place} ({error}). "
                "Install what is missing, or correct or remove the extension."
            ) from error


def offers(kind: Kind) -> Mapping[str, Offer]:
    """Return everything of a kind that extensions provide. Raises: ExtensionError if two provide the same name."""
    offers_by_name: dict[str, Offer] = {}
    for extension in installed():
        for name, place in getattr(extension, kind).items():
            if name in offers_by_name:
                raise ExtensionError(
                    f"the extensions {offers_by_name[name].extension!r} and {extension.name!r} both provide the {_NOUNS[kind]} {name!r}, so "
                    "hasten cannot choose. Remove one of the two."
                )
            if kind == "commands":
                help_line = extension.command_help.get(name, extension.summary)
            else:
                help_line = ""
            offers_by_name[name] = Offer(kind, name, place, extension.name, help_line)
    return offers_by_name


def strategy_by_environment(environment: Mapping[str, str]) -> str | None:
    """Return the strategy of an extension that a variable of the environment selects; None if there is none."""
    for extension in installed():
        for strategy, assignment in extension.strategy_variables.items():
            variable, _, value = assignment.partition("=")
            if environment.get(variable) == value:
                return strategy
    return None


def package_of(strategy: str) -> str | None:
    """Return the package that a strategy of an extension imports; None for torch's."""
    packages = [extension.strategy_packages.get(strategy) for extension in installed()]
    for package in packages:
        if package is not None:
            return package
    return None


def load(kind: Kind, name: str) -> Any:  # Any: a class or function of any kind
    """Import what an extension provides under a name.

    Raises: ExtensionError if nothing provides it, with what exists.
    """
    known = offers(kind)
    if name not in known:
        close_names = get_close_matches(name, known, n=1)
        if close_names:
            hint = f"did you mean {close_names[0]!r}?"
        else:
            hint = f"installed extensions provide: {', '.join(known) or 'none'}."
        raise ExtensionError(
            f"no installed extension provides the {_NOUNS[kind]} {name!r}; {hint} Install a package that provides it."
        )
    return known[name].load()


@cache  # folders and installed packages do not change while a process runs
def installed() -> tuple[Extension, ...]:
    """Return all extensions: those of hasten's own folder, then those of installed packages."""
    return (*_bundled(), *_third_party())


def _bundled() -> Iterator[Extension]:
    folder = Path(__file__).with_name("extensions")
    for declaration in sorted(folder.glob("*/extension.py")):
        # whatever folders are there
        module = import_module(f"hasten.extensions.{declaration.parent.name}.extension")
        yield module.extension


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of a group; without importlib.metadata, which takes 30 ms, if no installed package has any."""
    files = (
        file
        for folder in sys.path
        for file in Path(folder).glob("*-info/entry_points.txt")
    )
    if not any(f"[{group}]" in file.read_text("utf-8", "replace") for file in files):
        return ()
    # only where a package extends hasten
    metadata = import_module("importlib.metadata")
    points: Iterable[EntryPoint] = metadata.entry_points(group=group)
    return points


def _third_party() -> Iterator[Extension]:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        extension = _loaded(entry_point)
        if extension is not None:
            yield extension


def _loaded(entry_point: EntryPoint) -> Extension | None:
    """Return the extension of an entry point; None, with a warning, if it is broken."""
    try:
        extension = entry_point.load()
    # a foreign package may fail in any way, and must not stop a training without it
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(extension, Extension):
            return extension
        problem = (
            f"it is a {type(extension).__name__}, not a hasten.extension.Extension"
        )
    warnings.warn(
        f"the extension {entry_point.name!r} ({entry_point.value}) is ignored: {problem}. Correct it, or uninstall its package.",
        HastenWarning,
        stacklevel=2,
    )
    return None
