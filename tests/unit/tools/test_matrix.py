"""`hasten test --matrix`: which cells there are and which are chosen; a real small selection is in tests/dist."""

from __future__ import annotations

import pytest

from hasten.cli.test_cmd import main
from hasten.errors import ConfigError
from hasten.tools.matrix import cells, chosen, last_words


def test_every_backend_and_precision_is_a_cell_once() -> None:
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names)
    assert {cell.backend for cell in cells()} == {
        *("single", "ddp", "fsdp2", "hsdp", "tp", "cp", "pp", "tp_fsdp2"),
        *("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
        *("xla", "xla_fsdp"),
    }
    assert {cell.precision for cell in cells()} == {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("ddp-bf16", ["ddp-bf16"]),
        ("ddp,fsdp2", [f"{kind}-{word}" for kind in ("ddp", "fsdp2") for word in ("fp32", "bf16", "fp16")]),
        ("pp, bf16", ["pp-bf16"]),
        ("fp16", ["single-fp16", "ddp-fp16", "fsdp2-fp16"]),
        ("ddp,bf16,tp-fp32", ["ddp-bf16", "tp-fp32"]),
    ],
)
def test_only_takes_backends_precisions_and_cells(only: str, names: list[str]) -> None:
    assert [cell.name for cell in chosen(only)] == names


@pytest.mark.parametrize("only", ["dpd", "", "ddp-fp8", ","])
def test_a_name_that_is_no_cell_is_refused(only: str) -> None:
    with pytest.raises(ConfigError, match="matches no cell of the matrix"):
        chosen(only)


def test_a_machine_without_enough_devices_leaves_cells_out() -> None:
    (hsdp,) = chosen("hsdp-fp32")
    assert hsdp.missing(2) == "needs 4 devices, 2 here"
    assert not hsdp.missing(None)


def test_a_command_is_what_a_user_would_type() -> None:
    (cell,) = chosen("fsdp2-bf16")
    expected = "--cpu --num_processes 2 --mixed_precision bf16 --strategy fsdp -m hasten.testing.selfcheck"
    assert cell.command(cpu=True) == tuple(expected.split())


def test_the_line_that_names_the_cause_is_shown() -> None:
    assert last_words("a\nValueError: no\nbye\n") == "ValueError: no"
    assert last_words("passed x\nFAILED  training     rank 0: far\nValueError: no\n").startswith("FAILED  training")


def test_settings_beside_the_matrix_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="whose cells use fixed settings"):
        main(["--matrix", "--mixed_precision", "bf16"])
    with pytest.raises((ConfigError, SystemExit)):
        main(["--only", "ddp"])
