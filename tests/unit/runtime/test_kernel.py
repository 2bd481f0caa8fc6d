"""A warning of kernels on which jobs hang."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from hasten.runtime.bootstrap import warn_of_old_kernel


@pytest.mark.parametrize(
    ("release", "warns"),
    [
        ("4.18.0-513.el8.x86_64", True),
        ("5.4.0", True),
        ("5.5.0", False),
        ("6.8.0-31-generic", False),
        ("unknown", False),
    ],
)
def test_kernels_before_5_5_are_warned_of(
    release: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    with caplog.at_level(logging.WARNING, logger="hasten"):
        warn_of_old_kernel()
    assert [
        record for record in caplog.messages if release in record and "5.5.0" in record
    ] == caplog.messages
    assert bool(caplog.messages) == warns
