"""A training loop with diffusers' models, schedulers, EMA and save hooks, stopped and resumed. Usage: painting.py FOLDER OUT.json"""

from pathlib import Path

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from outcome import record, weights
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

SHAPE = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}


def train(folder, first, last, resume=None):  # noqa: C901 — one script, as users write it
    """The losses of updates `first` to `last`, and the weights of the model and of its average."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(4)
    model = UNet2DModel(**SHAPE)
    average = EMAModel(
        model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config
    )

    def save(models, weights, output_dir):
        if accelerator.is_main_process:
            average.save_pretrained(str(Path(output_dir) / "unet_ema"))
            for prepared_model in models:
                accelerator.unwrap_model(prepared_model).save_pretrained(
                    str(Path(output_dir) / "unet")
                )
                weights.pop()

    def load(models, input_dir):
        loaded_average = EMAModel.from_pretrained(
            str(Path(input_dir) / "unet_ema"), UNet2DModel
        )
        average.load_state_dict(loaded_average.state_dict())
        for _ in range(len(models)):
            loaded_model = models.pop()
            loaded_model.load_state_dict(
                UNet2DModel.from_pretrained(input_dir, subfolder="unet").state_dict()
            )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    pictures = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(pictures), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=12 * accelerator.num_processes,
    )
    noise_of = DDPMScheduler(num_train_timesteps=50)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, schedule
    )
    if resume:
        accelerator.load_state(resume)
    losses, done = [], first
    drawn = torch.Generator().manual_seed(9 + first)
    while done < last:
        for (clean,) in loader:
            with accelerator.accumulate(model):
                noise = torch.randn(clean.shape, generator=drawn)
                steps = torch.randint(0, 50, (len(clean),), generator=drawn)
                loss = torch.nn.functional.mse_loss(
                    model(noise_of.add_noise(clean, noise, steps), steps).sample, noise
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
                done += 1
            losses.append(float(accelerator.gather(loss.detach().repeat(1)).mean()))
            if done >= last:
                break
    if not resume:
        accelerator.save_state(folder)
    final_weights = [weights(model.parameters()), weights(average.shadow_params)]
    accelerator.wait_for_everyone()
    return {"losses": losses, "weights": final_weights, "rate": schedule.get_last_lr()}


def main(folder):
    state_folder = str(Path(folder) / "state")
    return {
        "first": train(state_folder, 0, 5),
        "after": train(state_folder, 5, 9, resume=state_folder),
    }


if __name__ == "__main__":
    record(main)
