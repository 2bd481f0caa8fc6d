"""Names of trackers: built-in, installed, misspelt, foreign."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hasten import extension
from hasten.errors import HastenWarning, MissingPackageError, TrackerError
from hasten.tracking.backends.comet_ml import CometTracker
from hasten.tracking.backends.jsonl import JsonlTracker
from hasten.tracking.backends.swanlab import SwanlabTracker
from hasten.tracking.backends.wandb import WandbTracker
from hasten.tracking.base import Resume, Run, Tracker
from hasten.tracking.registry import build, installed

PLUGIN = """
from hasten.extension import Extension
from hasten.tracking.base import Entry, Tracker

class Paper(Tracker):
    name = "paper"
    def log(self, entry: Entry) -> None: ...

places = {"paper": "paper_tracker:Paper", "stone": "builtins:dict"}
extension = Extension(name="paper", summary="lines on paper", trackers=places)
"""


def test_names_instances_and_lists_are_accepted() -> None:
    tracker = JsonlTracker(every_rank=True)
    assert build(None) == []
    assert build(tracker) == [tracker]
    assert [one.name for one in build("jsonl")] == ["jsonl"]
    assert [one.name for one in build(["JSONL"])] == ["jsonl"]
    assert "jsonl" in [one.name for one in build("all")]


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(TrackerError, match="Did you mean 'tensorboard'"):
        build("tensorbord")


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(TrackerError, match="a different name"):
        build(["jsonl", JsonlTracker()])


@pytest.fixture
def paper_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose extension has two trackers."""
    (tmp_path / "paper_tracker.py").write_text(PLUGIN)
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hasten.extensions]\npaper = paper_tracker:extension\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    extension.installed.cache_clear()
    yield
    extension.installed.cache_clear()
    sys.modules.pop("paper_tracker", None)


@pytest.mark.usefixtures("paper_package")
def test_an_extension_brings_a_tracker() -> None:
    assert "paper" in installed()
    assert [tracker.name for tracker in build("paper")] == ["paper"]
    with pytest.raises(TrackerError, match="extension 'paper' made a dict as the tracker 'stone'"):
        build("stone")


@pytest.fixture(name="broken")
def broken_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is there and cannot be imported."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("import numpy\nnumpy.no_longer_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


@pytest.mark.usefixtures("broken")
def test_a_package_that_cannot_be_imported_is_an_error() -> None:
    for asked in ("wandb", ["jsonl", "wandb"], WandbTracker()):
        with pytest.raises(
            MissingPackageError, match=r"importing wandb failed \(AttributeError.*no_longer_there"
        ) as caught:
            build(asked)
        assert "Reinstall it: pip uninstall wandb" in str(caught.value)
        assert "missing_tracker: warn" in str(caught.value)
    assert build("wandb", is_main=False), "other ranks do not import it"
    with pytest.raises(MissingPackageError):
        build(WandbTracker(every_rank=True), is_main=False)


@pytest.mark.usefixtures("broken")
def test_a_broken_package_may_be_left_out() -> None:
    with pytest.warns(HastenWarning, match="importing wandb failed.*not logged there"):
        assert build("wandb", missing="warn") == []
    with pytest.warns(HastenWarning, match="importing wandb failed"):
        assert "wandb" not in [one.name for one in build("all")]


def stub(name: str, made: list[dict[str, Any]]) -> ModuleType:
    """A package that keeps what it is started with."""
    package = ModuleType(name)

    def start(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(id="1", get_key=lambda: "1", log_parameters=lambda _: None)

    package.init = package.start = start  # type: ignore[attr-defined]
    package.ExperimentConfig = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec(name, None)
    return package


@pytest.mark.parametrize(
    ("tracker", "package", "variable"),
    [
        (WandbTracker, "wandb", "WANDB_DIR"),
        (SwanlabTracker, "swanlab", "SWANLAB_LOG_DIR"),
        (CometTracker, "comet_ml", "COMET_OFFLINE_DIRECTORY"),
    ],
)
def test_the_folder_of_the_package_s_own_variable_wins(
    tracker: type[Tracker], package: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, package, stub(package, made))
    monkeypatch.setattr("hasten.optional.available", lambda module, spec="": True)
    run = Run(project="p", run_id="r", directory=tmp_path / "runs")
    for chosen in ("", str(tmp_path / "chosen")):
        monkeypatch.setenv(variable, chosen)
        tracker().start(run)
        given = made[-1]
        config = given.get("experiment_config")
        folder = Path(config.offline_directory if config else given.get("dir") or given["log_dir"])
        assert folder.is_dir()
        assert folder == Path(chosen) if chosen else folder.is_relative_to(tmp_path / "runs")


def test_wandb_s_own_run_id_wins_unless_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", stub("wandb", made))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    run = Run(project="p", run_id="r", directory=tmp_path)
    WandbTracker().start(run)
    WandbTracker().start(replace(run, resume=Resume(run_id="old", step=1)))
    assert [options["id"] for options in made] == ["mine", "old"]
