"""The modules that classes and functions have always been known under, wherever the file is that defines them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from accelerate._impl.surface.lazy import complete_face, imported_names
from accelerate._impl.surface.messages import message

# Any in this file: what modules hold.
_CALLED_BY_ORIGINAL: Final = frozenset(
    [
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "convert_model",
        "find_device",
        "fsdp2_load_full_state_dict",
        "get_parameters_from_modules",
        "retie_parameters",
        "send_to_device",
    ]
)
"""Functions that a module of the original calls itself, and that are called nowhere here."""
_ROOMS: Final[dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
HOMES: Final = {
    f"accelerate._impl.{room}": face
    for face, rooms in _ROOMS.items()
    for room in rooms.split()
}


class Face(ModuleType):
    """A face of which names can be replaced: what `unittest.mock.patch` sets on it acts in the rooms behind it, until it is undone."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self) and not name.startswith("__"):
            with suppress(AttributeError):
                getattr(self, name)  # loads what is replaced
        if name in vars(self):
            replaced = vars(self).setdefault("__replaced__", {})
            original, rooms = replaced.setdefault(
                name, (vars(self)[name], self._rooms(name))
            )
            for room_names in rooms:
                room_names[name] = value
            if value is original:
                del replaced[name]
            elif isinstance(original, FunctionType) and not self._called_names(
                name, rooms
            ):
                warnings.warn(
                    message("replaced_in_vain", self.__name__, name), stacklevel=2
                )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        original, rooms = vars(self).get("__replaced__", {}).pop(name, (None, ()))
        for room_names in rooms:
            room_names[name] = original
        super().__delattr__(name)

    def _called_names(self, name: str, rooms: list[dict[str, Any]]) -> bool:
        """Return whether a function of the rooms looks the name up, as a module of the original does that imports it."""
        is_imported = (
            not imported_names()
            .get(self.__name__, {})
            .get(name, "accelerate._impl")
            .startswith("accelerate._impl")
        )
        if hasattr(self, "__path__") or not (
            is_imported or name in _CALLED_BY_ORIGINAL
        ):
            return True  # a module that only shows it
        for room_names in (*rooms, *self._rooms_behind()):
            if name in _names_looked_up(room_names["__file__"]):
                return True
        return False

    def _rooms_behind(self) -> list[dict[str, Any]]:
        """Return the names of the rooms of which this face is the home."""
        rooms = []
        for room, face in HOMES.items():
            if face == self.__name__ and room in sys.modules:
                rooms.append(room)
        return [vars(sys.modules[room]) for room in rooms]

    def _rooms(self, name: str) -> list[dict[str, Any]]:
        """Return the names of the rooms behind this face, and of no other face, where `name` means the same as here."""
        shown = vars(self)
        inside = [vars(member) for member in shown.values() if isinstance(member, type)]
        functions = []
        for names in (shown, *inside):
            for member in names.values():
                if isinstance(member, FunctionType):
                    functions.append(member)
        unlisted_rooms = {
            member.__globals__["__name__"] for member in functions
        } - HOMES.keys()
        room_names = unlisted_rooms | {
            room for room, face in HOMES.items() if face == self.__name__
        }
        rooms = []
        for room in room_names & sys.modules.keys():
            if room.startswith("accelerate._impl"):
                rooms.append(vars(sys.modules[room]))
        return [names for names in rooms if names.get(name) is shown[name]]


class Rooms(SourceFileLoader):
    """Loads faces and the rooms of the table and settles what they define; a finder of `sys.meta_path`, too."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ours = name in HOMES or (
            name.startswith("accelerate.") and not name.startswith("accelerate._impl")
        )
        spec = PathFinder.find_spec(name, path) if is_ours else None
        # else in an archive
        if (
            spec is not None
            and spec.origin is not None
            and type(spec.loader) is SourceFileLoader
        ):
            spec.loader = cls(name, spec.origin)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then settle a room or complete a face."""
        super().exec_module(module)
        if module.__name__ in HOMES:
            _settle_home(module, HOMES[module.__name__])
        else:
            complete_face(module)
            module.__class__ = Face


@cache
def _names_looked_up(file: str) -> frozenset[str]:
    """Return the names, attributes and words that the functions of a file use."""
    looked_names: set[str] = set()
    unread = [compile(Path(file).read_text(), file, "exec")]
    while unread:
        code = unread.pop()
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                unread.append(constant)
        # else a module or a class, which stores what it defines under these names
        if code.co_flags & CO_OPTIMIZED:
            looked_names.update(
                code.co_names,
                [constant for constant in code.co_consts if isinstance(constant, str)],
            )
    return frozenset(looked_names)


def _settle_home(room: ModuleType, face: str) -> None:
    """Make `face` the home of the room's public classes and functions: messages name it, pickles find them there."""
    for member_name, member in vars(room).items():
        if (
            member_name.startswith("_")
            or not isinstance(member, type | FunctionType)
            or member.__module__ != room.__name__
        ):
            continue
        if "<" in member.__qualname__:  # made inside of another function, from a table
            member.__name__ = member.__qualname__ = member_name
        member.__module__ = face
