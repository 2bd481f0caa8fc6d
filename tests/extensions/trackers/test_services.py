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
    for asked in ("wandb", ["jsonl", "wandb"], WandbTracker()):
        with pytest.raises(
            MissingPackageError,
            match=r"importing wandb failed \(AttributeError.*no_longer_there",
        ) as caught:
            build_trackers(asked)
        assert "Reinstall it: pip uninstall wandb" in str(caught.value)
        assert "missing_tracker: warn" in str(caught.value)
    assert build_trackers("wandb", is_main=False), "other ranks do not import it"


@pytest.mark.usefixtures("broken")
def test_a_broken_package_may_be_left_out() -> None:
    with pytest.warns(HastenWarning, match="importing wandb failed.*not logged there"):
        assert build_trackers("wandb", missing="warn") == []
    with pytest.warns(HastenWarning, match="importing wandb failed"):
        assert "wandb" not in [one.name for one in build_trackers("all")]


def stub(name: str, made: list[dict[str, Any]]) -> ModuleType:
    """A package that keeps what it is started with."""
    package = ModuleType(name)

    def start(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(
            id="1", get_key=lambda: "1", log_parameters=lambda _: None
        )

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
    tracker: type[Tracker],
    package: str,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
        folder = Path(
            config.offline_directory if config else given.get("dir") or given["log_dir"]
        )
        assert folder.is_dir()
        assert (
            folder == Path(chosen)
            if chosen
            else folder.is_relative_to(tmp_path / "runs")
        )


def test_wandb_s_own_run_id_wins_unless_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", stub("wandb", made))
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    run = Run(project="p", run_id="r", directory=tmp_path)
    WandbTracker().start(run)
    WandbTracker().start(replace(run, resume=Resume(run_id="old", step=1)))
    assert [options["id"] for options in made] == ["mine", "old"]
