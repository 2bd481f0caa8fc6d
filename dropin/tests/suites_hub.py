"""Fabricate a Hub cache of tiny random models under the names that clients' test suites load: suites_hub.py FOLDER"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

# Any in this file: classes of other libraries, which are untyped.
transformers: Any = import_module("transformers")
sentences: Any = import_module("sentence_transformers")
models: Any = import_module("sentence_transformers.models")
HERE: Final = Path(__file__).parent
REVISION: Final = "0123456789abcdef0123456789abcdef01234567"
SPECIAL: Final = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
VOCABULARY: Final = 1024
NARROW: Final = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: Final = {
    **NARROW,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
}
GROUPED: Final = {**SMALL, "num_key_value_heads": 2}
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
    "hf-internal-testing/Mixtral-tiny": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("MistralForCausalLM", GROUPED),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    "openai-community/gpt2": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", OPT),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", GROUPED),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", BART),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", SMALL),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", SMALL),
    "peft-internal-testing/tiny-random-BloomForCausalLM": ("BloomForCausalLM", {**SMALL, "n_head": 4, "n_layer": 2}),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", OPT),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": ("RobertaForSequenceClassification", SMALL),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", SMALL),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", GROUPED),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
}
# Sentence encoders: their names and widths.
ENCODERS: Final = {
    "sentence-transformers/paraphrase-albert-small-v2": 768,
    "sentence-transformers/paraphrase-MiniLM-L3-v2": 384,
}
# The tutorials' model under other names.
ALIASES: Final = ("bert-base-cased", "google-bert/bert-base-cased", "hf-internal-testing/mrpc-bert-base-cased")
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
    made = folder / "snapshots" / REVISION
    made.mkdir(parents=True)
    return made


def tokenizer() -> Any:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({word: number for number, word in enumerate([*SPECIAL, *alphabet])}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), SPECIAL, strict=True))
    special = {f"{kind}_token": token for kind, token in names.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=128, cls_token="<s>", sep_token="</s>", **special
    )


def main(home: Path) -> None:
    """Write all models, and what tutorials need."""
    subprocess.run([sys.executable, str(HERE / "tutorials" / "make_hub.py"), str(home)], check=True)
    known = home / "hub" / "models--bert-base-uncased" / "snapshots" / REVISION
    for name in ALIASES:
        shutil.copytree(known, snapshot(home, name), dirs_exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    words = tokenizer()
    for name, (kind, settings) in MODELS.items():
        transformers.set_seed(0)
        made: Any = getattr(transformers, kind)
        folder = snapshot(home, name)
        made(made.config_class(**settings)).save_pretrained(folder)
        words.save_pretrained(folder)
    for name, width in ENCODERS.items():
        transformers.set_seed(0)
        inner = home / "encoder" / str(width)
        config = transformers.BertConfig(**{**SMALL, "hidden_size": width, "num_hidden_layers": 1})
        transformers.BertModel(config).save_pretrained(inner)
        words.save_pretrained(inner)
        encoder = models.Transformer(str(inner), max_seq_length=100)
        sentences.SentenceTransformer(modules=[encoder, models.Pooling(width)], device="cpu").save(
            str(snapshot(home, name))
        )
    metric = home / "modules" / "evaluate_modules" / "metrics" / "evaluate-metric--accuracy" / ("a" * 64)
    metric.mkdir(parents=True)
    (metric / "accuracy.py").write_text(METRIC)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
