"""Every value that `hasten tune` may try runs in a real trial on a CPU, as far as a CPU has it, and trains to the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hasten.extensions.planning.tune.tuning import (
    HALF_PRECISION_TOLERANCE,
    SAME_PRECISION_TOLERANCE,
    TrialOutcome,
    largest_loss_difference,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(310)]

SCRIPT = Path(__file__).with_name("trained.py")
UPDATES, WARM_UP = 6, 3
SINGLE_CHANGES: tuple[
    tuple[dict[str, Any], float], ...
] = (  # Any: numbers, names and flags
    ({"num_workers": 2}, SAME_PRECISION_TOLERANCE),
    ({"prefetch": 0}, SAME_PRECISION_TOLERANCE),
    ({"prefetch": 4}, SAME_PRECISION_TOLERANCE),
    ({"fused": True}, SAME_PRECISION_TOLERANCE),
    ({"channels_last": True}, SAME_PRECISION_TOLERANCE),
    ({"mixed_precision": "bf16"}, HALF_PRECISION_TOLERANCE),
    ({"tf32": True}, HALF_PRECISION_TOLERANCE),
    ({"step_graph": True}, SAME_PRECISION_TOLERANCE),
    ({"compile": "regional"}, SAME_PRECISION_TOLERANCE),
    ({"compile": "whole"}, SAME_PRECISION_TOLERANCE),
    (
        {"fused": True, "compile": "regional", "num_workers": 1},
        SAME_PRECISION_TOLERANCE,
    ),
)


def tried(values: dict[str, Any], folder: Path) -> TrialOutcome:
    """What a trial with these values measures."""
    spec_file, result = folder / "spec.json", folder / "result.json"
    spec = {
        "values": values,
        "result": str(result),
        "warmup": WARM_UP,
        "updates": UPDATES,
    }
    spec_file.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", "hasten.extensions.planning.tune.trial"]
    done = subprocess.run(
        [*command, str(spec_file), str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert result.is_file(), done.stderr
    return msgspec.json.decode(result.read_bytes(), type=TrialOutcome)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrialOutcome:
    """The script as it is."""
    return tried({}, tmp_path_factory.mktemp("base"))


def test_the_script_as_it_is(base: TrialOutcome) -> None:
    assert not base.error
    assert len(base.losses) == WARM_UP + UPDATES + 1
    assert (base.convolutions, base.captures_step, base.precision) == (True, True, "no")
    assert base.step_s > 0


@pytest.mark.parametrize(
    ("values", "tolerance"), SINGLE_CHANGES, ids=lambda value: str(value)
)
def test_a_value_trains_to_the_same_losses(
    values: dict[str, Any], tolerance: float, base: TrialOutcome, tmp_path: Path
) -> None:
    outcome = tried(values, tmp_path)
    assert not outcome.error
    assert len(outcome.losses) == len(base.losses)
    assert largest_loss_difference(base.losses, outcome.losses) <= tolerance
    assert not (tmp_path / "must_not_be_there").exists()
