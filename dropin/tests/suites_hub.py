"""Fabricate a Hub cache of tiny random models under the names that clients' test suites load: suites_hub.py FOLDER"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from datasets.info import DatasetInfo
from datasets.splits import SplitDict, SplitInfo
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

# Any in this file: classes of other libraries, which are untyped.
transformers: Any = import_module("transformers")
sentences: Any = import_module("sentence_transformers")
models: Any = import_module("sentence_transformers.models")
TESTS_FOLDER: Final = Path(__file__).parent
REVISION: Final = "0123456789abcdef0123456789abcdef01234567"
SPECIAL: Final = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
VOCABULARY: Final = 1024
NARROW: Final = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: Final = {
    **NARROW,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
}
GROUPED: Final = {**SMALL, "num_key_value_heads": 2}
EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GPT2: Final = {**NARROW, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 512}
BART: Final = {
    **NARROW,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 4,
    "decoder_ffn_dim": 4,
    "decoder_start_token_id": 2,
}
T5: Final = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
OPT: Final = {**SMALL, "ffn_dim": 4, "word_embed_proj_dim": 16}
# Names on the Hub, their model's class, and its configuration.
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "facebook/opt-125m": ("OPTForCausalLM", OPT),
    "facebook/opt-350m": ("OPTForCausalLM", OPT),
    "hf-internal-testing/Mixtral-tiny": (
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4},
    ),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "hf-internal-testing/tiny-random-MistralForCausalLM": (
        "MistralForCausalLM",
        GROUPED,
    ),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    "openai-community/gpt2": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", OPT),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", GROUPED),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": (
        "BartForConditionalGeneration",
        BART,
    ),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification",
        SMALL,
    ),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", SMALL),
    "peft-internal-testing/tiny-random-BloomForCausalLM": (
        "BloomForCausalLM",
        {**SMALL, "n_head": 4, "n_layer": 2},
    ),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", SMALL),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", SMALL),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": (
        "GPTNeoXForCausalLM",
        SMALL,
    ),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": (
        "GPTJForCausalLM",
        {**GPT2, "rotary_dim": 4},
    ),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", OPT),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        SMALL,
    ),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", SMALL),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": (
        "T5ForConditionalGeneration",
        T5,
    ),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": (
        "T5ForConditionalGeneration",
        T5,
    ),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    "trl-internal-testing/small-Qwen2ForCausalLM-2.5": (
        "Qwen2ForCausalLM",
        {**GROUPED, "hidden_size": 32},
    ),
    "trl-internal-testing/tiny-BloomForCausalLM": (
        "BloomForCausalLM",
        {**SMALL, "n_head": 4, "n_layer": 2},
    ),
    "trl-internal-testing/tiny-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT2),
    "trl-internal-testing/tiny-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", SMALL),
    "trl-internal-testing/tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", GROUPED),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        GROUPED,
    ),
    "trl-internal-testing/tiny-MistralForCausalLM-0.1": ("MistralForCausalLM", GROUPED),
    "trl-internal-testing/tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", GROUPED),
    "trl-internal-testing/tiny-OPTForCausalLM": ("OPTForCausalLM", OPT),
    "trl-internal-testing/tiny-Phi3ForCausalLM": ("Phi3ForCausalLM", GROUPED),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", GROUPED),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": (
        "Qwen2ForSequenceClassification",
        GROUPED,
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        {**GROUPED, **EXPERTS, "head_dim": 4},
    ),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, **EXPERTS, "head_dim": 4},
    ),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": (
        "Qwen3ForCausalLM",
        {**GROUPED, "head_dim": 4},
    ),
    "trl-internal-testing/tiny-T5ForConditionalGeneration": (
        "T5ForConditionalGeneration",
        T5,
    ),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
}
# Sentence encoders: their names and widths.
ENCODERS: Final = {
    "sentence-transformers/paraphrase-albert-small-v2": 768,
    "sentence-transformers/paraphrase-MiniLM-L3-v2": 384,
}
# The tutorials' model under other names.
ALIASES: Final = (
    "bert-base-cased",
    "google-bert/bert-base-cased",
    "hf-internal-testing/mrpc-bert-base-cased",
)
TEMPLATE: Final = (
    "{% for one in messages %}{{ '[' + one['role'] + ']' + one['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
# Questions, good answers and bad ones, of which trl's tests get datasets in all the forms that its trainers take.
PAIRS: Final = [
    ("What has four legs", "A table.", "A fish."),
    ("What falls in winter", "Snow, now and then.", "The price of ice."),
    ("What is two and two", "Four.", "Five, or so."),
    ("Who rows the boat", "The man with the oars.", "Nobody at all."),
    ("What is round and red", "A ripe tomato.", "A green square."),
    ("Where do trains stop", "At the station.", "In the sky."),
    ("When does the sun rise", "In the morning.", "At midnight."),
    ("What is dark and loud", "A storm at night.", "A candle."),
    ("What grows on a vine", "Grapes.", "Stones."),
    ("What do bakers make", "Bread and rolls.", "Iron."),
]
METRIC: Final = '''"""The share of right answers, in the form that `evaluate.load` finds."""
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int32")
        if self.config_name == "multilabel":
            kind = datasets.Sequence(kind)
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        equal = [one == other for one, other in zip(predictions, references)]
        return {"accuracy": sum(equal) / len(equal)}
'''


def snapshot(home: Path, name: str) -> Path:
    """Make and return the folder of a model's files."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot_folder = folder / "snapshots" / REVISION
    snapshot_folder.mkdir(parents=True)
    return snapshot_folder


def tokenizer() -> Any:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_tokenizer = Tokenizer(
        BPE(
            {word: number for number, word in enumerate([*SPECIAL, *alphabet])},
            [],
            unk_token="<unk>",
        )
    )
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    byte_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), SPECIAL, strict=True))
    special = {f"{kind}_token": token for kind, token in names.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer,
        model_max_length=128,
        cls_token="<s>",
        sep_token="</s>",
        chat_template=TEMPLATE,
        **special,
    )


def spoken(role: str, content: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": role, "content": content}]


def forms() -> dict[str, list[dict[str, Any]]]:
    """Return `PAIRS` in the forms that trl's documentation of datasets names."""
    rows_by_form: dict[str, list[dict[str, Any]]] = {}
    for question, good, bad in PAIRS:
        question_turn = spoken("user", question)
        right, wrong = spoken("assistant", good), spoken("assistant", bad)
        rows: dict[str, dict[str, Any]] = {
            "standard_language_modeling": {"text": f"{question}? {good}"},
            "standard_prompt_only": {"prompt": question},
            "standard_prompt_completion": {
                "prompt": question,
                "completion": f" {good}",
            },
            "standard_preference": {
                "prompt": question,
                "chosen": f" {good}",
                "rejected": f" {bad}",
            },
            "standard_implicit_prompt_preference": {
                "chosen": f"{question} {good}",
                "rejected": f"{question} {bad}",
            },
            "standard_stepwise_supervision": {
                "prompt": question,
                "completions": [good, bad],
                "labels": [True, False],
            },
            "conversational_language_modeling": {"messages": question_turn + right},
            "conversational_prompt_only": {"prompt": question_turn},
            "conversational_prompt_completion": {
                "prompt": question_turn,
                "completion": right,
            },
            "conversational_preference": {
                "prompt": question_turn,
                "chosen": right,
                "rejected": wrong,
            },
            "conversational_implicit_prompt_preference": {
                "chosen": question_turn + right,
                "rejected": question_turn + wrong,
            },
        }
        for name, row in rows.items():
            rows_by_form.setdefault(name, []).append(row)
        for label, answer in ((True, good), (False, bad)):
            row = {"prompt": question, "completion": f" {answer}", "label": label}
            rows_by_form.setdefault("standard_unpaired_preference", []).append(row)
            row = {
                "prompt": question_turn,
                "completion": spoken("assistant", answer),
                "label": label,
            }
            rows_by_form.setdefault("conversational_unpaired_preference", []).append(
                row
            )
    return rows_by_form


def write_dataset(
    home: Path,
    owner: str,
    name: str,
    config: str,
    splits: dict[str, list[dict[str, Any]]],
) -> None:
    """Write a dataset as `datasets` keeps one that it has loaded from the Hub."""
    folder = home / "datasets" / f"{owner}___{name}" / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    split_infos = SplitDict(dataset_name=name)
    features = Dataset.from_list(next(iter(splits.values()))).features
    for split, rows in splits.items():
        with ArrowWriter(
            features=features, path=str(folder / f"{name}-{split}.arrow")
        ) as writer:
            for row in rows:
                writer.write(row)
            count, size = writer.finalize()
        split_infos.add(
            SplitInfo(name=split, num_bytes=size, num_examples=count, dataset_name=name)
        )
    DatasetInfo(
        features=features,
        builder_name=name,
        dataset_name=name,
        config_name=config,
        version="0.0.0",
        splits=split_infos,
    ).write_to_directory(str(folder))


def save_tokenizer(words: Any, folder: Path) -> None:
    """Save a tokenizer under the class name that older transformers know as well."""
    words.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps(
            {
                **json.loads(config.read_text()),
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )


def main(home: Path) -> None:
    """Write all models, and what tutorials need."""
    subprocess.run(
        [sys.executable, str(TESTS_FOLDER / "tutorials" / "make_hub.py"), str(home)],
        check=True,
    )
    bert_snapshot = home / "hub" / "models--bert-base-uncased" / "snapshots" / REVISION
    for name in ALIASES:
        shutil.copytree(bert_snapshot, snapshot(home, name), dirs_exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    words = tokenizer()
    for name, (kind, settings) in MODELS.items():
        transformers.set_seed(0)
        model_class: Any = getattr(transformers, kind)
        folder = snapshot(home, name)
        model_class(model_class.config_class(**settings)).save_pretrained(folder)
        save_tokenizer(words, folder)
    for name, width in ENCODERS.items():
        transformers.set_seed(0)
        inner = home / "encoder" / str(width)
        config = transformers.BertConfig(
            **{**SMALL, "hidden_size": width, "num_hidden_layers": 1}
        )
        transformers.BertModel(config).save_pretrained(inner)
        save_tokenizer(words, inner)
        encoder = models.Transformer(str(inner), max_seq_length=100)
        sentences.SentenceTransformer(
            modules=[encoder, models.Pooling(width)], device="cpu"
        ).save(str(snapshot(home, name)))
    shutil.copytree(home / "datasets" / "glue", home / "datasets" / "nyu-mll___glue")
    for name, rows in forms().items():
        write_dataset(
            home, "trl-internal-testing", "zen", name, {"train": rows, "test": rows[:2]}
        )
    metric = (
        home
        / "modules"
        / "evaluate_modules"
        / "metrics"
        / "evaluate-metric--accuracy"
        / ("a" * 64)
    )
    metric.mkdir(parents=True)
    (metric / "accuracy.py").write_text(METRIC)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
