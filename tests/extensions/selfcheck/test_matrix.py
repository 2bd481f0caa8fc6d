"""`hasten test --matrix`: which cells there are and which are chosen; a real small selection is in tests/dist."""

from __future__ import annotations

import pytest

from hasten.errors import ConfigError
from hasten.extensions.selfcheck.command import main
from hasten.extensions.selfcheck.matrix import CELLS, select_cells


def test_every_strategy_of_hasten_is_a_cell() -> None:
    assert {cell.split("-")[0] for cell in CELLS} == {
        "single",
        "ddp",
        "fsdp2",
        "hsdp",
        "tp",
        "cp",
        "pp",
        "tp_fsdp2",
    }
    assert {cell.split("-")[1] for cell in CELLS} == {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("ddp-bf16", ["ddp-bf16"]),
        (
            "ddp,fsdp2",
            [
                f"{kind}-{word}"
                for kind in ("ddp", "fsdp2")
                for word in ("fp32", "bf16", "fp16")
            ],
        ),
        ("fp16", ["single-fp16", "ddp-fp16", "fsdp2-fp16"]),
        ("ddp-bf16, tp-fp32", ["ddp-bf16", "tp-fp32"]),
    ],
)
def test_only_takes_strategies_precisions_and_cells(
    only: str, names: list[str]
) -> None:
    assert select_cells(only) == names


@pytest.mark.parametrize("only", ["dpd", "", "ddp-fp8", ","])
def test_a_name_that_is_no_cell_is_refused(only: str) -> None:
    with pytest.raises(ConfigError, match="is no cell of the matrix"):
        select_cells(only)


def test_a_command_is_what_a_user_would_type() -> None:
    num_processes, flags = CELLS["fsdp2-bf16"]
    assert num_processes == 2
    assert flags == (
        "--num_processes",
        "2",
        "--mixed_precision",
        "bf16",
        "--strategy",
        "fsdp",
    )


def test_settings_beside_the_matrix_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="whose cells use fixed settings"):
        main(["--matrix", "--mixed_precision", "bf16"])
    with pytest.raises((ConfigError, SystemExit)):
        main(["--only", "ddp"])
