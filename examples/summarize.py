"""Train an encoder-decoder (T5) to write the first line of a docstring from a function's code: summarization, without a download.

python examples/summarize.py
hasten launch --num_processes 2 examples/summarize.py --mixed_precision bf16
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from hasten import Accelerator, map_dataset, set_seed

PAD, END, FIRST = 0, 1, 2  # a byte b is the token FIRST + b


class Pair(NamedTuple):
    """The code of a function and the first line of its docstring."""

    code: str
    summary: str


def main() -> None:
    """Train on most functions, and summarize held-out ones on all processes."""
    args = read_arguments()
    set_seed(args.seed)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        log_with="jsonl",
        project_dir=args.out,
    )
    pairs = read_pairs(args.limit)
    held_out_pairs, train_pairs = pairs[: args.held_out], pairs[args.held_out :]
    # by default the size of t5-small: 44 M parameters without its vocabulary
    config = T5Config(
        vocab_size=FIRST + 256,
        d_model=args.width,
        d_kv=64,
        d_ff=4 * args.width,
        num_layers=args.depth,
        num_heads=max(args.width // 64, 1),
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train = DataLoader(
        train_pairs,
        batch_size=args.batch_size,
        shuffle=True,
        collate_fn=collate_pairs,
        drop_last=True,
    )  # type: ignore[arg-type]
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    accelerator.init_trackers("summarize", config=vars(args))
    losses: list[float] = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in (bar := accelerator.progress(train, desc=f"epoch {epoch}")):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                # summaries have different lengths: the gradient is the mean over all their tokens, on all processes
                accelerator.backward(loss, weight=(batch["labels"] != -100).sum())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            bar.show(loss=loss)
            accelerator.log({"loss": loss})
    accelerator.save_model(model, args.out / "model")

    written = write_summaries(
        accelerator, accelerator.unwrap_model(model), held_out_pairs, args.length
    )
    for pair, words in list(zip(held_out_pairs, written, strict=True))[:3]:
        accelerator.print(f"{pair.summary!r} -> {words!r}")
    accelerator.print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {len(written)} summaries of {len(train_pairs)} functions learned"
    )
    accelerator.end_training()


@torch.no_grad()
def write_summaries(
    accelerator: Accelerator, model: torch.nn.Module, pairs: Sequence[Pair], length: int
) -> list[str]:
    """The summaries of all pairs, in order and on every process; each process writes a part of them."""
    model.eval()

    def write_summary(pair: Pair) -> str:
        tokens = torch.tensor([encode_text(pair.code, 256)], device=accelerator.device)
        written = model.generate(tokens, max_new_tokens=length, do_sample=False)  # type: ignore[operator]
        return bytes(
            int(token) - FIRST for token in written[0] if token >= FIRST
        ).decode("utf-8", "replace")

    return map_dataset(accelerator, write_summary, pairs)


def encode_text(text: str, max_length: int) -> list[int]:
    """The tokens of a text, with the token that ends it."""
    return [FIRST + byte for byte in text.encode()[: max_length - 1]] + [END]


def collate_pairs(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Pad codes and summaries to the longest of the batch; padding of labels is -100, which the loss leaves out."""
    codes, summaries = (
        [encode_text(pair.code, 256) for pair in pairs],
        [encode_text(pair.summary, 64) for pair in pairs],
    )

    def pad_rows(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

    inputs = pad_rows(codes, PAD)
    return {
        "input_ids": inputs,
        "attention_mask": (inputs != PAD).long(),
        "labels": pad_rows(summaries, -100),
    }


def read_pairs(limit: int) -> list[Pair]:
    """The first functions of the standard library that have a docstring, as pairs."""
    pairs: list[Pair] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pairs += find_documented_functions(path.read_text("utf-8", "replace"))
        if len(pairs) >= limit:
            break
    return pairs[:limit]


def find_documented_functions(source: str) -> Iterator[Pair]:
    """Yield every function with a docstring: its code without it, and its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (words := ast.get_docstring(node)):
            bare_function = ast.FunctionDef(
                **{
                    **vars(node),
                    "body": node.body[1:] or [ast.Pass()],
                    "decorator_list": [],
                }
            )
            yield Pair(
                ast.unparse(ast.fix_missing_locations(bare_function)),
                words.splitlines()[0],
            )


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description="Learn to summarize functions.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument(
        "--accumulate", type=int, default=1, help="batches that make one update"
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--limit", type=int, default=4000, help="functions that are read"
    )
    parser.add_argument(
        "--held_out", type=int, default=32, help="functions kept for the end"
    )
    parser.add_argument(
        "--length", type=int, default=40, help="characters of a summary"
    )
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/summarize"),
        help="folder for metrics and model",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
