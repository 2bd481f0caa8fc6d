"""The job's token: who gives it, and a secret file that nobody else can read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.runtime import secret


def test_a_given_token_wins_and_a_short_one_is_refused() -> None:
    assert secret.read_token({}) is None
    assert secret.read_token({"HASTEN_TOKEN": ""}) is None
    assert secret.read_token({"HASTEN_TOKEN": "x" * 16}) == b"x" * 16
    with pytest.raises(ConfigError, match="has 3 characters") as caught:
        secret.read_token({"HASTEN_TOKEN": "abc"})
    assert "abc" not in str(caught.value)


def test_jobs_get_tokens_of_their_own() -> None:
    first_token, second_token = secret.job_token({}), secret.job_token({})
    assert first_token != second_token
    assert len(first_token["HASTEN_TOKEN"]) == 64
    assert secret.job_token({"HASTEN_TOKEN": "given"}) == {"HASTEN_TOKEN": "given"}


def test_many_processes_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    env = {"HASTEN_HOME": str(tmp_path / "new" / "home")}
    read_secrets: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: read_secrets.append(secret.user_secret(env)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(read_secrets)) == 1
    assert read_secrets[0] is not None
    assert len(read_secrets[0]) == 64
    home = tmp_path / "new" / "home"
    assert [path.name for path in home.iterdir()] == ["secret"]
    assert (home / "secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_can_read_or_that_is_no_file_is_refused(
    tmp_path: Path,
) -> None:
    env = {"HASTEN_HOME": str(tmp_path)}
    path = tmp_path / "secret"
    path.write_text("x" * 64)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"nobody else can read .*mode 644"):
        secret.user_secret(env)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError):  # and no waiting for a writer
        secret.user_secret(env)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert secret.user_secret(env) is None


def test_without_a_place_there_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert secret.user_secret({"HASTEN_HOME": str(tmp_path / "file" / "home")}) is None
