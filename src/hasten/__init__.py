"""Public names of hasten, each loaded from its room on first use.

`import hasten` costs next to nothing: no torch, no room, only this table. To add a public name, write one line in
the `TYPE_CHECKING` block (for type checkers and editors) and one in `_PUBLIC` (for the running program), both in
alphabetical order of rooms; tests/arch compares the two and the committed snapshot of names.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hasten.accelerator.facade import Accelerator as Accelerator
    from hasten.accelerator.process import Process as Process
    from hasten.progress.bar import Progress as Progress
    from hasten.progress.tqdm_bar import tqdm as tqdm
    from hasten.tracking.backends.jsonl import read_metrics as read_metrics
    from hasten.tracking.base import Entry as Entry
    from hasten.tracking.base import Run as Run
    from hasten.tracking.base import Tracker as Tracker

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "Accelerator": "hasten.accelerator.facade",
        "Process": "hasten.accelerator.process",
        "Progress": "hasten.progress.bar",
        "tqdm": "hasten.progress.tqdm_bar",
        "read_metrics": "hasten.tracking.backends.jsonl",
        "Entry": "hasten.tracking.base",
        "Run": "hasten.tracking.base",
        "Tracker": "hasten.tracking.base",
    }
)

__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    """Return every public name, loaded or not."""
    return sorted(__all__)


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute

    def __getattr__(name: str) -> object:
        """Load the room that defines `name` and keep the result for the next access."""
        if (module := _PUBLIC.get(name)) is None:
            raise AttributeError(
                f"module 'hasten' has no attribute {name!r}; public names are listed in hasten.__all__"
            )
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value
