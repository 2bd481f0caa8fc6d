"""Train a BERT to fill in masked characters of Python's sources, with the Trainer and a custom collator.

python examples/masked_lm.py
hasten launch --num_processes 2 examples/masked_lm.py
hasten report runs/masked_lm -o report.html
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from hasten import Trainer, TrainingArguments, set_seed

MASK, VOCABULARY = 256, 257  # characters are their own codes
SHARE = 0.15


def main() -> None:
    """Train, and print how well the model fills in hidden characters of unseen text."""
    args = read_arguments()
    set_seed(args.seed)
    rows = read_rows(args.megabytes, args.context)
    num_held_out = max(len(rows) // 10, 1)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        num_hidden_layers=args.depth,
        num_attention_heads=max(args.width // 32, 1),
        intermediate_size=4 * args.width,
        max_position_embeddings=args.context,
        pad_token_id=None,
    )
    trainer = Trainer(
        BertForMaskedLM(config),
        TrainingArguments(
            str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.lr,
            warmup_steps=0.1,
            lr_scheduler_type="cosine",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=max(args.steps // 4, 1),
            save_strategy="no",
            seed=args.seed,
            run_name="masked_lm",
            remove_unused_columns=False,  # the collator makes the labels
        ),
        train_dataset=rows[num_held_out:],
        eval_dataset=[
            mask_row(row, torch.Generator().manual_seed(index))
            for index, row in enumerate(rows[:num_held_out])
        ],
        data_collator=collate_rows,
    )
    trainer.train()
    # the mean over all masked characters, on any number of processes
    loss = trainer.evaluate()["eval_loss"]
    trainer.accelerator.print(
        f"perplexity {math.exp(loss):.2f} of a masked character in {num_held_out} held-out rows"
    )
    trainer.save_model()


def collate_rows(rows: Sequence[Tensor | dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mask rows that are not masked yet, anew each time they are read, and stack them."""
    done = [row if isinstance(row, dict) else mask_row(row) for row in rows]
    return {name: torch.stack([row[name] for row in done]) for name in done[0]}


def mask_row(
    row: Tensor, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Hide some characters; the labels of the others are -100, which the loss leaves out."""
    hidden = torch.rand(row.shape, generator=generator) < SHARE
    hidden[0] = True  # at least one
    return {
        "input_ids": row.masked_fill(hidden, MASK),
        "labels": row.masked_fill(~hidden, -100),
    }


def read_rows(megabytes: float, context: int) -> list[Tensor]:
    """Return the beginning of the standard library in rows of `context` characters."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > megabytes * 1e6:
            break
    codes = torch.tensor(list(text[: int(megabytes * 1e6)]))
    return list(codes[: len(codes) // context * context].view(-1, context))


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description="Fill in masked characters of Python sources."
    )
    parser.add_argument("--steps", type=int, default=1000, help="updates")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--megabytes", type=float, default=2.0, help="how much of the library is read"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/masked_lm"),
        help="folder for metrics and model",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
