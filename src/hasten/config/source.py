"""Sources of values, and entries: one value from one source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

SourceKind = Literal["default", "file", "environment", "flag", "code"]
PRECEDENCE: Final[tuple[SourceKind, ...]] = (
    "default",
    "file",
    "environment",
    "flag",
    "code",
)

_PLAIN: Final = re.compile(r"(?!(?i:true|false|null|nan)$)[A-Za-z_./][\w.:/+-]*")

Path = tuple[str, ...]  # ("fsdp", "cpu_offload")


@dataclass(frozen=True, slots=True)
class SettingSource:
    """Origin of a value: a default, a line of a file, a variable, a flag or an argument in code."""

    kind: SourceKind = "default"
    detail: str = ""

    @property
    def level(self) -> int:
        """Rank in the order of precedence; the highest wins."""
        return PRECEDENCE.index(self.kind)

    def __str__(self) -> str:
        """Return the name of the source in tables and messages."""
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


DEFAULT: Final = SettingSource()


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One setting from one source, not yet decoded.

    `text` is true if the value was given as text (a flag or a variable), so that "4" may mean the number.
    `said` is the user's spelling of the name, if it differs from the path.
    `weak` marks a value derived from another setting: an explicit one from the same kind of source takes precedence.
    """

    path: Path
    value: Any
    source: SettingSource
    text: bool = False
    said: str = ""
    weak: bool = False

    @property
    def name(self) -> str:
        """The dotted name of the setting."""
        return dotted_name(self.path)

    @property
    def spelled(self) -> str:
        """The name as the user wrote it."""
        return self.said or self.name

    def __str__(self) -> str:
        """Return the source, name and value of the setting, as the start of a message."""
        return self.place

    @property
    def place(self) -> str:
        """The source, name and value of the setting, as the start of a message."""
        match self.source.kind:
            case "file":
                return f"{self.source}: {self.spelled}: {shown(self.value)}"
            case "environment":
                return f"environment {self.source.detail}={self.value}"
            case "flag":
                return f"flag {self.source.detail} {self.value}"
            case _:
                return f"{self.source.detail or self.spelled}={self.value!r}"


def dotted_name(setting_path: Path) -> str:
    """Return a path in dotted form: fsdp.cpu_offload."""
    return ".".join(setting_path)


def shown(shown_value: Any) -> str:
    """Return a value as written in a settings file; ambiguous text is quoted."""
    if shown_value is None:
        return "null"
    if isinstance(shown_value, bool):
        return str(shown_value).lower()
    if isinstance(shown_value, str):
        return shown_value if _PLAIN.fullmatch(shown_value) else repr(shown_value)
    if isinstance(shown_value, list | tuple):
        return f"[{', '.join(shown(item) for item in shown_value)}]"
    if isinstance(shown_value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {shown(item)}" for key, item in shown_value.items())
            + "}"
        )
    return repr(shown_value)


@dataclass(frozen=True, slots=True)
class Marked:
    """Value of a settings file with its line number; mappings and lists contain further marked values."""

    value: Any
    line: int

    def plain(self) -> Any:
        """Return the value without marks, recursively."""
        if isinstance(self.value, Mapping):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value
