"""A script that says how many devices it was started on."""

import torch

from hasten.runtime.devices import choose_device


def main() -> None:
    device_type = choose_device(0).type
    if torch.accelerator.is_available():
        count = torch.accelerator.device_count()
    else:
        count = 0
    device_name = {"cpu": "GPUs", "cuda": "GPUs"}.get(
        device_type, f"{device_type.upper()}s"
    )
    print(f"Successfully ran on {count} {device_name}")  # noqa: T201  what the script is for
