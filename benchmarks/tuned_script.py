"""The training script that benchmarks/tuned.py gives to `hasten tune`: random weights and made-up data, nothing to download.

python benchmarks/tuned_script.py --model gpt2          # 124 M parameters, batches of 16 x 1024 tokens, bf16
python benchmarks/tuned_script.py --model tiny          # a step that only the host's calls take time for, fp32
python benchmarks/tuned_script.py --model gpt2 --small  # to see on a CPU that it runs
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 8
"""Batches that are learnt over and over."""


class Block(nn.Module):
    """One pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """A GPT of the size of GPT-2 small (124 M parameters, tied head) that returns its loss."""

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Classifier(nn.Module):
    """Three small layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def model_of(kind: str, small: bool, device: torch.device | str = "cpu") -> nn.Module:
    """The model, with the same weights in every run on the same device."""
    torch.manual_seed(0)
    with torch.device(device):
        if kind == "tiny":
            return Classifier()
        sizes = (
            {"vocabulary": 256, "length": 32, "width": 32, "layers": 2, "heads": 2}
            if small
            else {}
        )
        net = GPT2(**sizes)
    for module in net.modules():  # as GPT-2 begins: losses near log(vocabulary)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return net


def data_of(kind: str, small: bool) -> TensorDataset:
    """The samples of all batches."""
    generator = torch.Generator().manual_seed(1)
    rows = batch_of(kind, small) * BATCHES
    if kind == "tiny":
        return TensorDataset(
            torch.randn(rows, 32, generator=generator),
            torch.randint(10, (rows,), generator=generator),
        )
    return TensorDataset(
        torch.randint(
            256 if small else 50304, (rows, 33 if small else 1025), generator=generator
        )
    )


def batch_of(kind: str, small: bool) -> int:
    """Samples in a batch."""
    return 32 if kind == "tiny" else 4 if small else 16


def precision_of(kind: str) -> str:
    """The precision of a model's training."""
    return "no" if kind == "tiny" else "bf16"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, as most scripts make it."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def main() -> None:
    """Train until the steps are done."""
    from hasten import Accelerator

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--model", choices=["gpt2", "tiny"], default="gpt2")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision=precision_of(args.model))
    model = model_of(args.model, args.small, accelerator.device)
    loader: Any = DataLoader(
        data_of(args.model, args.small), batch_size=batch_of(args.model, args.small)
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)

    @accelerator.capture_step
    def train_step(batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = list(loader)  # few enough to stay on the device
    for number in range(args.steps):
        loss = train_step(batches[number % len(batches)])
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
