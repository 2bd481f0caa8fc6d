"""Who does what: the main process first, work on one process, printing once, splitting work for inference."""

import os

import torch

from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object

logger = get_logger(__name__)


def main():
    accelerator = Accelerator()
    with accelerator.main_process_first():
        first = not os.path.exists("cache.txt")
        if accelerator.is_main_process:
            with open("cache.txt", "w") as file:
                file.write("prepared")
    accelerator.print("found it missing", gather_object([first]))
    with accelerator.local_main_process_first():
        text = open("cache.txt").read()  # noqa: SIM115
    accelerator.print("read", gather_object([text]))

    @accelerator.on_main_process
    def on_main():
        return "main"

    @accelerator.on_local_main_process
    def on_local_main():
        return "local main"

    @accelerator.on_last_process
    def on_last():
        return "last"

    @accelerator.on_process(process_index=0)
    def on_zero():
        return "zero"

    accelerator.print(
        gather_object([[on_main(), on_local_main(), on_last(), on_zero()]])
    )
    logger.warning("said once", main_process_only=True)
    accelerator.wait_for_everyone()

    state = PartialState()
    prompts = [f"prompt {number}" for number in range(5)]
    with state.split_between_processes(prompts) as share:
        answers = [prompt.upper() for prompt in share]
    accelerator.print("answers", gather_object(answers))
    with state.split_between_processes(prompts, apply_padding=True) as share:
        padded = accelerator.gather(
            torch.tensor([float(prompt.split()[1]) for prompt in share])
        )
    accelerator.print("padded", padded[: len(prompts)].tolist())

    if accelerator.is_last_process:
        accelerator.set_trigger()
    accelerator.print(
        "stop", accelerator.check_trigger(), "and again", accelerator.check_trigger()
    )
    accelerator.print(
        "main", gather_object([accelerator.is_main_process]), accelerator.num_processes
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
