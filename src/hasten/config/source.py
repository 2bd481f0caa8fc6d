"""Where a value came from, and one value given by one source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

SourceKind = Literal["default", "file", "environment", "flag", "code"]
PRECEDENCE: Final[tuple[SourceKind, ...]] = ("default", "file", "environment", "flag", "code")

_PLAIN: Final = re.compile(r"(?!(?i:true|false|null|nan)$)[A-Za-z_./][\w.:/+-]*")

Path = tuple[str, ...]  # ("fsdp", "cpu_offload")


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value: a default, a line of a file, a variable, a flag or an argument in code."""

    kind: SourceKind = "default"
    detail: str = ""

    @property
    def level(self) -> int:
        """Position in the order of precedence; the highest wins."""
        return PRECEDENCE.index(self.kind)

    def __str__(self) -> str:
        """Return how the source is named in tables and messages."""
        match self.kind:
            case "default":
                return "default"
            case "file":
                return self.detail or "file"
            case "environment":
                return f"environment {self.detail}"
            case "flag":
                return f"flag {self.detail}"
            case "code":
                return f"code argument {self.detail}" if self.detail else "code"


DEFAULT: Final = Source()


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting as one source gave it, not yet decoded.

    `text` says that the value came as text (a flag or a variable), so that "4" may mean the number.
    `said` is how the user wrote the name, when that differs from the path.
    `weak` marks a value derived from another setting: one given outright by the same kind of source wins over it.
    """

    path: Path
    value: Any
    source: Source
    text: bool = False
    said: str = ""
    weak: bool = False

    @property
    def name(self) -> str:
        """The dotted name of the setting."""
        return dotted(self.path)

    @property
    def spelled(self) -> str:
        """The name as the user wrote it."""
        return self.said or self.name

    @property
    def place(self) -> str:
        """Where and how the setting was given, as the beginning of a message."""
        match self.source.kind:
            case "file":
                return f"{self.source}: {self.spelled}: {shown(self.value)}"
            case "environment":
                return f"environment {self.source.detail}={self.value}"
            case "flag":
                return f"flag {self.source.detail} {self.value}"
            case _:
                return f"{self.source.detail or self.spelled}={self.value!r}"


def dotted(path: Path) -> str:
    """Return a path as it is written in messages: fsdp.cpu_offload."""
    return ".".join(path)


def shown(value: Any) -> str:
    """Return a value as a settings file spells it; text is quoted where it would read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return repr(value)


@dataclass(frozen=True, slots=True)
class Marked:
    """A value of a settings file with the line it begins on; mappings and lists hold further marked values."""

    value: Any
    line: int

    def plain(self) -> Any:
        """Return the value without marks, all the way down."""
        if isinstance(self.value, Mapping):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value
