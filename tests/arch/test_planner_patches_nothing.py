"""The planner changes nothing of hasten's own: no attribute of a class or module is another while a script is traced or timed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten
from hasten import Accelerator
from hasten.extensions.planning.plan.trace import trace_step
from hasten.extensions.planning.tune import trial
from hasten.extensions.planning.tune.tuning import TrialOutcome
from hasten.optim.run_part import parts_of_every_run

FOLDERS: Final = [
    Path(hasten.__file__).parent / "extensions" / "planning" / name
    for name in ("plan", "tune")
]
Picture = Mapping[tuple[str, str], int]


def assignments_to_hasten(tree: ast.Module) -> Iterator[str]:
    """Yield what sets an attribute of a name imported from hasten."""
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {
        (alias.asname or alias.name).partition(".")[0]
        for node in imports
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "hasten"
    }
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets):
                holders = [
                    child.value
                    for expression in targets
                    for child in ast.walk(expression)
                    if isinstance(child, ast.Attribute)
                ]
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[holder, *_]):
                holders = [holder]
            case _:
                continue
        if any(
            isinstance(child, ast.Name) and child.id in names
            for expression in holders
            for child in ast.walk(expression)
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_file_of_the_planner_sets_attributes_of_hasten() -> None:
    complaints_by_file = {
        file.name: complaints
        for folder in FOLDERS
        for file in sorted(folder.glob("*.py"))
        if (complaints := list(assignments_to_hasten(ast.parse(file.read_text()))))
    }
    assert not complaints_by_file


@pytest.mark.parametrize(
    "text",
    [
        "from hasten.accelerator import facade\nfacade.build = 1",
        "from hasten.optim.optimizer import PreparedOptimizer\nPreparedOptimizer.step = print",
        "import hasten\nsetattr(hasten.Accelerator, 'prepare', print)",
    ],
)
def test_such_assignments_are_seen(text: str) -> None:
    assert list(assignments_to_hasten(ast.parse(text)))


def picture() -> Picture:
    """Return the identity of every attribute of hasten's loaded modules and of the classes in them."""
    identities: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("hasten."):
            identities |= {
                (name, key): id(value) for key, value in vars(module).items()
            }
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    attributes_of_kind = {
                        key: value
                        for key, value in vars(kind).items()
                        if not key.startswith("_abc_")
                    }
                    identities |= {
                        (f"{name}.{kind.__qualname__}", key): id(value)
                        for key, value in attributes_of_kind.items()
                    }
    return identities


def loop() -> None:
    """Train one layer."""
    accelerator = Accelerator()
    net: nn.Module = nn.Linear(4, 2)
    loader: DataLoader[Tensor] = DataLoader([torch.zeros(4)] * 64, batch_size=2)  # type: ignore[arg-type]
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader
    )
    for batch in loader:
        accelerator.backward(net(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


def changed_attributes(earlier: Picture, later: Picture) -> list[tuple[str, str]]:
    """Return the attributes that another value has; new modules and lazily loaded names are none."""
    return [key for key, value in earlier.items() if later.get(key) != value]


def test_a_traced_script_sees_hasten_as_it_is() -> None:
    trace_step(loop, "once", ("no",))  # everything is imported now
    initial_picture = picture()
    changes: list[tuple[str, str]] = []

    def compare_and_loop() -> None:
        changes.extend(changed_attributes(initial_picture, picture()))
        loop()

    trace_step(compare_and_loop, "again", ("no",))
    assert not changes
    assert not parts_of_every_run(), "it ends with its block"


def test_a_timed_script_sees_hasten_as_it_is(tmp_path: Path) -> None:
    initial_picture = picture()
    script, spec_file, outcome_file = (
        tmp_path / "script.py",
        tmp_path / "spec.json",
        tmp_path / "result.json",
    )
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_planner_patches_nothing as here\nhere.looked.append(here.picture())\nhere.loop()\n"
    )
    spec = {
        "values": {"prefetch": 0},
        "result": str(outcome_file),
        "warmup": 1,
        "updates": 3,
    }
    spec_file.write_bytes(msgspec.json.encode(spec))
    loaded_module, path = (
        sys.modules.get("test_planner_patches_nothing"),
        list(sys.path),
    )
    sys.modules["test_planner_patches_nothing"] = sys.modules[__name__]
    try:
        assert trial.main([str(spec_file), str(script)]) == 0
    finally:
        sys.path[:] = path
        if loaded_module is None:
            del sys.modules["test_planner_patches_nothing"]
        else:
            sys.modules["test_planner_patches_nothing"] = loaded_module
    outcome = msgspec.json.decode(outcome_file.read_bytes(), type=TrialOutcome)
    assert (outcome.error, len(outcome.losses)) == ("", 5)
    assert not changed_attributes(initial_picture, looked.pop())
    assert not parts_of_every_run()


looked: list[Picture] = []
"""What scripts of this file saw."""
