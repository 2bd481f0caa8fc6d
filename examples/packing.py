"""Sequence packing: lines of Python's source files share rows of a token budget instead of being padded.

hasten launch --cpu --num_processes 2 examples/packing.py
"""

from __future__ import annotations

import argparse

import torch
from char_lm import ALPHABET, read_sources
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hasten import Accelerator, set_seed
from hasten.data import PackedBatchSampler, PackedCollator, num_label_tokens


def main() -> None:
    """Train on packed lines; the gradient is that of the lines one by one, averaged over their tokens."""
    parser = argparse.ArgumentParser(
        description="Train a character model on packed lines."
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_tokens", type=int, default=1024)
    parser.add_argument("--megabytes", type=float, default=0.5)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    lines = read_lines(args.megabytes, args.max_tokens)
    lengths = [len(line["input_ids"]) for line in lines]
    sampler = PackedBatchSampler(lengths, args.max_tokens)
    tokens = sum(lengths)
    accelerator.print(
        f"{len(lines)} lines in {len(sampler)} rows of {args.max_tokens}: {tokens / (len(sampler) * args.max_tokens):.1%} of the "
        f"places are tokens; padded to the longest line it would be {tokens / (len(lines) * max(lengths)):.1%}"
    )
    loader = DataLoader(
        lines, batch_sampler=sampler, collate_fn=PackedCollator(transformers=True)
    )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in accelerator.epochs(args.epochs):
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(
                loss, weight=num_label_tokens(batch["labels"])
            )  # rows hold different numbers of labels
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"epoch {epoch + 1}, step {step}: loss {mean:.3f}")
    accelerator.print(
        f"last loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
    )
    accelerator.end_training()


def read_lines(megabytes: float, longest: int) -> list[dict[str, list[int]]]:
    """Return the lines of Python's source files that are not blank, as codes of their characters."""
    lines = (
        line[:longest] for line in read_sources(megabytes).splitlines(keepends=True)
    )
    return [
        {"input_ids": [min(code, ALPHABET - 1) for code in line]}
        for line in lines
        if len(line) > 1
    ]


if __name__ == "__main__":
    main()
