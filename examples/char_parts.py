"""Code shared by the examples of one axis each: a transformer block, the share of parameters on a process, and the report of losses."""

from __future__ import annotations

from char_lm import ALPHABET
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator


class Block(nn.Module):
    """Attention and a perceptron; `-1` heads in a view, because a process may hold only some of them."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after this block."""
        h = self.norm_1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def print_share(
    accelerator: Accelerator, model: nn.Module, num_parameters: int
) -> None:
    """Print how many of the model's parameters a process holds."""
    num_local_parameters = sum(
        getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters()
    )
    accelerator.print(
        f"{num_parameters:,} parameters, {num_local_parameters:,} of them ({num_local_parameters / num_parameters:.0%}) on each process"
    )


class Report:
    """Prints the mean loss of all processes, every 20 steps and at the end."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.losses: list[float] = []

    def add(self, loss: Tensor) -> None:
        """Record the loss of one step."""
        self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        if len(self.losses) % 20 == 1:
            step = len(self.losses) - 1
            self.accelerator.print(
                f"step {step}: loss {self.losses[-1]:.3f} (a guess among {ALPHABET} letters is 4.852)"
            )

    def end(self) -> None:
        """Print the first and the last loss."""
        self.accelerator.print(f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}")
