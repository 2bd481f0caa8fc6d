"""Whatever a file, a command line or a handoff holds, the answer is settings or a ConfigError: never a crash, never a hang."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.flags import SettingsParser
from hasten.config import files, handoff
from hasten.config.resolve import resolve
from hasten.config.schema import SETTABLE
from hasten.errors import ConfigError, ConfigFileError

SAMPLES: Final = sorted(
    path.read_text("utf-8")
    for path in (Path(__file__).parent / "accelerate").glob("*.yaml")
)
HASTEN_FILE: Final = (
    "schema: 1\nmixed_precision: bf16\nlaunch: {num_processes: 2, gpu_ids: [0, 1]}\n"
    "fsdp:\n  cpu_offload: true\n  transformer_cls_names_to_wrap: A,B\nprocess_group:\n  timeout: 30m\n"
)
BITS: Final = ("-1", "1e999", ".nan", "[", "]", "{", "}", ":", "\n", "\t", "'", '"', "&a ", "*a", "<<: ", "!!python/x ", "null", "é", "\0", "%", "? ", "| ", "9" * 5000)  # fmt: skip


def mutate_text(text: str, rng: random.Random) -> str:
    """Return a text with a few cuts, swaps and insertions."""
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:position] + text[position + rng.randint(1, 9) :]
            case 1:
                text = text[:position] + rng.choice(BITS) + text[position:]
            case 2:
                text = (
                    text[:position]
                    + rng.choice(string.printable)
                    + text[position + 1 :]
                )
            case _:
                lines = text.splitlines(keepends=True)
                rng.shuffle(lines)
                text = "".join(lines)
    return text


def test_mutated_files_end_in_settings_or_an_error() -> None:
    rng = random.Random(0)
    fine = 0
    for round_ in range(1500):
        text = mutate_text(rng.choice([*SAMPLES, HASTEN_FILE]), rng)
        try:
            file = files.read_text(text, Path("c.yaml"))
            resolve(file=file.entries, notes=file.notes)
            fine += 1
        except ConfigError as error:
            if not str(error):
                pytest.fail(f"round {round_}: an empty message for {text!r}")
    assert 0 < fine < 1500, "some mutations are harmless, most are not"


def test_mutated_values_of_every_flag_and_variable() -> None:
    rng = random.Random(1)
    parser = SettingsParser(prog="hasten")
    parser.add_settings()
    for info in SETTABLE:
        for value in rng.sample(BITS, 4):
            for is_flag in (True, False):
                try:
                    if is_flag:
                        resolve(
                            flags=parser.parse_args([f"--{info.flag}={value}"]).settings
                        )
                    else:
                        resolve(env={info.variable: value})
                except ConfigError as error:
                    if not str(error):
                        pytest.fail(f"an empty message for {info.name} = {value!r}")


def test_mutated_handoffs() -> None:
    rng = random.Random(2)
    file = files.read_text(HASTEN_FILE, Path("c.yaml"))
    packed = handoff.pack_settings(resolve(file=file.entries).entries)
    for _ in range(500):
        try:
            resolve(handed=handoff.unpack_settings(mutate_text(packed, rng)))
        except ConfigError as error:
            assert str(error)  # noqa: PT017 - both ends are right, a crash is not


def test_deep_and_wide_files_are_refused_quickly() -> None:
    with pytest.raises(ConfigFileError, match="nested too deeply"):
        files.read_text("[" * 1200, Path("c.yaml"))


def test_tags_run_nothing() -> None:
    text = "mixed_precision: !!python/object/apply:os.system ['true']\n"
    with pytest.raises(ConfigError, match="got a list"):
        resolve(file=files.read_text(text, Path("c.yaml")).entries)
