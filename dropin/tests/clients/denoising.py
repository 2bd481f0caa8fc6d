"""denoising-diffusion-pytorch's Trainer: a milestone, going on from it, samples. Usage: denoising.py FOLDER OUT.json"""

import os
import random
import sys
from pathlib import Path

import torch
from outcome import record, weights
from PIL import Image

# Importing torchvision registers shapes for these operators even where its compiled ones do not load, as those of the
# CUDA build beside a CPU build of torch. They belong to detection models; transforms and `save_image` are pure Python.
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
try:
    import torchvision  # noqa: F401
except RuntimeError:
    DECLARED = torch.library.Library("torchvision", "DEF")
    for signature in OPERATORS:
        DECLARED.define(signature)
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "torchvision"
    ]:
        del sys.modules[name]

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet  # noqa: E402
from denoising_diffusion_pytorch import denoising_diffusion_pytorch as client  # noqa: E402

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

# The original's device on several CPU processes is `cpu:0`, which torch.load does not know: `Trainer.load` fails there.
torch.serialization.register_package(
    100,
    lambda storage: None,
    lambda storage, location: storage if location == "cpu:0" else None,
)
SIZE = 8


def pictures(folder):
    """A folder of one hundred small pictures: the Trainer takes no fewer."""
    folder.mkdir(parents=True)
    drawn = torch.randint(
        0,
        256,
        (100, SIZE, SIZE, 3),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.uint8,
    )
    for number, picture in enumerate(drawn):
        Image.fromarray(picture.numpy()).save(folder / f"{number:03}.png")
    return folder


class Run:
    """A Trainer that keeps every loss."""

    def __init__(self, shown, results, steps, **options):
        AcceleratorState._reset_state()
        random.seed(6)
        torch.manual_seed(6)
        net = Unet(
            dim=8,
            dim_mults=(1, 2),
            full_attn=(False, True),
            attn_heads=2,
            attn_dim_head=4,
            flash_attn=False,
        )
        model = GaussianDiffusion(net, image_size=SIZE, timesteps=12)
        self.losses = []
        model.register_forward_hook(
            lambda module, inputs, loss: self.losses.append(loss.item())
        )
        self.trainer = Trainer(
            model, str(shown), train_batch_size=8, gradient_accumulate_every=2, train_lr=1e-3, train_num_steps=steps,
            ema_update_every=1, ema_decay=0.9, save_and_sample_every=4, num_samples=4, results_folder=str(results),
            calculate_fid=False, **options,
        )  # fmt: skip
        self.trainer.ds.paths.sort()
        if self.trainer.accelerator.is_main_process:
            # it averages from the first step on, not after one hundred
            self.trainer.ema.update_after_step = 0

    def outcome(self):
        """The losses of every rank, the weights, and what the main process sampled from the average."""
        accelerator = self.trainer.accelerator
        accelerator.wait_for_everyone()
        report = {
            "step": self.trainer.step,
            "losses": accelerator.gather(torch.tensor(self.losses)).tolist(),
            "weights": weights(self.trainer.model.parameters()),
        }
        if accelerator.is_main_process:
            average = self.trainer.ema.ema_model
            report["average"] = weights(average.parameters())
            average.eval()
            torch.manual_seed(2)
            report["samples"] = average.sample(batch_size=2).flatten().tolist()
        return report


def train(shown, results, **options):
    """Five steps with a milestone after the fourth, and three more of another Trainer that goes on from there."""
    results.mkdir(parents=True, exist_ok=True)
    run = Run(shown, results, 5, **options)
    run.trainer.train()
    reports = {"first": run.outcome()}
    with Image.open(results / "sample-1.png") as picture:
        reports["picture"] = list(picture.tobytes())
    resumed_run = Run(shown, results, 7, **options)
    resumed_run.trainer.load(1)
    resumed_run.trainer.train()
    return reports | {"after": resumed_run.outcome()}


def told(split_batches, mixed_precision):
    """The Trainer's Accelerator, with its settings in the form that both packages follow."""
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=split_batches),
        mixed_precision=mixed_precision,
    )


def main(folder):
    root_folder = Path(folder)
    shown = pictures(root_folder / f"pictures-{os.environ.get('RANK', '0')}")
    reports = {
        "each": train(shown, root_folder / "each", split_batches=False),
        # its default; the original takes the argument and does nothing with it
        "split": train(shown, root_folder / "split"),
    }
    client.Accelerator = told
    return reports | {
        "told": train(
            shown, root_folder / "told", amp=True, mixed_precision_type="bf16"
        )
    }


if __name__ == "__main__":
    record(main)
