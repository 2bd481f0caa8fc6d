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
from hasten.extensions.bigmodel.estimate import (
    estimate_memory,
    shape_of,
    shape_of_model,
)


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
    files, model_shape = shape_of(str(tmp_path)), shape_of_model(model, "net")
    assert (
        (files.num_parameters, files.largest)
        == (model_shape.num_parameters, model_shape.largest)
        == (count, largest)
    )
    estimate = estimate_memory(files, "float32")
    assert estimate.weights == count * 4
    assert estimate.training == count * 16
    assert estimate_memory(files, "int4").weights == count // 2
    assert estimate_memory(files, "bfloat16", "sgd").training == count * 8


def test_folders_of_transformers_need_no_weights(tmp_path: Path) -> None:
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
    shape = shape_of(str(tmp_path / "config-only"))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


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
    assert main(["estimate-memory", "big_net_factory:make"]) == 0
    assert "110 parameters" in capsys.readouterr().out
    assert main(["estimate-memory", "big_net_factory:nothing"]) == 2
    assert "cannot be built" in capsys.readouterr().err


def test_what_cannot_be_estimated_is_said() -> None:
    with pytest.raises(ConfigError, match="dtypes are float32"):
        estimate_memory(shape_of_model(Net(), "net"), "float13")
