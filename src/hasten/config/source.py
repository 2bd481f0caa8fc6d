"""Where a value came from, and one value given by one source."""

from dataclasses import dataclass
from typing import Any, Final, Literal

SourceKind = Literal["default", "file", "environment", "flag", "code"]
PRECEDENCE: Final[tuple[SourceKind, ...]] = ("default", "file", "environment", "flag", "code")

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
    """

    path: Path
    value: Any
    source: Source
    text: bool = False
    said: str = ""

    @property
    def name(self) -> str:
        """The dotted name of the setting."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Return a path as it is written in messages: fsdp.cpu_offload."""
    return ".".join(path)
