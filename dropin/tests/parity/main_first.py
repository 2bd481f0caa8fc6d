"""Who runs a block first; decorators; print."""

from accelerate import Accelerator
from accelerate.utils import gather_object


def run() -> object:
    accelerator = Accelerator(cpu=True)
    calls = []
    accelerator.on_main_process(lambda: calls.append("main"))()
    accelerator.on_last_process(lambda: calls.append("last"))()
    accelerator.on_process(lambda: calls.append("one"), process_index=0)()
    with accelerator.main_process_first():
        calls.append("block")
        with accelerator.local_main_process_first():
            calls.append("inner")
    accelerator.wait_for_everyone()
    return gather_object([calls])


PROCESSES = (1, 2)
