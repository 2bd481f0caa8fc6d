"""Scripts that `hasten migrate` moves without a finding give on hasten what they gave on the original package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hasten.extensions.migrate.migrating import migrate

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "golden" / "parity_1.json").read_text())
MESSAGES = ("batch_size_search",)  # equal but for the words of an error
# plans for devices that the machine does not have, which hasten refuses
ABSENT_DEVICES = ("maps_random",)
# hasten divides a shorter window by the number of its own steps
SHORT_WINDOWS = ("short_window",)
OWN_CLASSES = (  # print the names of the drop-in's classes
    *(
        "skipped_kinds",
        "copy_optimizer",
        "pickle_loader",
        "pickle_optimizer",
        "pickle_scheduler",
        "stateful_dispatch",
    ),
)
# prints every field of the settings, of which hasten has others
OWN_FIELDS = ("settings_defaults",)
# read _hf_hook of a module and _num_yielded of a loader's state
PRIVATE = ("hooks_order", "stateful_kinds")
SHARED = "small_loop"
MOVED = {
    path.stem: done.text
    for path in sorted((HERE / "parity").glob("*.py"))
    if path.stem in RECORDED
    and path.stem
    not in (
        *MESSAGES,
        *ABSENT_DEVICES,
        *SHORT_WINDOWS,
        *OWN_CLASSES,
        *OWN_FIELDS,
        *PRIVATE,
    )
    and SHARED not in path.read_text()
    if not (done := migrate(path.read_text())).findings
    and "accelerate" not in done.text.replace("accelerator", "")
}


@pytest.fixture(autouse=True)
def _fresh(parity: ModuleType) -> Iterator[None]:
    parity.fresh()
    yield
    parity.fresh()


def test_enough_scripts_are_moved_whole() -> None:
    assert len(MOVED) >= 30, sorted(MOVED)


def test_the_shared_loop_names_its_differences_and_trains_alike_without_them(
    parity: ModuleType,
) -> None:
    source = (HERE / f"{SHARED}.py").read_text()
    assert {
        "shuffles" in one.text or "scheduler" in one.text
        for one in migrate(source).findings
    } == {True}
    results = []
    for text in (source, migrate(source).text):
        parity.fresh()
        module = ModuleType(SHARED)
        plain = text.replace("shuffle=True", "shuffle=False").replace(
            "nn.Dropout(0.1)", "nn.Identity()"
        )
        exec(compile(plain, f"{SHARED}.py", "exec"), module.__dict__)
        results.append(module.train(module.Accelerator(cpu=True)))
    assert parity.differences(*results) == []


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_moved_script_gives_what_it_gave(
    name: str, parity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    module = ModuleType(f"moved_{name}")
    exec(compile(MOVED[name], f"{name}.py", "exec"), module.__dict__)
    found = json.loads(json.dumps(module.run()))
    assert parity.differences(RECORDED[name], found) == []
