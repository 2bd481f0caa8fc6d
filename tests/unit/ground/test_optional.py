"""Optional packages: present and new enough, or an error that says what to install."""

from __future__ import annotations

import pytest

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
