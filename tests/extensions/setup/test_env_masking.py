"""`hasten env` is pasted into issues: no credential in any value it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.config.masking import masked, secrecy_of

SECRETS = (
    "http://user:hunter2@proxy:3128",
    "tcp://user:hun@ter2/x@10.0.0.1:29500",
    "user:hunter2@10.0.0.1",
    "https://hunter2hunter2@git.example/x",
    "postgresql+psycopg://u:hunter2@db/x?sslmode=require",
    "api_key=hunter2",
    "a=1&access_token=hunter2&b=2",
    "{'wandb': {'api_key': 'hunter2'}}",
    '{"password": "hunter2 with spaces"}',
    "X-Auth: hunter2",
    "Authorization: Bearer hunter2hunter2",
    "bearer hunter2hunter2",
    "hf_hunter2hunter2hunter2",
    "sk-hunter2hunter2hunter2",
    "AKIAHUNTER2HUNTER2HU",
    "eyJhunter2hunter2.hunter2hunter2.hunter2",
    "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    "0123456789abcdef0123456789abcdef01234567",
)
HARMLESS = (
    "10.0.0.1:29500",
    "node[01-04]",
    "/home/user/.venv",
    "0,1,2,3",
    "2.13.0+cpu",
    "max_split_size_mb:128,expandable_segments:True",
    "Linux-6.1.0-amd64-x86_64-with-glibc2.36",
    "tokenizer: bert",
    "user@host",
    "SHARDED_STATE_DICT (config.yaml:12)",
    "lo",
    "12:30:00",
    "[::1]:29500",
)


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_are_masked_wherever_they_stand(text: str) -> None:
    for around in ("{}", "value {} end", "({})", "x {}\ny", "'{}'"):
        shown = masked(around.format(text))
        assert "unter2" not in shown, shown
        assert "HUNTER2" not in shown
        assert "0123456789abcdef" not in shown
        assert "***" in shown


@pytest.mark.parametrize("text", HARMLESS)
def test_the_rest_stays(text: str) -> None:
    assert masked(text) == text


def test_secret_names() -> None:
    for name in (
        "HASTEN_TOKEN",
        "WANDB_API_KEY",
        "db_password",
        "aws.secret",
        "NCCL_AUTH",
        "HTTP_COOKIE",
    ):
        assert secrecy_of(name) != "open"
    for name in (
        "MASTER_ADDR",
        "NCCL_DEBUG",
        "fsdp.cpu_offload",
        "TOKENIZERS_PARALLELISM",
    ):
        assert secrecy_of(name) == "open"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_secret_in_the_report(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    for name, value in {
        "MASTER_ADDR": "user:hunter2@10.0.0.1",
        "NCCL_SOCKET_IFNAME": "http://u:hunter2@proxy",
        "TORCH_EXTRA_NOTE": "token=hunter2",
        "HASTEN_TOKEN": "hunter2hunter2hunter2",
        "SLURM_JOB_COMMENT": "hf_hunter2hunter2hunter2",
        "HASTEN_RDZV_ENDPOINT": "u:hunter2@10.0.0.1:29500",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.yaml").write_text(
        "schema: 1\nproject:\n  logging_dir: s3://id:hunter2@bucket/x\nlaunch:\n  submit_options: {comment: 'password=hunter2'}\n"
    )
    assert main(["env", *flags]) == 0
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert "10.0.0.1" in printed
    assert printed.count("***") >= 6
    if flags:
        assert json.loads(printed)["variables"]["HASTEN_TOKEN"] == "(set, not shown)"
    # an error that quotes the value
    (tmp_path / "config.yaml").write_text("mixed_precision: 'http://u:hunter2@x'\n")
    assert main(["env", *flags]) == 0
    assert "hunter2" not in capsys.readouterr().out
