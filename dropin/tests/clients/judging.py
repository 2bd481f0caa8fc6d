"""lm-eval's language models: likelihoods and generation of a tiny GPT-2. Usage: judging.py FOLDER OUT.json"""

from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from outcome import record
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

WORDS = ["<end>", "<unknown>", *(f"w{number}" for number in range(98))]


def asked(kind, *arguments):
    return [
        Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)
    ]


def main(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    raw = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"
        )
    )
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unknown>",
        eos_token="<end>",
        pad_token="<end>",
    )
    set_seed(2)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=100,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model_folder = str(Path(folder) / "model")
    model.save_pretrained(model_folder)
    words.save_pretrained(model_folder)
    judge = HFLM(
        pretrained=model_folder,
        device="cpu",
        dtype="float32",
        batch_size=2,
        max_length=32,
    )
    texts = [
        (f"w{n} w{n + 1} w{n + 2}", f" w{n + 3} w{n * 2 % 90}") for n in range(1, 9)
    ]
    rolling = [(" ".join(f"w{(n * k) % 97}" for k in range(1, 40)),) for n in (3, 5)]
    drawn = [
        (f"w{n} w{n + 4}", {"until": ["w9"], "max_gen_toks": 5, "do_sample": False})
        for n in (1, 2, 3)
    ]
    return {
        "likelihoods": [
            list(likelihood)
            for likelihood in judge.loglikelihood(asked("loglikelihood", *texts))
        ],
        "rolling": list(
            judge.loglikelihood_rolling(asked("loglikelihood_rolling", *rolling))
        ),
        "drawn": list(judge.generate_until(asked("generate_until", *drawn))),
    }


if __name__ == "__main__":
    record(main)
