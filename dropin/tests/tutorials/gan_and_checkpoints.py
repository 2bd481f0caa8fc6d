"""A GAN's two models with accumulation, trackers, checkpoints and small collectives in one loop."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__)


class FileTracker(GeneralTracker):
    name = "file"
    requires_logging_directory = False

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.path

    def store_init_configuration(self, values):
        self.log({"config": values})

    def log(self, values, step=None, **kwargs):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def main():
    config = ProjectConfiguration(project_dir="gan", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=FileTracker("gan.jsonl"), project_config=config)
    set_seed(1)
    logger.info("starting")
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=4, shuffle=True)
    generator, critic, g_optimizer, c_optimizer, loader = accelerator.prepare(
        generator, critic, g_optimizer, c_optimizer, loader
    )
    accelerator.init_trackers("gan", config={"lr": 1e-2})
    loss_fn = nn.BCEWithLogitsLoss()
    step = 0
    for _ in range(2):
        for (real,) in loader:
            noise = torch.randn(real.shape[0], 4, device=accelerator.device)
            with accelerator.accumulate(critic):
                scores = critic(torch.cat([real, generator(noise).detach()]))
                truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(accelerator.device)
                c_loss = loss_fn(scores, truth)
                accelerator.backward(c_loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(critic.parameters(), 1.0)
                c_optimizer.step()
                c_optimizer.zero_grad()
            with accelerator.accumulate(generator):
                g_loss = loss_fn(critic(generator(noise)), torch.ones(len(real), 1, device=accelerator.device))
                accelerator.backward(g_loss)
                g_optimizer.step()
                g_optimizer.zero_grad()
            step += 1
            losses = accelerator.reduce(torch.stack([c_loss.detach(), g_loss.detach()]), "mean")
            accelerator.log({"critic": losses[0].item(), "generator": losses[1].item()}, step=step)
        accelerator.save_state()
    accelerator.wait_for_everyone()
    accelerator.load_state(os.path.join("gan", "checkpoints", "checkpoint_1"))
    if step > 3 and accelerator.is_main_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.end_training()
    accelerator.print("done")


if __name__ == "__main__":
    main()
