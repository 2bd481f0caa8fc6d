"""Clipping where gradients are synchronised."""

from small_loop import train

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def clip(model):
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)

    return train(accelerator, clip)


PROCESSES = (1, 2)
