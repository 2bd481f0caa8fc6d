"""Optional packages: present and new enough, or an error that says what to install."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from hasten import optional
from hasten.errors import MissingPackageError
from hasten.optional import available, installed_version, need


def test_present_package_is_imported() -> None:
    assert need("yaml").safe_load("1") == 1
    assert available("numpy", ">=1.0")
    assert installed_version("yaml") is not None


def test_absent_package_names_the_extra() -> None:
    assert not available("deepspeed_that_is_not_there")
    with pytest.raises(MissingPackageError, match=r"pip install 'no_such_package>=2'"):
        need("no_such_package", ">=2", "a test")


def test_old_package_names_both_versions() -> None:
    with pytest.raises(MissingPackageError, match=r"numpy>=999 is needed for a test"):
        need("numpy", ">=999", "a test")


def test_absent_submodule_of_absent_package() -> None:
    assert not available("no_such_package.inner")


def test_a_stand_in_without_a_spec_is_no_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "stand_in", ModuleType("stand_in"))
    assert not available("stand_in")


@pytest.mark.parametrize(
    ("module", "room", "distribution", "versions"),
    [
        ("deepspeed", "deepspeed.engine", "deepspeed", ">=0.19,<0.20"),
        ("megatron", "megatron.package", "megatron-core", ">=0.16,<0.17"),
    ],
)
def test_a_missing_or_other_engine_is_one_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    room: str,
    distribution: str,
    versions: str,
) -> None:
    """What the engines ask for, where the package is absent, too old and too new."""
    engine = importlib.import_module(f"hasten.extensions.{room}")
    assert versions == engine.VERSIONS
    import_engine = getattr(engine, f"import_{module}")
    getattr(
        import_engine, "cache_clear", lambda: None
    )()  # where the package is installed, another test may have asked
    for version in (None, "0.1", "7.0"):
        monkeypatch.setattr(
            optional, "installed_version", lambda _, version=version: version
        )
        monkeypatch.setattr(
            optional,
            "available",
            lambda _, spec="", version=version: version is not None and not spec,
        )
        with pytest.raises(MissingPackageError) as caught:
            import_engine()
        words = str(caught.value)
        assert f"strategy='{module}'" in words
        assert "\n" not in words
        if version is None:
            assert words.endswith(f"Run: pip install 'hasten[{module}]'")
        else:
            assert (
                f"{distribution} {version} is installed, but {distribution}{versions} is needed"
                in words
            )
            assert words.endswith(f"Run: pip install '{distribution}{versions}'")
