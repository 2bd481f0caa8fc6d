"""sentence-transformers' trainer for a few steps. Usage: sentences.py FOLDER OUT.json"""

import os
import random
from pathlib import Path

from datasets import Dataset
from outcome import SHORT, TINY, history, record, weights
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(98))]


def model(folder):
    set_seed(3)
    tokens = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"
        )
    )
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    BertModel(BertConfig(**TINY)).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    words = models.Transformer(folder, max_seq_length=12)
    return SentenceTransformer(
        modules=[words, models.Pooling(words.get_word_embedding_dimension())],
        device="cpu",
    )


def data():
    chance = random.Random(0)
    line = lambda: " ".join(chance.choice(WORDS[2:]) for _ in range(6))  # noqa: E731
    return Dataset.from_list(
        [
            {"anchor": line(), "positive": line(), "label": chance.random()}
            for _ in range(24)
        ]
    )


def main(folder):
    # each process writes and reads its own
    encoder = model(str(Path(folder) / f"model_{os.environ.get('RANK', '0')}"))
    args = SentenceTransformerTrainingArguments(
        folder, num_train_epochs=1, learning_rate=1e-3, save_strategy="no", **SHORT
    )
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=args,
        train_dataset=data(),
        loss=losses.CosineSimilarityLoss(encoder),
    )
    trainer.train()
    return {
        "log": history(trainer, "loss", "grad_norm", "learning_rate", "step"),
        "weights": weights(encoder.parameters()),
    }


if __name__ == "__main__":
    record(main)
