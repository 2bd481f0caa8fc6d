"""A character model that learns to write Python from the standard library's sources: accumulation and bf16.

python examples/char_lm.py
hasten launch --num_processes 2 examples/char_lm.py --steps 500
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator, set_seed
from hasten.extending import Progress

ALPHABET = 128  # ASCII; other characters become the last one


class Sources(Dataset[Tensor]):
    """Every window of the text, one character longer than the model's context."""

    def __init__(self, text: bytes, context: int) -> None:
        self.codes = torch.tensor(
            [min(code, ALPHABET - 1) for code in text], dtype=torch.long
        )
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.codes[start : start + self.context + 1]


class Writer(nn.Module):
    """A small decoder-only transformer."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.letters, self.places = (
            nn.Embedding(ALPHABET, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // 32,
                4 * width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        )
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, ALPHABET, bias=False),
        )
        self.head.weight = self.letters.weight  # tied, as usual
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=codes.device
        )
        hidden = self.letters(codes) + self.places(
            torch.arange(length, device=codes.device)
        )
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def main() -> None:
    """Train for some updates, then write a few lines."""
    args = read_arguments()
    set_seed(args.seed)
    # four batches make one update; the forward pass runs in bfloat16, weights and optimizer stay in float32
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate,
        mixed_precision="bf16",
        log_with="jsonl",
        project_dir=args.out,
    )
    data = Sources(read_sources(args.megabytes), args.context)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Writer(args.width, args.depth, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.1
    )
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, loader
    )

    accelerator.init_trackers("char_lm", config=vars(args))
    model.train()
    bits = math.inf
    bar: Progress[Tensor] = accelerator.progress(total=args.steps, desc="updates")
    for codes in repeat_epochs(loader):
        with accelerator.accumulate(model):
            scores = model(codes[:, :-1])
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1).float(), codes[:, 1:].flatten()
            )
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # an update was made
            accelerator.log({"loss": loss})
            bar.show(loss=loss)
            bar.update(
                samples=len(codes) * args.accumulate,
                tokens=codes.numel() * args.accumulate,
            )
            if schedule.last_epoch >= args.steps:
                bits = accelerator.reduce(loss.detach(), "mean").item() / math.log(2)
                break
    bar.close()
    accelerator.print(
        f"{bits:.2f} bits per character after {args.steps} updates of {args.accumulate} batches"
    )
    if accelerator.is_main_process:
        print(
            generate_text(
                accelerator.unwrap_model(model), args.context, "def ", args.write
            )
        )
    accelerator.end_training()


def repeat_epochs(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def read_sources(megabytes: float) -> bytes:
    """Return the beginning of the standard library, file after file."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > megabytes * 1e6:
            break
    return bytes(text[: int(megabytes * 1e6)])


@torch.no_grad()
def generate_text(model: nn.Module, context: int, text: str, num: int) -> str:
    """Return `text` and `num` more characters."""
    model.eval()
    device = next(model.parameters()).device
    codes = torch.tensor([list(text.encode())], device=device)
    for _ in range(num):
        chances = model(codes[:, -context:])[0, -1].float().softmax(dim=0)
        codes = torch.cat([codes, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(codes[0].tolist()).decode("ascii", "replace")


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description="Learn to write Python, character by character."
    )
    parser.add_argument("--steps", type=int, default=1000, help="updates")
    parser.add_argument(
        "--accumulate", type=int, default=4, help="batches that make one update"
    )
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--megabytes", type=float, default=4.0, help="how much of the library is read"
    )
    parser.add_argument(
        "--write", type=int, default=200, help="characters written at the end"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/char_lm"), help="folder for metrics"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
