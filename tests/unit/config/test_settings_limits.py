"""Settings files that are none: devices, pipes, folders, too large, too deep, too many keys; each one sentence, at once."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.main import main
from hasten.config import files
from hasten.config import files as yaml_text
from hasten.errors import ConfigError, ConfigFileError

SIZE: Final = files.MAX_FILE_BYTES
PATIENCE_S: Final = 20.0  # the old code took minutes, or forever


def assert_refused(path: Path, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigFileError, match=words) as caught:
        files.read(path)
    assert time.monotonic() - started < PATIENCE_S
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_not_a_regular_file_is_refused_unread(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert_refused(pipe, "is no regular file")
    assert_refused(Path("/dev/zero"), "is no regular file")
    assert_refused(Path("/dev/null"), "is no regular file")
    assert_refused(tmp_path, "is no regular file")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.yaml"))
        assert_refused(tmp_path / "socket.yaml", "is no regular file")
    link = tmp_path / "link.yaml"
    link.symlink_to("/dev/zero")
    assert_refused(link, "is no regular file")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        files.read("nul\0.yaml")


def test_a_file_larger_than_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    for text in (
        "#" * (SIZE + 1),
        "".join(f"key_{i}: {i}\n" for i in range(SIZE // 8)),
    ):
        path.write_text(text)
        assert_refused(path, f"bytes, more than the {SIZE} that settings may have")
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole of a tebibyte
    assert_refused(path, f"has {1 << 40} bytes")
    path.write_text("mixed_precision: bf16\n" + "#" * (SIZE - 22))
    assert len(files.read(path).entries) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * SIZE,
        "- " * (SIZE // 2),
        "{a: " * (SIZE // 4),
        "a:\n" + "".join(" " * i + "a:\n" for i in range(1, 700)),
    ],
)
def test_deep_nesting_is_an_error_and_no_crash(text: str) -> None:
    with pytest.raises(ConfigFileError, match="nested too deeply"):
        yaml_text.parse_yaml(text, "c.yaml")


def test_many_keys_do_not_take_long() -> None:
    keys = "".join(f"key_{i}: {i}\n" for i in range(3_000))
    nested = "".join(f"  key_{i}: {i}\n" for i in range(3_000))
    for text in (
        keys,
        f"compute_environment: LOCAL_MACHINE\n{keys}",
        f"launch:\n{nested}",
        f"distributed_type: FSDP\nfsdp_config:\n{nested}",
    ):
        started = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            files.read_text(text, Path("c.yaml"))
        assert time.monotonic() - started < PATIENCE_S
        assert len(caught.value.problems) == 3_000
        assert "… and 2950 more" in str(caught.value)
        assert len(str(caught.value)) < 20_000


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("")
    code = main(["launch", "--config_file=/dev/zero", str(tmp_path / "script.py")])
    error_output = capsys.readouterr().err
    assert code == 2
    assert error_output.count("\n") == 1
    assert "/dev/zero is no regular file" in error_output
