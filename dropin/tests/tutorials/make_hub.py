"""Fabricate a Hub cache, so that scripts written against the Hub run unchanged and offline: make_hub.py FOLDER

It holds a tiny random `bert-base-uncased` with its tokenizer, a small made-up `glue/mrpc` and its metric, and pictures.
"""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Features, Value
from datasets.arrow_writer import ArrowWriter
from datasets.info import DatasetInfo
from datasets.splits import SplitDict, SplitInfo
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    set_seed,
)

WORDS = [f"word{number}" for number in range(80)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
REVISION = "0123456789abcdef0123456789abcdef01234567"
HASH = "fedcba9876543210fedcba9876543210fedcba98"


def make_model(home: Path) -> None:
    """A random BERT of two small layers."""
    folder = home / "hub" / "models--bert-base-uncased"
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    set_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,  # learns in a few steps
    )
    BertForSequenceClassification(config).bert.save_pretrained(snapshot)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    word_pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    word_pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    BertTokenizerFast(
        tokenizer_object=word_pieces, vocab=vocabulary, do_lower_case=True
    ).save_pretrained(snapshot)


def make_data(home: Path) -> None:
    """Pairs of sentences: equal ones are paraphrases; the others share no word, so that a tiny model learns it."""
    folder = home / "datasets" / "glue" / "mrpc" / "0.0.0" / HASH
    folder.mkdir(parents=True)
    features = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            "label": ClassLabel(names=["not_equivalent", "equivalent"]),
            "idx": Value("int32"),
        }
    )
    chance = random.Random(0)
    splits = SplitDict(dataset_name="glue")
    for name, size in (("train", 66), ("validation", 22), ("test", 10)):
        with ArrowWriter(
            features=features, path=str(folder / f"glue-{name}.arrow")
        ) as writer:
            for number in range(size):
                first, unrelated = (
                    chance.choices(half, k=chance.randint(4, 10))
                    for half in (WORDS[:40], WORDS[40:])
                )
                is_paraphrase = chance.random() < 0.5
                second = first if is_paraphrase else unrelated
                writer.write(
                    {
                        "sentence1": " ".join(first),
                        "sentence2": " ".join(second),
                        "label": int(is_paraphrase),
                        "idx": number,
                    }
                )
            count, size_bytes = writer.finalize()
        splits.add(
            SplitInfo(
                name=name, num_bytes=size_bytes, num_examples=count, dataset_name="glue"
            )
        )
    info = DatasetInfo(
        features=features,
        builder_name="glue",
        dataset_name="glue",
        config_name="mrpc",
        version="0.0.0",
        splits=splits,
    )
    info.write_to_directory(str(folder))


def make_metric(home: Path) -> None:
    """The metric of that name, where one lies that was downloaded before."""
    folder = (
        home
        / "modules"
        / "evaluate_modules"
        / "metrics"
        / "evaluate-metric--glue"
        / (HASH + HASH)[:64]
    )
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "stand_ins" / "glue.py", folder)


def make_pictures(home: Path) -> None:
    """Small noisy pictures of three breeds, each with a colour of its own."""
    folder = home / "images"
    folder.mkdir()
    chance = np.random.default_rng(0)
    for colour, breed in enumerate(("Abyssinian", "american_bulldog", "Birman")):
        for number in range(24):
            pixels = chance.integers(0, 160, (20, 24, 3))
            pixels[:, :, colour] += 60
            Image.fromarray(pixels.astype(np.uint8)).save(
                folder / f"{breed}_{number}.jpg"
            )


if __name__ == "__main__":
    home = Path(sys.argv[1])
    make_model(home)
    make_data(home)
    make_metric(home)
    make_pictures(home)
