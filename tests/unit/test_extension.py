"""Extensions: found in hasten's folder and in installed packages, loaded by name, and refused with words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import get_args

import pytest

from hasten import extension
from hasten.cli.main import main
from hasten.errors import ExtensionError, HastenWarning
from hasten.extension import ENTRY_POINT_GROUP, Extension, Kind

CLUSTER_PACKAGE = """
from hasten.extension import Extension

extension = Extension(
    name="cluster",
    summary="jobs on a cluster",
    launch_targets={"cluster": "cluster_package:TARGET", "missing": "cluster_package:ABSENT"},
)
TARGET = "the target"
not_an_extension = 3
"""


@pytest.fixture
def entry_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[EntryPoint]]:
    """Entry points of installed packages, as a list that a test fills; `cluster_package` can be imported."""
    (tmp_path / "cluster_package.py").write_text(CLUSTER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    points: list[EntryPoint] = []
    monkeypatch.setattr(extension, "entry_points", lambda group: points)
    extension.installed.cache_clear()
    yield points
    extension.installed.cache_clear()
    sys.modules.pop("cluster_package", None)


def point(attribute: str, name: str = "cluster") -> EntryPoint:
    return EntryPoint(name, f"cluster_package:{attribute}", ENTRY_POINT_GROUP)


def test_an_installed_package_provides_names(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("extension"))
    assert extension.offers("launch_targets")["cluster"].extension == "cluster"
    assert extension.load("launch_targets", "cluster") == "the target"


def test_an_unknown_name_is_refused_with_what_exists(
    entry_points: list[EntryPoint],
) -> None:
    entry_points.append(point("extension"))
    with pytest.raises(
        ExtensionError,
        match="no installed extension provides the launch target 'clutser'; did you mean",
    ):
        extension.load("launch_targets", "clutser")


def test_two_extensions_may_not_provide_the_same_name(
    entry_points: list[EntryPoint],
) -> None:
    entry_points += [point("extension"), point("extension", "other")]
    with pytest.raises(
        ExtensionError, match="both provide the launch target 'cluster'"
    ):
        extension.offers("launch_targets")


@pytest.mark.parametrize("attribute", ["not_an_extension", "absent"])
def test_a_broken_package_is_ignored_with_a_warning(
    entry_points: list[EntryPoint], attribute: str
) -> None:
    entry_points += [point(attribute, "broken"), point("extension")]
    with pytest.warns(HastenWarning, match="the extension 'broken'"):
        assert "cluster" in extension.offers("launch_targets")


def test_an_object_that_cannot_be_imported_names_its_extension(
    entry_points: list[EntryPoint],
) -> None:
    entry_points.append(point("extension"))
    with pytest.raises(
        ExtensionError, match="'missing' of the extension 'cluster' cannot be imported"
    ):
        extension.load("launch_targets", "missing")


def test_every_declared_object_of_the_bundled_extensions_exists() -> None:
    for declared in extension._bundled():
        assert isinstance(declared, Extension)
        for kind in get_args(Kind):
            for name, object_path in getattr(declared, kind).items():
                assert (
                    extension.Offer(kind, name, object_path, declared.name).load()
                    is not None
                )


def test_an_installed_package_provides_a_command(
    entry_points: list[EntryPoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue_package.py").write_text(
        "from hasten.extension import Extension\n"
        'extension = Extension(name="queue", summary="the queue", commands={"queue": "queue_package:show"},\n'
        '    command_help={"queue": "show the queue of our cluster"})\n'
        "def show(argv):\n    print('jobs:', *argv)\n    return 3\n"
    )
    entry_points.append(
        EntryPoint("queue", "queue_package:extension", ENTRY_POINT_GROUP)
    )
    assert main(["--help"]) == 0
    assert "show the queue of our cluster" in capsys.readouterr().out
    assert main(["queue", "mine"]) == 3
    assert capsys.readouterr().out == "jobs: mine\n"


def test_a_command_of_the_core_is_not_replaced(
    entry_points: list[EntryPoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch_package.py").write_text(
        "from hasten.extension import Extension\n"
        'extension = Extension(name="launching", summary="ours", commands={"launch": "launch_package:main"})\n'
    )
    entry_points.append(
        EntryPoint("launching", "launch_package:extension", ENTRY_POINT_GROUP)
    )
    assert main(["launch", "train.py"]) == 1
    assert (
        "the extension 'launching' provides a command 'launch', which hasten itself has"
        in capsys.readouterr().err
    )
