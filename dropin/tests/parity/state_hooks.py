"""Hooks of save_state and load_state: names and files they see, weights they take, and errors they raise."""

import os
import tempfile

import torch

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    folder = os.path.join(tempfile.mkdtemp(), "step_3")
    hook_calls = []

    def save(models, weights, output_dir):
        hook_calls.append(
            [
                os.path.basename(output_dir),
                os.path.isdir(output_dir),
                len(models),
                len(weights),
                sorted(weights[0]),
            ]
        )
        torch.save(weights.pop(), os.path.join(output_dir, "own.bin"))

    def load(models, input_dir):
        hook_calls.append(
            [
                os.path.basename(input_dir),
                len(models),
                os.path.exists(os.path.join(input_dir, "own.bin")),
            ]
        )
        models.pop().load_state_dict(torch.load(os.path.join(input_dir, "own.bin")))

    def fail(*args):
        raise KeyError("mine")

    handles = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    accelerator.save_state(folder)
    saved_weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(folder)
    hook_calls.append(
        [
            torch.equal(model.weight, saved_weight),
            os.path.exists(os.path.join(folder, "model.safetensors")),
        ]
    )
    for handle in handles:
        handle.remove()
    failing = accelerator.register_load_state_pre_hook(fail)
    try:
        accelerator.load_state(folder)
    except Exception as error:
        hook_calls.append([type(error).__name__, str(error)])
    failing.remove()
    failing = accelerator.register_save_state_pre_hook(fail)
    try:
        accelerator.save_state(folder + "_other")
    except Exception as error:
        hook_calls.append([type(error).__name__, str(error)])
    return hook_calls


PROCESSES = (1,)
