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
            "data/batch_plan data/order data/sampler data/position",
            "unit/data/test_plan_laws.py",
            "unit/data/test_shuffle.py",
            "unit/data/test_orders.py",
            "unit/data/test_positions.py",
            "unit/data/test_assignments.py",
        ),
        "checkpoint": _room(
            "checkpoint/ownership checkpoint/reshard",
            "unit/checkpoint/test_ckpt_slices.py",
            "unit/checkpoint/test_ckpt_reshard.py",
            "unit/checkpoint/test_ckpt_filling.py",
            "unit/checkpoint/test_reads.py",
        ),
        "launch": _room(
            "launch/shape",
            "unit/launch/test_launch_shape.py",
            "unit/launch/test_launch_allocation.py",
        ),
        "mesh": _room(
            "runtime/mesh_plan",
            "unit/runtime/test_mesh_plan.py",
            "unit/runtime/test_axes.py",
        ),
        "optim": _room(
            "optim/window optim/loss_weights",
            "unit/optim/test_loss_weights.py",
            "unit/optim/test_dividing.py",
            "unit/optim/test_clock.py",
            "unit/optim/test_weight_precision.py",
        ),
        "survive": _room(
            "extensions/survive/ledger_plan extensions/survive/roles_plan",
            "extensions/survive/test_ledger.py",
            "extensions/survive/test_roles.py",
        ),
        "config": _room(
            "config/resolve",
            "unit/config/test_entries.py",
            "unit/config/test_sources.py",
            "unit/config/test_keywords.py",
        ),
    }
)
"""The test files are those about the modules, so that a mutant takes a second or two; others may be added."""
