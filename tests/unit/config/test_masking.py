"""Credentials are masked by name and by look, wherever they are nested; names and texts that only resemble them are kept."""

from __future__ import annotations

import json
import random
import re
import string
import time
from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from hasten.config.masking import (
    NOT_SHOWN,
    masked,
    masked_tree,
    masked_value,
    secrecy_of,
)
from hasten.config.schema import SETTABLE
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.tracking.values import plain_config

SECRET_NAMES = re.findall(
    r"\S+",
    "api_key apiKey APIKey API_KEY apikey key token hf_token HFToken hftoken HASTEN_TOKEN auth password db_password dbpassword "
    "passwd MYSQL_PWD PGPASSWORD secret client_secret aws.secret credential credentials bearer cookie Set-Cookie private "
    "private_key ssh_key AWS_ACCESS_KEY_ID sentry_dsn credentials.value access_token tokens x-auth-token api_keys",
)
HARMLESS_NAMES = re.findall(
    r"\S+",
    "tokenizer tokenizer_name max_tokens num_keys key_dim author authors author_email num_key_value_heads eos_token pad_token_id "
    "key_padding_mask tokens_per_second keyboard monkey passes forward_passes compass signal design public_key sort_key kv_cache "
    "auth_timeout api_key_file token_type_ids max_new_tokens num_assistant_tokens prefetch_skip_keys lr betas token_embedding_dim",
)
LOOKS = (
    "hf_{}", "sk-{}", "sk-proj-{}", "ghp_{}", "github_pat_{}", "glpat-{}", "xoxb-{}", "AKIA{}", "npm_{}", "gsk_{}", "eyJ{0}.{0}.{0}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", "-----BEGIN PGP PRIVATE KEY BLOCK-----{}", "https://user:{}@host/x",
    "https://{}@host", "redis://:{}@host:1/0", "user:{}@host", "Bearer {}", "--api_key {}", "--password={}", "DefaultX;AccountKey={}",
)  # fmt: skip


def credential(draw: random.Random) -> str:
    """A random credential that is easy to find again."""
    return "7H" + "".join(draw.choices(string.ascii_uppercase + string.digits, k=30))


# Any: a nested config
def tree_with(draw: random.Random, name: str, value: Any) -> dict[str, Any]:
    """The named value somewhere in a random tree of mappings, lists, tuples, dataclasses and namespaces."""

    @dataclass
    class UserConfig:
        lr: float = 0.1
        nested_settings: dict[str, Any] = field(default_factory=dict)

    tree: Any = {name: value}
    for _ in range(draw.randrange(4)):
        tree = draw.choice(
            (lambda t: {"inner": t}, lambda t: {"list": [1, t]}, lambda t: {"tuple": (t, None)}, lambda t: {"data": UserConfig(nested_settings=t)})
        )(tree)  # fmt: skip
    return {"lr": 0.1, **tree}


@pytest.mark.parametrize("seed", range(5))
def test_the_value_of_a_secret_name_is_never_written(seed: int) -> None:
    draw = random.Random(seed)
    for name in SECRET_NAMES:
        for value in (
            secret := credential(draw),
            [secret],
            {"any": secret},
            secret.encode(),
        ):
            shown = repr(masked_tree(tree_with(draw, name, value)))
            assert secret not in shown, name
            assert NOT_SHOWN in shown
        assert secret not in masked(f"x {name}={secret} y")
        assert secret not in masked(f"{{'{name}': '{secret}'}}")
    assert masked_tree({"password": 12345, "api_key": 7, "token": 3}) == {
        "password": NOT_SHOWN,
        "api_key": NOT_SHOWN,
        "token": 3,
    }


@pytest.mark.parametrize("seed", range(5))
def test_what_looks_like_a_credential_is_masked_under_any_name(seed: int) -> None:
    draw = random.Random(seed)
    for look in LOOKS:
        secret = credential(draw)
        for name in ("note", "lr", "url", draw.choice(HARMLESS_NAMES)):
            shown = json.dumps(
                masked_tree(
                    plain_config(tree_with(draw, name, f"a {look.format(secret)} b"))
                )
            )
            assert secret not in shown, look
        assert secret not in repr(masked_tree({look.format(secret): 1})), (
            "also as a name"
        )
        assert secret not in repr(
            masked_tree(plain_config({"args": Namespace(url=look.format(secret))}))
        )


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_names_that_resemble_a_secret_one_keep_their_values(name: str) -> None:
    for value in (
        "bert-base-uncased",
        64,
        0.5,
        True,
        None,
        ["a", "b"],
        {"a": "b"},
        "</s>",
        "eval_loss",
    ):
        assert masked_tree({name: value}) == {name: value}
        assert masked_value(name, value) == value
    assert (
        masked(f"python train.py --{name} words --{name}=64")
        == f"python train.py --{name} words --{name}=64"
    )


def test_texts_that_resemble_a_credential_stay() -> None:
    for text in (
        "sk-learn-pipeline-name", "hf_dataset_name_of_mine", "git+https://github.com/a/b@main", "a token is a word", "the key to it",
        "s3://bucket/folder", "2026-01-01 12:30:00", "lr: 0.1, max_tokens: 512", "author: someone", "a:b:c", "name@host", "tcp://10.0.0.1:29500",
    ):  # fmt: skip
        assert masked(text) == text
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert masked_tree({"git_commit": commit, "sha256": commit}) == {
        "git_commit": commit,
        "sha256": commit,
    }
    assert masked_tree({"note": commit}) == {"note": "***"}


def test_no_setting_is_named_like_a_secret() -> None:
    assert not [info.name for info in SETTABLE if secrecy_of(info.path[-1]) != "open"]
    assert not [
        spec.name
        for spec in fields(TrainingArguments)
        if secrecy_of(spec.name) != "open"
    ]


def test_long_texts_take_no_long_time() -> None:
    """Each was quadratic once: seconds to minutes."""
    start_s = time.process_time()
    for piece in (
        "a",
        "key",
        "auth ",
        "x:",
        "a-",
        "a:b@",
        "eyJ-",
        "://",
        "key=",
        "sk-",
        "-----BEGIN PRIVATE KEY-----",
    ):
        masked(piece * (20_000 // len(piece)))
    assert time.process_time() - start_s < 10
