"""Trackers whose packages are broken, or have settings of their own."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hasten.errors import HastenWarning, MissingPackageError
from hasten.extensions.trackers.comet_ml import CometTracker
from hasten.extensions.trackers.swanlab import SwanlabTracker
from hasten.extensions.trackers.wandb import WandbTracker
from hasten.tracking.base import Resume, Run, Tracker
from hasten.tracking.registry import build_trackers


@pytest.fixture(name="broken")
def broken_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is there and cannot be imported."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(
        "import numpy\nnumpy.no_longer_there\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


@pytest.mark.usefixtures("broken")
def test_a_package_that_cannot_be_imported_is_an_error() -> None:
    for log_with in ("wandb", ["jsonl", "wandb"], WandbTracker()):
        with pytest.raises(
            MissingPackageError,
            match=r"importing wandb failed \(AttributeError.*no_longer_there",
        ) as caught:
            build_trackers(log_with)
        assert "Reinstall it: pip uninstall wandb" in str(caught.value)
        assert "missing_tracker: warn" in str(caught.value)
    assert build_trackers("wandb", is_main=False), "other ranks do not import it"


@pytest.mark.usefixtures("broken")
def test_a_broken_package_may_be_left_out() -> None:
    with pytest.warns(HastenWarning, match="importing wandb failed.*not logged there"):
        assert build_trackers("wandb", missing="warn") == []
    with pytest.warns(HastenWarning, match="importing wandb failed"):
        assert "wandb" not in [tracker.name for tracker in build_trackers("all")]


def stub(name: str, started_options: list[dict[str, Any]]) -> ModuleType:
    """A package that keeps what it is started with."""
    package = ModuleType(name)

    def start(**options: Any) -> Any:
        started_options.append(options)
        return SimpleNamespace(
            id="1", get_key=lambda: "1", log_parameters=lambda _: None
        )

    package.init = package.start = start  # type: ignore[attr-defined]
    package.ExperimentConfig = lambda **settings: SimpleNamespace(**settings)  # type: ignore[attr-defined]
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
    tracker: type[Tracker],
    package: str,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_options: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, package, stub(package, started_options))
    monkeypatch.setattr("hasten.optional.available", lambda module, spec="": True)
    run = Run(project="p", run_id="r", directory=tmp_path / "runs")
    for chosen_folder in ("", str(tmp_path / "chosen")):
        monkeypatch.setenv(variable, chosen_folder)
        tracker().start(run)
        start_options = started_options[-1]
        config = start_options.get("experiment_config")
        folder = Path(
            config.offline_directory
            if config
            else start_options.get("dir") or start_options["log_dir"]
        )
        assert folder.is_dir()
        assert (
            folder == Path(chosen_folder)
            if chosen_folder
            else folder.is_relative_to(tmp_path / "runs")
        )


def test_wandb_s_own_run_id_wins_unless_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_options: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", stub("wandb", started_options))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    run = Run(project="p", run_id="r", directory=tmp_path)
    WandbTracker().start(run)
    WandbTracker().start(replace(run, resume=Resume(run_id="old", step=1)))
    assert [options["id"] for options in started_options] == ["mine", "old"]
