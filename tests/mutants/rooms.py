"""The modules that decide, room by room, and the tests that are to catch their mutants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src"


@dataclass(frozen=True, slots=True)
class Room:
    """Modules with import names, and the files or folders of their tests."""

    modules: dict[str, Path]
    tests: tuple[Path, ...]


def _room(modules: str, *tests: str) -> Room:
    return Room(
        {
            f"hasten.{module.replace('/', '.')}": SOURCE / "hasten" / f"{module}.py"
            for module in modules.split()
        },
        tuple(ROOT / "tests" / path for path in tests),
    )


ROOMS: Final = MappingProxyType(
    {
        "data": _room(
            "data/batch_plan data/order data/sampler data/position", "unit/data"
        ),
        "checkpoint": _room(
            "checkpoint/ownership checkpoint/reshard", "unit/checkpoint"
        ),
        "launch": _room("launch/shape", "unit/launch"),
        "mesh": _room("runtime/mesh_plan", "unit/runtime"),
        "optim": _room("optim/window optim/loss_weights", "unit/optim"),
        "survive": _room(
            "extensions/survive/ledger_plan extensions/survive/roles_plan",
            "extensions/survive",
        ),
        "config": _room("config/resolve", "unit/config"),
    }
)
