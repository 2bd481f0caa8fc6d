"""trl's SFTTrainer for a few steps. Usage: sft.py FOLDER OUT.json"""

import random

from datasets import Dataset
from outcome import SHORT, history, record, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
    word_tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="<unk>"
        )
    )
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def data():
    chance = random.Random(0)
    line = lambda: " ".join(  # noqa: E731
        f"w{chance.randrange(60)}" for _ in range(chance.randint(4, 14))
    )
    return Dataset.from_list([{"text": line()} for _ in range(20)])


def main(folder):
    set_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    args = SFTConfig(
        folder,
        max_steps=4,
        learning_rate=1e-2,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        **SHORT,
    )
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=data(), processing_class=tokenizer()
    )
    trainer.train()
    log_keys = (
        "loss",
        "grad_norm",
        "learning_rate",
        "mean_token_accuracy",
        "num_tokens",
        "entropy",
    )
    return {
        "log": history(trainer, *log_keys),
        "weights": weights(trainer.model.parameters()),
    }


if __name__ == "__main__":
    record(main)
