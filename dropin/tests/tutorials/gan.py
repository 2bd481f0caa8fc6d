"""A GAN: two models and two optimizers in one loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

LATENT = 4


def main():
    set_seed(1)
    accelerator = Accelerator()
    device = accelerator.device
    generator = nn.Sequential(
        nn.Linear(LATENT, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    )
    discriminator = nn.Sequential(
        nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(
        discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999)
    )
    dataloader = DataLoader(
        TensorDataset(torch.randn(44, 2) * 0.1 + 1), batch_size=4, shuffle=True
    )
    generator, discriminator, optimizer_g, optimizer_d, dataloader = (
        accelerator.prepare(
            generator, discriminator, optimizer_g, optimizer_d, dataloader
        )
    )
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(3):
        for (real,) in dataloader:
            real_targets = torch.ones(real.size(0), 1, device=device)
            fake_targets = torch.zeros(real.size(0), 1, device=device)
            optimizer_d.zero_grad()
            error_real = criterion(discriminator(real), real_targets)
            accelerator.backward(error_real)
            fake = generator(torch.randn(real.size(0), LATENT, device=device))
            error_fake = criterion(discriminator(fake.detach()), fake_targets)
            accelerator.backward(error_fake)
            optimizer_d.step()

            optimizer_g.zero_grad()
            error_g = criterion(discriminator(fake), real_targets)
            accelerator.backward(error_g)
            accelerator.clip_grad_norm_(generator.parameters(), 1.0)
            optimizer_g.step()
        losses = torch.stack([error_real, error_fake, error_g]).detach()
        accelerator.print(
            "epoch", epoch, accelerator.reduce(losses, reduction="mean").tolist()
        )
    for name, model in (("generator", generator), ("discriminator", discriminator)):
        state = accelerator.get_state_dict(model)
        accelerator.print(
            name,
            sum(value.double().abs().sum().item() for value in state.values()),
            *state,
        )


if __name__ == "__main__":
    main()
