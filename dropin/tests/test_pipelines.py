"""Eight everyday pipelines of transformers with device_map="auto", most of the model on the disk: the outputs of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.optional import available

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not available("transformers"), reason="transformers is not installed"
    ),
]
# Any in this file: models, inputs and outputs of another library.

WORDS = [
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "one",
    "two",
    "three",
    "good",
    "bad",
    "film",
    "this",
    "was",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def tokenizer(folder: Path) -> None:
    """Words to numbers, in the files a pipeline looks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    words = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
            SPECIAL,
            strict=True,
        )
    )
    build(tokenizer_object=words, **names).save_pretrained(folder)


def bert(kind: str, **settings: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import transformers

        config = transformers.BertConfig(
            vocab_size=32, max_position_embeddings=32, **SIZES, **settings
        )
        getattr(transformers, kind)(config).save_pretrained(
            folder, max_shard_size="8KB"
        )
        tokenizer(folder)

    return build


def gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    build: Any = GPT2LMHeadModel
    special_tokens: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3}
    build(
        GPT2Config(
            n_embd=16,
            n_layer=3,
            n_head=2,
            vocab_size=32,
            n_positions=32,
            **special_tokens,
        )
    ).save_pretrained(folder)
    tokenizer(folder)


def vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    build: Any = ViTForImageClassification
    build(ViTConfig(image_size=16, patch_size=4, **SIZES)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)


def wav2vec2(folder: Path) -> None:
    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForSequenceClassification,
    )

    build: Any = Wav2Vec2ForSequenceClassification
    convolutions: dict[str, Any] = {
        "conv_dim": (8, 8),
        "conv_stride": (4, 4),
        "conv_kernel": (4, 4),
        "num_feat_extract_layers": 2,
    }
    positions: dict[str, Any] = {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "feat_extract_norm": "layer",
    }
    build(
        Wav2Vec2Config(vocab_size=16, **SIZES, **convolutions, **positions)
    ).save_pretrained(folder)
    hear: Any = Wav2Vec2FeatureExtractor
    hear(return_attention_mask=False).save_pretrained(folder)


def picture() -> Any:
    from PIL import Image

    return Image.frombytes(
        "RGB", (16, 16), bytes(i * 37 % 256 for i in range(16 * 16 * 3))
    )


def sound() -> Any:
    return torch.linspace(-1, 1, 800).sin().numpy()


ENTAILMENT: dict[str, Any] = {
    "num_labels": 2,
    "label2id": {"contradiction": 0, "entailment": 1},
    "id2label": {0: "contradiction", 1: "entailment"},
}
TASKS: dict[str, tuple[Callable[[Path], None], Callable[[], Any], dict[str, Any]]] = {
    "text-classification": (
        bert("BertForSequenceClassification"),
        lambda: "this was a good film",
        {},
    ),
    "token-classification": (
        bert("BertForTokenClassification"),
        lambda: "this was a good film",
        {},
    ),
    "fill-mask": (bert("BertForMaskedLM"), lambda: "this was a [MASK] film", {}),
    "feature-extraction": (bert("BertModel"), lambda: "this was a good film", {}),
    "zero-shot-classification": (
        bert("BertForSequenceClassification", **ENTAILMENT),
        lambda: "this was a good film",
        {"candidate_labels": ["good", "bad"]},
    ),
    "text-generation": (
        gpt2,
        lambda: "this was a",
        {"max_new_tokens": 4, "do_sample": False},
    ),
    "image-classification": (vit, picture, {}),
    "audio-classification": (wav2vec2, sound, {}),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_with_parts_on_the_disk_answers_as_the_whole_model(
    task: str, tmp_path: Path
) -> None:
    from transformers import pipeline

    from accelerate.hooks import remove_hook_from_submodules

    build, make_inputs, options = TASKS[task]
    torch.manual_seed(0)
    build(tmp_path / "model")
    make: Any = pipeline
    plain = make(task, model=str(tmp_path / "model"), device="cpu")
    size = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    settings = {
        "max_memory": {"cpu": size // 2},
        "offload_folder": str(tmp_path / "off"),
    }
    placed = make(
        task, model=str(tmp_path / "model"), device_map="auto", model_kwargs=settings
    )
    assert "disk" in placed.model.hf_device_map.values()
    for _ in range(2):
        assert placed(make_inputs(), **options) == plain(make_inputs(), **options)
    remove_hook_from_submodules(placed.model)
