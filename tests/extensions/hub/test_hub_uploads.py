"""Uploads and downloads with the real Hub client over HTTP: shards, parts, resumed uploads, cards, and tokens that stay secret."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.errors import ArgumentError, HubError
from hasten.extensions.hub.client import HubRepository, mask_secrets, parse_address
from hasten.extensions.hub.model_card import GENERATED_MARK, CardContent, model_card
from tests.support.hub_server import TOKEN, Hub, client_at, environment, serving

hub_client = pytest.importorskip("huggingface_hub")
NAME: Final = "someone/tiny"
SHARD: Final = "2KB"


def net(seed: int = 0, depth: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with (
        serving() as served_hub,
        client_at(served_hub.address, str(tmp_path / "cache")),
    ):
        yield served_hub
    assert not served_hub.unknown, served_hub.unknown


def push(model: nn.Module, **options: object) -> str | None:
    settings = {"token": TOKEN, "max_shard_size": SHARD, **options}
    return Accelerator(cpu=True).push_to_hub(model, NAME, **settings)  # type: ignore[arg-type]


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_shards_arrive_in_parts_and_load_back(hub: Hub) -> None:
    hub.part_size = 500
    address = push(net(), metrics={"accuracy": 0.875}, commit_message="first")
    assert (
        address
        == f"{hub.address}/{NAME}/commit/{hub.repositories[NAME].head('main').oid}"
    )
    assert hub.messages(NAME) == ["first"]
    assert sum(name.startswith("model-0000") for name in hub.files(NAME)) == 4
    assert set(hub.received.values()) == {1}
    assert len(hub.received) == 12, "three parts of each of four files"
    fresh = net(1)
    Accelerator(cpu=True).load_model(fresh, f"hf://{NAME}")
    assert equal(fresh, net())
    card = hub_client.ModelCard(hub.files(NAME)["README.md"].decode())
    assert "| accuracy | 0.875 |" in card.text


def test_models_of_transformers_load_from_the_hub(hub: Hub) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    push(model, max_shard_size="3KB")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(NAME)
    assert equal(loaded, model)
    assert "library_name: transformers" in hub.files(NAME)["README.md"].decode()


def test_fewer_files_replace_the_old_ones(hub: Hub) -> None:
    push(net())
    push(net(), max_shard_size="1GB")
    assert [name for name in hub.files(NAME) if name.startswith("model")] == [
        "model.safetensors"
    ]


def test_a_branch_of_its_own(hub: Hub) -> None:
    push(net(), revision="trial")
    assert hub.messages(NAME) == []
    fresh = net(1)
    Accelerator(cpu=True).load_model(fresh, f"hf://{NAME}@trial")
    assert equal(fresh, net())
    with pytest.raises(HubError, match=r"no weights.*give the name"):
        Accelerator(cpu=True).load_model(fresh, f"hf://{NAME}")


def test_a_refused_upload_changes_nothing_and_is_resumed(hub: Hub) -> None:
    hub.refuse_after = 2
    with pytest.raises(HubError, match=r"has expired.*previous commit"):
        push(net())
    assert hub.messages(NAME) == []
    assert 0 < len(hub.received) <= 2
    arrived = set(hub.received)
    hub.refuse_after = None
    push(net())
    assert len(hub.received) == 4
    assert all(hub.received[oid] == 1 for oid in arrived), (
        "objects that had arrived were sent again"
    )


KILLED: Final = """
import sys
from hasten import Accelerator
from tests.extensions.hub.test_hub_uploads import NAME, SHARD, net
Accelerator(cpu=True).push_to_hub(net(), NAME, token=sys.argv[1], max_shard_size=SHARD)
"""


def test_a_killed_upload_is_resumed(hub: Hub, tmp_path: Path) -> None:
    hub.before_gate = 2
    env = {**os.environ, **environment(hub.address, str(tmp_path / "home"))}
    with subprocess.Popen([sys.executable, "-c", KILLED, TOKEN], env=env) as running:
        while hub.num_uploads < 4:  # two have arrived, two are on their way
            assert running.poll() is None, "the upload ended by itself"
            hub.gate.wait(0.02)
        running.send_signal(signal.SIGKILL)
    assert hub.messages(NAME) == []
    assert len(hub.received) == 2
    arrived = set(hub.received)
    hub.before_gate = None
    hub.gate.set()  # what was on its way is answered, to nobody
    push(net())
    assert len(hub.received) == 4
    assert all(hub.received[oid] == 1 for oid in arrived)


def test_a_broken_download_continues_where_it_broke(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bytes that the client writes at a time
    monkeypatch.setattr(hub_client.constants, "DOWNLOAD_CHUNK_SIZE", 512)
    push(net(), max_shard_size="1GB")
    hub.ranges.clear()
    hub.breaks_after = 700
    fresh = net(1)
    Accelerator(cpu=True).load_model(fresh, f"hf://{NAME}")
    assert equal(fresh, net())
    assert [
        byte_range for byte_range in hub.ranges if byte_range.startswith("bytes=512-")
    ], "the whole file was sent again"


def test_cards_edited_by_hand_are_not_replaced(hub: Hub) -> None:
    push(net(), metrics={"loss": 1.0})
    push(net(), metrics={"loss": 0.5})
    assert b"| loss | 0.5 |" in hub.files(NAME)["README.md"]
    head = hub.repositories[NAME].head("main")
    head.files["README.md"] = b"# My own text"
    push(net(1), metrics={"loss": 0.25})
    assert hub.files(NAME)["README.md"] == b"# My own text"


def test_tokens_reach_no_error_and_no_log(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repeats_token = True
    wrong = "plain-text-that-looks-like-no-token"
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path / "run"))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(HubError, match="hf auth login") as caught,
    ):
        accelerator.push_to_hub(net(), NAME, token=wrong)
    with caplog.at_level(logging.DEBUG):
        accelerator.push_to_hub(net(), NAME, token=wrong, blocking=False)
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(HubError, match="hf auth login") as later,
    ):
        accelerator.end_training()
    shown = [caplog.text]
    for error in (caught.value, later.value):
        assert error.__cause__ is None
        assert error.__context__ is None
        shown += traceback.format_exception(error)
    assert "invalid credentials" in shown[-1]
    assert not [text for text in shown if wrong in text]
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and wrong.encode() in path.read_bytes()
    ]
    assert wrong not in repr(HubRepository(NAME, wrong))
    assert (
        mask_secrets(f"Bearer {TOKEN} at http://me:word@host", [wrong])
        == "Bearer *** at http://***@host"
    )


@pytest.mark.parametrize(
    "address", ["hf://tiny", "someone/tiny", "hf:///tiny", "hf://a/b/c"]
)
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ArgumentError, match="write hf://owner/name"):
        parse_address(address)


@pytest.mark.parametrize(
    ("repo_id", "options", "match"),
    [
        (NAME, {"visibility": "private"}, "the options are"),
        ("hf://a/b", {}, "give 'owner/name'"),
        ("", {}, "owner/name"),
    ],
)
def test_wrong_arguments(repo_id: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Accelerator(cpu=True).push_to_hub(net(), repo_id, **options)  # type: ignore[arg-type]


def test_a_card_holds_the_numbers_of_the_run() -> None:
    text = model_card(
        CardContent(
            name="a/b", metrics={"loss": 0.25, "api_key": "abc", "note": "x | y"}
        )
    )
    assert GENERATED_MARK in text
    assert "| loss | 0.25 |" in text
    assert "abc" not in text
    assert "x \\| y" in text
