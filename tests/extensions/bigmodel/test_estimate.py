"""Estimates of memory against what models really hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hasten.checkpoint.export import save_model
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.extensions.bigmodel.estimate import estimate, of_model, shape_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            for _ in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(x)


def factory() -> Net:
    return Net()


def test_folders_and_factories_have_the_sizes_of_their_models(tmp_path: Path) -> None:
    model = Net()
    count = sum(p.numel() for p in model.parameters())
    largest = sum(p.numel() for p in model.layers[0].parameters())
    save_model(model.state_dict(), tmp_path, max_shard_size=3000)
    files, made = shape_of(str(tmp_path)), of_model(model, "net")
    assert (
        (files.num_parameters, files.largest)
        == (made.num_parameters, made.largest)
        == (count, largest)
    )
    found = estimate(files, "float32")
    assert found.weights == count * 4
    assert found.total == count * 16
    assert estimate(files, "int4").weights == count // 2
    assert (
        estimate(files, "bfloat16", "sgd", sharded=4).total
        == count * 4 // 4 * 2 + 2 * largest * 2
    )


def test_strategies_divide_what_processes_share() -> None:
    """Weights, gradients and two states of Adam in fp32: a process holds its share of what the strategy divides."""
    shape = of_model(Net(), "net", [(1, 4)])
    whole = shape.num_parameters * 4
    assert shape.activation_numbers is not None
    kept = shape.activation_numbers * 4
    divided = {"ddp": 0, "zero1": 2, "zero2": 3, "fsdp2": 4}
    for processes in (1, 4):
        for strategy, number in divided.items():
            found = estimate(
                shape,
                "float32",
                sharded=processes,
                strategy=strategy,
                device_bytes=10**7,
            )
            whole_blocks = (
                2 * shape.largest * 4 if strategy == "fsdp2" and processes > 1 else 0
            )
            held = whole * (4 - number) + whole // processes * number + whole_blocks
            assert found.total == held + kept, (strategy, processes)
            assert found.largest_batch == (10**7 - held) // kept
    with pytest.raises(ConfigError, match="strategies ddp, zero1"):
        estimate(shape, "float32", strategy="zero9")


def test_folders_of_transformers_are_traced_and_need_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.BertConfig(
        vocab_size=32, max_position_embeddings=32, architectures=["BertModel"], **sizes
    )
    config.save_pretrained(tmp_path / "config-only")
    model = transformers.BertModel(config)
    found = shape_of(str(tmp_path / "config-only"), [(1, 8)])
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.activation_numbers
    words = [
        "estimate-memory",
        str(tmp_path / "config-only"),
        "--num_processes",
        "4",
        "--dtypes",
        "bfloat16",
        "--json",
    ]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["estimates"]
    assert [row["strategy"] for row in rows] == ["ddp", "zero1", "zero2", "fsdp2"]
    assert sorted((row["total"] for row in rows), reverse=True) == [
        row["total"] for row in rows
    ]
    save_model(Net().state_dict(), tmp_path / "weights")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        shape_of(str(tmp_path / "weights"), [(1, 8)])


def test_activations_are_those_autograd_keeps() -> None:
    rows, length = 2, 5
    shape = of_model(Net(), "net", [(rows, length)])
    # per token: the ids, and in each layer the input of both linears and the output of the ReLU (one of them twice)
    kept = length * (1 + 3 * (16 + 64))
    assert shape.activation_numbers == kept
    found = estimate(shape, "float32", batch=3, device_bytes=10**7)
    assert found.activations == kept * 4 * 3
    assert found.largest_batch == (10**7 - shape.num_parameters * 16) // (kept * 4)


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(Net().state_dict(), tmp_path / "model")
    assert (
        main(["estimate-memory", str(tmp_path / "model"), "--json", "--dtypes", "int8"])
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    assert row["weights"] == sum(p.numel() for p in Net().parameters())
    (tmp_path / "big_net_factory.py").write_text(
        "from torch import nn\ndef make(): return nn.Linear(10, 10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert (
        main(["estimate-memory", "big_net_factory:make", "--device_memory", "1GB"]) == 0
    )
    assert "110 parameters" in capsys.readouterr().out
    assert main(["estimate-memory", "big_net_factory:nothing"]) == 2
    assert "cannot be built" in capsys.readouterr().err


def test_what_cannot_be_estimated_is_said() -> None:
    with pytest.raises(ConfigError, match="dtypes are float32"):
        estimate(of_model(Net(), "net"), "float13")
