"""A GAN: two models, two optimizers, two losses, on any number of processes. It learns eight spots on a circle.

hasten launch --cpu --num_processes 2 examples/gan.py
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, set_seed

SPOTS, NOISE = 8, 16


def main() -> None:
    """Train generator and discriminator against each other, and count the spots the generator has found."""
    parser = argparse.ArgumentParser(description="Train a GAN on eight spots.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch_size", type=int, default=256)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    generator, discriminator = build_perceptron(NOISE, 2), build_perceptron(2, 1)
    paint = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judge = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    data = DataLoader(
        TensorDataset(draw_spots(args.samples)),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    # one call prepares both pairs; each optimizer is bound to its model
    generator, discriminator, paint, judge, data = accelerator.prepare(
        generator, discriminator, paint, judge, data
    )

    for epoch in range(1, args.epochs + 1):
        for (real,) in data:
            real_labels, fake_labels = (
                torch.ones(len(real), 1, device=real.device),
                torch.zeros(len(real), 1, device=real.device),
            )
            fake = generator(torch.randn(len(real), NOISE, device=real.device))
            verdicts = discriminator(torch.cat([real, fake.detach()]))
            judge_loss = cross_entropy(
                verdicts, torch.cat([0.9 * real_labels, fake_labels])
            )
            judge.zero_grad()
            accelerator.backward(judge_loss)
            judge.step()

            paint_loss = cross_entropy(discriminator(fake), real_labels)
            paint.zero_grad()
            accelerator.backward(paint_loss)
            paint.step()
        if epoch % 5 == 0 or epoch == args.epochs:
            num_found_spots, hit_share = measure_quality(accelerator, generator)
            accelerator.print(
                f"epoch {epoch}: {num_found_spots} of {SPOTS} spots found, {hit_share:.0%} of the samples on a spot, "
                f"losses {judge_loss.item():.2f} / {paint_loss.item():.2f}"
            )
    accelerator.end_training()


def build_perceptron(inputs: int, outputs: int) -> nn.Module:
    """Return a network of two hidden layers."""
    width = 128
    return nn.Sequential(
        *(
            nn.Linear(inputs, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
        ),
        nn.Linear(width, outputs),
    )


def spot_centers() -> Tensor:
    """Return the middles of the spots, on a circle of radius 2."""
    angles = torch.arange(SPOTS) * (2 * math.pi / SPOTS)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def draw_spots(num: int) -> Tensor:
    """Return points scattered closely around the middles."""
    return spot_centers()[torch.randint(SPOTS, (num,))] + 0.1 * torch.randn(num, 2)


def measure_quality(
    accelerator: Accelerator, generator: nn.Module
) -> tuple[int, float]:
    """Return how many spots are hit by at least one in a hundred samples, and the share of samples that hit one."""
    with torch.no_grad():
        samples = accelerator.gather(
            generator(torch.randn(1000, NOISE, device=accelerator.device))
        )
    distance, spot = torch.cdist(samples.cpu(), spot_centers()).min(dim=1)
    hits = torch.bincount(spot[distance < 0.5], minlength=SPOTS)
    return int((hits > len(samples) / 100).sum()), (
        distance < 0.5
    ).float().mean().item()


if __name__ == "__main__":
    main()
