"""Pipelines of diffusers whose models wait in host memory: the pictures of models that stay."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from hasten.optional import available

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not available("diffusers", ">=0.40"), reason="diffusers is not installed"
    ),
]
# Any in this file: pipelines of another library, whose classes are untyped.


def make() -> Any:
    """Two tiny models that take turns, as in every latent diffusion."""
    library: Any = import_module("diffusers")

    class Painter(library.DiffusionPipeline):  # type: ignore[misc]  # known when it is imported
        model_cpu_offload_seq = "unet->vae"

        def __init__(self, unet: Any, vae: Any, scheduler: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet, vae=vae, scheduler=scheduler)

        @torch.no_grad()
        def __call__(self) -> torch.Tensor:
            drawn = torch.Generator().manual_seed(1)
            x = torch.randn(1, 4, 8, 8, generator=drawn)
            self.scheduler.set_timesteps(3)
            for step in self.scheduler.timesteps:
                x = self.scheduler.step(
                    self.unet(x, step).sample, step, x, generator=drawn
                ).prev_sample
            picture: torch.Tensor = self.vae.decode(x).sample
            self.maybe_free_model_hooks()
            return picture

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"norm_num_groups": 4, "sample_size": 8}
    unet = library.UNet2DModel(
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **sizes,
    )
    vae = library.AutoencoderKL(latent_channels=4, block_out_channels=(8,), **sizes)
    return Painter(
        unet.eval(), vae.eval(), library.DDPMScheduler(num_train_timesteps=10)
    )


@pytest.mark.parametrize(
    "offload_method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"]
)
def test_pictures_are_the_same_when_models_take_turns(offload_method: str) -> None:
    expected_picture = make()()
    painter = make()
    getattr(painter, offload_method)(device="cpu")
    for _ in range(2):
        assert torch.equal(painter(), expected_picture)
    assert hasattr(painter.unet, "_hf_hook")
    painter.remove_all_hooks()
    assert not any(hasattr(module, "_hf_hook") for module in painter.unet.modules())
    assert torch.equal(painter(), expected_picture)
