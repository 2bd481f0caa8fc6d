"""Token of a job: passed by the launcher, else a secret of the user that all ranks can read. Does not import torch."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from hasten.errors import ConfigError
from hasten.runtime import env as environment

TOKEN: Final = "HASTEN_TOKEN"
"""The job's token, the same text on every rank; set by a launcher or by the user."""

_MIN_TOKEN_CHARS: Final = 16
_FILE: Final = "secret"
_MAX_SECRET_BYTES: Final = 1024


def job_token(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives every rank of a new job the same random token; an existing token is reused."""
    return {TOKEN: env.get(TOKEN) or secrets.token_hex(32)}


def read_token(env: Mapping[str, str]) -> bytes | None:
    """Return the token of this job, or None.

    Raises: ConfigError for a token that is too short.
    """
    token = env.get(TOKEN, "")
    if not token:
        return None
    if len(token) < _MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{TOKEN} has {len(token)} characters, so it can be guessed by trying; use {_MIN_TOKEN_CHARS} or more random ones, such as "
            f"the output of `openssl rand -hex 32`."
        )
    return token.encode()


def user_secret(env: Mapping[str, str]) -> bytes | None:
    """Return the secret in the user's folder, created on first use; None if the folder cannot be used.

    Processes of one user on one machine, or on machines that share the home folder, get the same secret.
    Raises: ConfigError for a file that others can read or that is not the user's.
    """
    secret_path = environment.home(env) / _FILE
    # a home folder that is not writable: an existing secret is still used
    with suppress(OSError):
        _create_secret(secret_path)
    try:
        descriptor = os.open(
            secret_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    # no secret: the caller continues without one, and reports the consequences
    except OSError:
        return None
    try:
        _check_private(secret_path, os.fstat(descriptor))
        return os.read(descriptor, _MAX_SECRET_BYTES) or None
    finally:
        os.close(descriptor)


def _create_secret(secret_path: Path) -> None:
    """Write a new secret unless there is one; of several concurrent writers, exactly one succeeds."""
    if secret_path.exists():
        return
    secret_path.parent.mkdir(parents=True, exist_ok=True)
    draft_path = secret_path.with_name(f".{_FILE}-{secrets.token_hex(8)}")
    descriptor = os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(32).encode())
        os.fsync(descriptor)
        with suppress(FileExistsError):
            secret_path.hardlink_to(draft_path)
    finally:
        os.close(descriptor)
        draft_path.unlink()


def _check_private(secret_path: Path, file_status: os.stat_result) -> None:
    if (
        stat.S_ISREG(file_status.st_mode)
        and file_status.st_uid == os.getuid()
        and not file_status.st_mode & 0o077
    ):
        return
    raise ConfigError(
        f"{secret_path} must be a file of your own that nobody else can read (it has mode {file_status.st_mode & 0o777:03o}, owner "
        f"{file_status.st_uid}), because it proves who belongs to your jobs; remove it, and a new one is made."
    )
