"""Affinity: processes are pinned to the cores that the kernel lists beside their device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hasten.runtime.affinity import parse_cpus, set_affinity


def test_cpu_lists() -> None:
    assert parse_cpus("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpus("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus("a-b")


def fake_sys(folder: Path, cpus: str) -> Path:
    """A /sys with one device."""
    device = folder / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{cpus}\n")
    return folder


def test_a_process_is_pinned_to_the_cores_near_its_device(tmp_path: Path) -> None:
    initial_cores = os.sched_getaffinity(0)
    if len(initial_cores) < 2:
        pytest.skip("one core only")
    nearest = min(initial_cores)
    try:
        reason = set_affinity("0000:3B:00.0", fake_sys(tmp_path, str(nearest)))
        assert os.sched_getaffinity(0) == {nearest}
        assert (
            reason
            == f"pinned to 1 of {len(initial_cores)} cores, those near the device"
        )
    finally:
        os.sched_setaffinity(0, initial_cores)


@pytest.mark.parametrize("cpus", ["", "0-9999", "9999"])
def test_cores_are_left_alone_where_all_or_none_are_near(
    tmp_path: Path, cpus: str
) -> None:
    initial_cores = os.sched_getaffinity(0)
    assert "left as they are" in set_affinity("0000:3b:00.0", fake_sys(tmp_path, cpus))
    assert "left as they are" in set_affinity("0000:99:00.0", tmp_path)
    assert "left as they are" in set_affinity(None)
    assert os.sched_getaffinity(0) == initial_cores
